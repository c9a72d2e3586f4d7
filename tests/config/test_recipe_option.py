"""`recipe=path/to/my.py`: a configuration from a Python file, without YAML or running its code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mprun.config import Config, compose
from mprun.config.compose import parse
from mprun.config.multirun import combinations
from mprun.config.recipe_file import with_absolute_paths
from mprun.config.settings import study_request
from mprun.errors import UsageError
from mprun.records.run_config import variant_hash

BODY = "def model(): ...\ndef data(): ...\n"


def write(text: str = BODY, name: str = "my.py") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path.absolute()


def composed(*words: str) -> Config:
    return compose(words).config


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        compose(words)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_everything_has_a_default() -> None:
    path = write()
    config = composed("recipe=my.py")
    assert (config.recipe.name, config.recipe.file) == ("my", str(path))
    train = config.train
    sizes = (train.batch_size, train.eval_batch_size, train.lr, train.epochs)
    assert sizes == (32, 32, 1e-3, 3)
    assert train.optimizer.name == "adamw"
    assert config.precision.name == "fp32"


def test_evaluation_takes_the_batch_size_that_training_has() -> None:
    write(BODY + 'DEFAULTS = {"train.batch_size": 8}\n')
    assert composed("recipe=my.py").train.eval_batch_size == 8
    assert composed("recipe=my.py", "train.batch_size=5").train.eval_batch_size == 5
    own = composed("recipe=my.py", "train.eval_batch_size=7").train
    assert (own.batch_size, own.eval_batch_size) == (8, 7)


@pytest.mark.parametrize("limit", ["train.max_steps=4", "train.max_time_s=1.5", "train.epochs=2"])
def test_only_a_run_without_a_limit_is_given_epochs(limit: str) -> None:
    write()
    expected = 2 if "epochs" in limit else None
    assert composed("recipe=my.py", limit).train.epochs == expected


def test_defaults_stand_above_mpruns_and_below_presets_and_the_command_line() -> None:
    text = 'DEFAULTS = {"train.lr": 0.5, "train.epochs": 7, "train.optimizer.name": "sgd"}\n'
    write(BODY + text)
    train = composed("recipe=my.py").train
    assert (train.lr, train.epochs, train.optimizer.name) == (0.5, 7, "sgd")
    train = composed("recipe=my.py", "train.lr=0.25", "train.optimizer.name=rmsprop").train
    assert (train.lr, train.epochs, train.optimizer.name) == (0.25, 7, "rmsprop")
    write(BODY + 'DEFAULTS = {"train.eval_batch_size": 99, "train.max_steps": 5}\n')
    train = composed("recipe=my.py", "preset=smoke").train
    assert (train.eval_batch_size, train.max_steps) == (16, 36)


def test_an_edited_file_counts_at_the_next_composition() -> None:
    write(BODY + 'DEFAULTS = {"train.lr": 0.5}\n')
    assert composed("recipe=my.py").train.lr == 0.5
    write(BODY + 'DEFAULTS = {"train.lr": 0.25}\n')
    assert composed("recipe=my.py").train.lr == 0.25


@pytest.mark.parametrize(
    ("defaults", "fragments"),
    [
        ('{"train.lrr": 1}', ["DEFAULTS['train.lrr'] = 1", "did you mean 'train.lr'?"]),
        ('{"train.lr": "x"}', ["DEFAULTS['train.lr'] = 'x'", "train.lr is a number"]),
        ('{"train.batch_size": 0}', ["my.py: DEFAULTS: train.batch_size=0", "legal is 1 or more"]),
        ('{"precision": "bf16_mixed"}', ["DEFAULTS['precision']", "on the command line"]),
        ('{"run.dir": "x"}', ["DEFAULTS['run.dir']", "legal keys are fields of train"]),
        ("[1]", ["line 3: DEFAULTS is read without running the file", "dictionary"]),
        ('{"train.lr": 1 / 3}', ["line 3: DEFAULTS is read without running the file"]),
    ],
)
def test_defaults_that_cannot_be_used_are_refused(defaults: str, fragments: list[str]) -> None:
    path = write(f"{BODY}DEFAULTS = {defaults}\n")
    message = refusal("recipe=my.py")
    assert message.startswith(str(path))
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("def model(:\n", ["my.py: line 1: ", "`def model(:`", "correct the file"]),
        ("x = 1\n  y = 2\n", ["my.py: line 2: unexpected indent"]),
        ("x = '\0'\n", ["my.py", "null bytes"]),
    ],
)
def test_a_file_that_is_no_python_is_refused(text: str, fragments: list[str]) -> None:
    write(text)
    message = refusal("recipe=my.py")
    assert all(fragment in message for fragment in fragments), message


def test_a_file_that_is_missing_is_refused_with_the_way_to_begin_one() -> None:
    message = refusal("recipe=nope.py")
    assert f"recipe={Path.cwd()}/nope.py: there is no such file" in message
    assert "mprun new-recipe nope" in message
    assert "there is no such file" in refusal("recipe='~nobody_of_this_name/my.py'")
    Path("folder.py").mkdir()
    assert "there is no such file" in refusal("recipe=folder.py")


def test_a_name_without_py_is_a_shipped_recipe() -> None:
    write(name="mnist.py")
    assert composed("recipe=mnist").recipe.file is None
    assert composed("recipe=mnist.py").recipe.file == str(Path("mnist.py").absolute())
    write(name="other.py")
    message = refusal("recipe=other")
    assert "or the path of a file; did you mean 'recipe=other.py'?" in message
    assert "write recipe=path/to/my.py" in refusal("recipe.file=other.py")


def test_composing_runs_no_code_of_the_file_and_imports_no_torch() -> None:
    write("raise SystemExit('run')\n" + BODY + 'DEFAULTS = {"train.lr": 0.5}\n')
    code = (
        "import sys; from mprun.config import compose; "
        "print(compose(['recipe=my.py']).config.train.lr, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "0.5 False\n", ended.stderr


def test_text_in_defaults_is_not_interpolated() -> None:
    write(BODY + 'DEFAULTS = {"data.root": "${oc.env:HOME}"}\n', name="a$b/my.py")
    config = composed("recipe='a$b/my.py'")
    assert config.data.root == "${oc.env:HOME}"
    assert config.recipe.file == str(Path("a$b/my.py").absolute())


def test_a_path_with_blanks_and_quotes() -> None:
    path = write(BODY, name="it's a, folder/my recipe.py")
    text = with_absolute_paths(parse(r"recipe='it\'s a, folder/my recipe.py'"))
    config = composed(text)
    assert (config.recipe.name, config.recipe.file) == ("my recipe", str(path))


def test_the_folder_of_a_file_is_no_part_of_a_variant() -> None:
    words = ["train.lr=0.5"]
    hashes = []
    for name in ("a/my.py", "b/my.py", "a/other.py"):
        write(name=name)
        hashes.append(variant_hash(compose([f"recipe={name}", *words]).resolved))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_shipped_recipes_variant_is_what_it_was_before_files() -> None:
    resolved: dict[str, Any] = compose(["recipe=linear"]).resolved
    earlier = {**resolved, "recipe": {k: v for k, v in resolved["recipe"].items() if k != "file"}}
    assert variant_hash(earlier) == variant_hash(resolved)


def test_a_study_keeps_absolute_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = write(name="a.py"), write(name="b.py")
    request = study_request("sweep", ["recipe=a.py,mnist,b.py:Small", "precision=fp32"], None)
    assert request.overrides == [f"recipe='{a}',mnist,'{b}:Small'", "precision=fp32"]
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    (first, *_) = combinations([parse(text) for text in request.overrides])
    assert composed(*first).recipe.file == str(a)
