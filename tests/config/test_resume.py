"""What may change when a run goes on, and how the rest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mprun.config import Composed, compose
from mprun.config.compose import MAY_CHANGE
from mprun.errors import UsageError
from mprun.records.run_folder import RunFolder
from tests.each import each

OTHERS = (
    "precision=bf16_mixed",
    "train.lr=0.5",
    "train.clip_norm=2",
    "seed=3",
    "batch=double",
    "recipe.model.units=8",
)


def keep(*overrides: str) -> None:
    """The configuration of a run in the folder `run`."""
    kept = compose(["run.dir=run", "recipe=linear", "train.epochs=4", *overrides])
    Path("run").mkdir()
    OmegaConf.save(OmegaConf.create(kept.resolved), "run/config.yaml")


def resume(*overrides: str) -> Composed:
    return compose(["run.resume=run", *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        resume(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_run_keeps_its_configuration() -> None:
    keep(*OTHERS)
    before = compose(["recipe=linear", "train.epochs=4", *OTHERS]).config
    after = resume().config
    assert (after.run.dir, after.run.resume) == ("run", "run")
    after.run = before.run
    assert after == before


def test_fields_of_an_earlier_version_are_read_where_they_change_nothing() -> None:
    keep()
    path = Path("run/config.yaml")
    earlier = OmegaConf.load(path)
    earlier.train.optimizer.update({"target": None, "args": {}})
    OmegaConf.save(earlier, path)
    assert resume().config.train.optimizer.name == "sgd"
    earlier.train.optimizer.target = "torch.optim.Adagrad"
    OmegaConf.save(earlier, path)
    assert "is not a valid configuration (train.optimizer.target" in refusal()


@each(
    "override,value",
    [
        ("train.epochs=9", 9),
        ("train.max_steps=null", None),
        ("train.max_time_s=1.5", 1.5),
        ("data.root=elsewhere", "elsewhere"),
    ],
)
def test_what_does_not_touch_the_bits_may_change(override: str, value: object) -> None:
    keep()
    key = override.partition("=")[0]
    assert key in MAY_CHANGE
    assert OmegaConf.select(OmegaConf.create(resume(override).resolved), key) == value


@each(
    "override",
    [
        *("train.lr=0.1", "precision=bf16_mixed", "recipe=mnist", "batch=double"),
        *("train.scheduler=linear", "run.dir=other", "recipe.model.units=4"),
        *("loss_scale=dynamic", "logger=tensorboard", "preset=smoke"),
    ],
)
def test_what_would_change_the_run_is_refused(override: str) -> None:
    keep()
    message = refusal(override)
    assert message.startswith(f"'{override}': a resumed run keeps its configuration")
    assert all(key in message for key in MAY_CHANGE)


@each(
    "override",
    [
        *("precision=bf16_mixed", "batch=double", "recipe=linear", "train.lr=5e-1"),
        *("train.clip_norm=2.0", "train.max_time_s=null", "speed=auto", "run.dir=run"),
        *("recipe.model.units=8", "precision.tf32=false", "+seed=3"),
    ],
)
def test_a_value_may_be_given_again(override: str) -> None:
    keep(*OTHERS)
    assert resume(override).config.seed == 3


@pytest.mark.parametrize("override", ["train.epochs=8", "train.max_steps=5", "train.epochs=null"])
def test_a_schedule_keeps_its_length(override: str) -> None:
    keep("train.scheduler=cosine")
    assert "train.scheduler=cosine was planned" in refusal(override)
    assert resume("train.epochs=4", "train.log_every=2").config.train.epochs == 4


def test_a_wrong_value_is_named_with_the_legal_ones() -> None:
    keep()
    assert "a whole number, or null" in refusal("train.epochs=many")
    assert "legal is 1 or more" in refusal("train.epochs=0")
    assert "there is no field" in refusal("train.epoch=3")


def test_a_folder_that_is_no_run() -> None:
    assert "run/config.yaml cannot be read (No such file" in refusal()
    Path("run").mkdir()
    assert "write the folder of a run" in refusal()
    for text in ("seed: [", "nothing: 1", "seed: many", "- 1", "train: 3", "\0"):
        Path("run/config.yaml").write_text(text, encoding="utf-8")
        assert "is not a valid configuration" in refusal()
    Path("run/config.yaml").write_bytes(b"\xff\xfe\xff")
    assert "is not a valid configuration" in refusal()
    with pytest.raises(UsageError, match=r"run\.resume"):
        compose(["run.resume=''"])


def test_a_run_that_ended_before_anything_was_recorded() -> None:
    RunFolder(Path("run")).close()
    (Path("run") / ".config.yaml.17.tmp").touch()
    assert refusal() == (
        "run.resume=run: the run ended before anything was recorded, so there is nothing to "
        "resume; begin it again with its own overrides: mprun OVERRIDES run.dir=run"
    )
    folder = RunFolder(Path("run"))  # as that command does
    folder.lines([{"kind": "step", "step": 1}])
    folder.close()
    assert "run/config.yaml cannot be read (No such file" in refusal()
    with pytest.raises(UsageError, match="already contains a run"):
        RunFolder(Path("run"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lr: many}", "train.lr: Value 'many' "),
        ("seed: !!timestamp zz", "line 1: could not determine a constructor"),
        ("seed: &a [*a]", "nested more than 50 deep"),
        ("a: " + "[" * 3000, "is not a valid configuration ("),
    ],
)
def test_a_bad_value_in_the_configuration_is_named(text: str, message: str) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(text, encoding="utf-8")
    assert message in refusal("train.epochs=4")
