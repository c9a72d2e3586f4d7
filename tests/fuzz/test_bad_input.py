"""Bad input to every command and in every file that is read: one line, status 1 or 2, no traceback.

The cases are drawn from fixed seeds: 200 in every test run, 5,000 in the exhaustive one.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from mprun.cli.main import main
from mprun.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from mprun.records.run_folder import StudyPlan, write_study_plan
from mprun.train import checkpoint
from tests.fuzz import damage
from tests.study.compare.folders import write_run

pytestmark = pytest.mark.usefixtures("quick_runs", "native_is_fast")

SMALL = (
    "recipe=linear",
    "recipe.model.in_features=4",
    "recipe.model.out_features=2",
    "recipe.model.samples=8",
    "train.batch_size=8",
    "train.max_steps=3",
)
BATCHES = 100
"""Of each kind of input; every test run takes the first few."""
EVERY_RUN = range(4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended, to be copied."""
    run = tmp_path_factory.mktemp("trained") / "run"
    adamw = ("train.optimizer.name=adamw", "train.scheduler=cosine")
    with contextlib.redirect_stdout(None):
        assert main([*SMALL, *adamw, f"run.dir={run}"]) == EXIT_OK
    return run


@pytest.fixture
def run(trained: Path) -> Path:
    """A copy of it, in the current folder."""
    return shutil.copytree(trained, Path("run"))


def answer(*arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it printed on standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, err.getvalue()


def check_refused(arguments: tuple[str, ...], named: tuple[str, ...], shown: object = "") -> None:
    """Check that a command is refused with one printable line that has one of `named`."""
    status, error = answer(*arguments)
    case = f"{arguments} {shown!r}"[:2000]
    lines = [line for line in error.splitlines() if not line.startswith("warning: ")]
    assert status in (EXIT_FAILED, EXIT_USAGE), f"status {status}: {case}"
    assert len(lines) == 1, f"{error}: {case}"
    assert lines[0].isprintable(), f"{lines[0]!r}: {case}"
    assert any(name in lines[0] for name in named), f"{lines[0]}: {case}"


def batches(size: int) -> Callable[[Any], Any]:
    """Run a test with the seeds of `BATCHES` batches, and give it the number of their cases."""

    def mark(test: Any) -> Any:
        test = pytest.mark.parametrize(
            "chances", [(n, size) for n in range(BATCHES)], ids=map(str, range(BATCHES))
        )(test)
        return pytest.mark.representative(*(str(n) for n in EVERY_RUN))(test)

    return mark


def cases(chances: tuple[int, int]) -> Iterator[Random]:
    """A generator of random numbers for each case of a batch."""
    batch, size = chances
    return (Random(f"{batch} {n}") for n in range(size))


@batches(15)
def test_settings_of_commands(chances: tuple[int, int]) -> None:
    for chance in cases(chances):
        case = damage.wrong_setting(chance)
        check_refused(case.arguments, case.named)


@batches(6)
def test_a_summary_that_is_compared(chances: tuple[int, int]) -> None:
    text = (write_run(Path("runs/a")) / "summary.json").read_text(encoding="utf-8")
    for chance in cases(chances):
        data = damage.wrong_json(chance, text)
        Path("runs/a/summary.json").write_bytes(data)
        check_refused(("compare", "runs", "compare.report=false"), ("summary.json",), data[:300])


@batches(4)
def test_lines_of_a_run_that_is_resumed(chances: tuple[int, int], run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for chance in cases(chances):
        place, wrong = chance.randrange(len(lines)), damage.wrong_line(chance)
        (run / "metrics.jsonl").write_bytes(b"".join([*lines[:place], wrong, *lines[place:]]))
        check_refused(
            ("run.resume=run",), (f"metrics.jsonl is damaged: line {place + 1}",), wrong[:99]
        )


@batches(5)
def test_the_configuration_of_a_run_that_is_resumed(chances: tuple[int, int], run: Path) -> None:
    text = (run / "config.yaml").read_text(encoding="utf-8")
    for chance in cases(chances):
        data, named = damage.wrong_config(chance, text)
        (run / "config.yaml").write_bytes(data)
        check_refused(("run.resume=run",), named, data[:1000])


@batches(6)
def test_the_checkpoint_of_a_run_that_is_resumed(chances: tuple[int, int], run: Path) -> None:
    file = checkpoint.path_in(run)
    content, summary = torch.load(file), (run / "summary.json").read_bytes()
    for chance in cases(chances):
        changed = damage.wrong_checkpoint(chance, content)
        torch.save(changed, file)
        check_refused(("run.resume=run",), ("last.pt",), changed)
        assert json.loads((run / "summary.json").read_bytes()) == json.loads(summary)


@batches(4)
def test_a_damaged_checkpoint(chances: tuple[int, int], run: Path) -> None:
    whole = checkpoint.path_in(run).read_bytes()
    for chance in cases(chances):
        Path("weights.pt").write_bytes(damage.damaged(chance, whole))
        words = (*SMALL, "train.init_from=weights.pt", "train.max_steps=1")
        status, error = answer(*words)
        if status == EXIT_OK:  # a byte that means nothing
            continue
        assert status == EXIT_USAGE
        assert error.count("\n") == 1
        assert "weights.pt" in error


@batches(4)
def test_files_of_layers_and_of_ops(chances: tuple[int, int]) -> None:
    for chance in cases(chances):
        by_layer = chance.random() < 0.5
        wrong = damage.wrong_layers(chance) if by_layer else damage.wrong_op_list(chance)
        Path("own.yaml").write_bytes(wrong)
        kind = chance.choice(["lower", "fp32", "promote"])
        own = ("op_lists=hmp", f"op_lists.{kind}_file=own.yaml")
        words = ("precision.layers_file=own.yaml",) if by_layer else own
        command = chance.choice(["train", "trace", "memory", "numerics"])
        check_refused((command, *SMALL, "precision=bf16_mixed", *words), ("own.yaml",), wrong[:200])


@batches(2)
def test_the_plan_of_a_study_that_is_resumed(chances: tuple[int, int]) -> None:
    plan = StudyPlan(
        command="sweep",
        variants={"fp32": ("precision=fp32",), "tf32": ("precision=tf32",)},
        seeds=(0, 1),
        config_dir=None,
        of_trials=("train.max_steps=1",),
    )
    Path("study").mkdir()
    write_study_plan(Path("study"), plan)
    text = Path("study/sweep.json").read_text(encoding="utf-8")
    assert json.loads(text)["seeds"] == list(asdict(plan)["seeds"])
    for chance in cases(chances):
        data = damage.wrong_json(chance, text)
        Path("study/sweep.json").write_bytes(data)
        command = chance.choice(["sweep", "advise", "double"])
        check_refused((command, "run.resume=study"), ("sweep.json",), data[:300])


@batches(2)
def test_options_in_a_folder_of_configurations(chances: tuple[int, int]) -> None:
    Path("own/recipe").mkdir(parents=True)
    for chance in cases(chances):
        text = chance.choice(damage.BROKEN_YAML)
        Path("own/recipe/mine.yaml").write_bytes(text.encode(errors="surrogateescape"))
        command = chance.choice(["train", "trace", "memory", "numerics", "sweep", "advise"])
        words = (command, "--config-dir", "own", "recipe=mine", "precision=fp32")
        check_refused(words, ("mine",), text[:200])


@batches(2)
def test_files_of_a_data_set(chances: tuple[int, int]) -> None:
    raw = Path("sets/MNIST/raw")
    raw.mkdir(parents=True)
    name = "train-labels-idx1-ubyte"
    for chance in cases(chances):
        (raw / name).unlink(missing_ok=True)
        kind = chance.randrange(3)
        if kind == 0:
            (raw / name).write_bytes(chance.randbytes(chance.randrange(100)))
        elif kind == 1:
            (raw / name).symlink_to(chance.choice(["/dev/zero", "/dev/null", "/"]))
        else:
            (raw / name).touch()
        check_refused(("data", "verify", "MNIST", "data.root=sets"), ("missing or damaged",))
