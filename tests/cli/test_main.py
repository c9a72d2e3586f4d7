"""The command line: mistakes end with status 2 and one line, good words with a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mprun import __version__
from mprun.cli.arguments import parse_arguments
from mprun.cli.main import BY_NAME, main
from mprun.config import compose
from mprun.config.reference import options
from mprun.errors import UsageError
from mprun.precision import devices
from mprun.records.run_record import read_lines, read_summary
from mprun.train.assemble.recipe_loading import load_recipe
from tests.cli.processes import Forking

pytestmark = pytest.mark.usefixtures("quick_runs")

LINEAR = ["recipe=linear", "train.max_steps=2"]
RECIPES = ", ".join(options("recipe"))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one printable line that `mprun words` is refused with, and nothing is left behind."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mprun: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), "more than one line, or control characters"
    assert list(Path.cwd().iterdir()) == []
    return err


# What is typed, one word or several; what the answer holds: the word, what is legal, the nearest.
MISTAKES: list[tuple[str | tuple[str, ...], list[str]]] = [
    # Groups
    ("recipe=mnits", ["'recipe=mnits'", f"one of {RECIPES}", "did you mean 'mnist'?"]),
    ("precision=bf16", ["'precision=bf16'", "one of bf16_mixed, bf16_sr"]),
    ("precision='bf 16'", ["\"precision='bf 16'\": precision is one of bf16_mixed"]),
    (
        "precision=[fp32]",
        [
            "precision is one of bf16_mixed, bf16_sr, bf16_true, fp16_mixed",
            "did you mean 'fp32'?",
        ],
    ),
    # Names of fields
    ("train.batchsize=3", ["no field 'train.batchsize'", "did you mean 'train.batch_size'?"]),
    ("qqq=3", ["no field 'qqq'", "see mprun --help"]),
    ("optimizer=sgd", ["no field 'optimizer'", "did you mean 'train.optimizer."]),
    ("--batch-size=3", ["no option '--batch-size=3'", "a field is written name=value"]),
    ("batch_size=3", ["no field 'batch_size'", "did you mean 'train.batch_size'?"]),
    (("memory", "fits=16GiB"), ["no field 'fits'"]),
    (
        "train.optimizer=adamw",
        ["train.optimizer has fields; set one of them: train.optimizer.name, "],
    ),
    # Form
    ("seed", ["'seed' is neither a command nor an override", "did you mean 'seed=...'?"]),
    ("run", ["there is no command 'run'; write mprun train, or the overrides alone"]),
    ("", ["'' is neither a command nor an override", "write name=value"]),
    ("~recipe=mnist", ["'~recipe=mnist'", "nothing can be deleted"]),
    ("run.dir=ü", ["'run.dir=ü' cannot be read", "in quotes that the shell leaves"]),
    ("seed=1\nmprun: done", [r"'seed=1\nmprun: done' cannot be read"]),
    ("seed='\x1b[31m'", [r"seed='\x1b[31m'", "seed is a whole number"]),
    ("x" * 10_000, ["is neither a command nor an override"]),
    ("seed=" + "x" * 10_000, ["seed is a whole number"]),
    ("seed=" + "[" * 1000 + "]" * 1000, ["cannot be read"]),
    # Several values
    ("seed=1,2", ["'seed=1,2' lists several values: a sweep, which needs -m"]),
    # Types
    ("train.lr=abc", ["'train.lr=abc'", "train.lr is a number"]),
    # Ranges
    ("seed=4294967296", ["seed=4294967296: legal is 0 or more and at most 4294967295"]),
    (f"train.epochs={10**60}", ["legal is 1 or more and at most 2147483647"]),
    # A recipe's own parameters
    (
        "recipe.model.unitz=3",
        ["'recipe.model.unitz=3'", "did you mean 'units'?", "legal: recipe.model.units"],
    ),
    ("recipe.model.units=0", ["units=0: legal is 1 or more"]),
    ("recipe.target=mprun.recipes.mnist.Nope", ["is not a dataclass", "write module.Class"]),
    # What cannot be carried out
    (
        ("precision=bf16_mixed", "precision.compute_dtype=float16"),
        ["precision.compute_dtype=float16", "legal is bfloat16"],
    ),
    (
        "precision.param_dtype=bfloat16",
        ["precision.param_dtype=bfloat16", "legal is float32"],
    ),
    ("device=cuda", ["device=cuda", "legal here: auto, cpu"]),
    ("execution=emulated", ["execution=emulated", "legal: auto, native"]),
    # Options
    (
        "--foo",
        ["no option '--foo'", "legal: --config-dir, --multirun, --show-config, --help"],
    ),
    ("--config-dir", ["--config-dir/-cd: expected one argument"]),
]


@pytest.mark.parametrize(
    ("words", "fragments"), MISTAKES, ids=[ascii(words)[:40] for words, _ in MISTAKES]
)
def test_a_mistake_is_answered_in_one_line(
    words: str | tuple[str, ...],
    fragments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: None)
    message = refusal(capsys, *([words] if isinstance(words, str) else words))
    assert [f for f in fragments if f not in message] == [], message


def test_a_folder_that_holds_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LINEAR, "run.dir=run"]
    assert main(words) == 0

    def times() -> dict[Path, int]:
        """Of all files but a lock's, into which older versions of filelock write."""
        files = (p for p in Path("run").rglob("*") if p.name != ".lock")
        return {p: p.stat().st_mtime_ns for p in files}

    before = times()
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("mprun: run.dir=run already contains a run")
    assert error.count("\n") == 1
    assert times() == before
    assert [p.name for p in Path.cwd().iterdir()] == ["run"]


# Good words.


def test_only_train_takes_these_options() -> None:
    for command in ("sweep", "memory"):
        for option in ("-m", "--show-config"):
            with pytest.raises(UsageError, match=f"mprun {command} has no option '{option}'"):
                parse_arguments(BY_NAME[command], [option, "seed=0,1"])


@pytest.mark.parametrize("command", [[], ["train"]])
def test_a_run_leaves_a_record(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, *LINEAR]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (run,) = Path("outputs").glob("*/*")
    assert f"record: {run}" in out
    assert read_summary(run).status == "completed"


def test_every_field_the_recipe_ignores_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "data.source": "real",
        "data.root": "x",
        "data.fallback": "generated",
        "data.validation_fraction": "0.5",
        "data.eval_limit": "1",
        "data.test": "false",
        "train.eval_batch_size": "1",
    }
    recipe = compose(LINEAR).config.recipe
    assert set(values) == load_recipe(recipe.target, recipe.model).ignores
    assert main([*LINEAR, *(f"{key}={value}" for key, value in values.items())]) == 0
    warnings = capsys.readouterr().err.splitlines()
    for key in values:
        assert f"warning: {key} has no effect: recipe=linear does not use it" in warnings


def test_show_config_prints_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINEAR, "precision=bf16_mixed", "--show-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown == compose([*LINEAR, "precision=bf16_mixed"]).resolved
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.usefixtures("own_recipe")
def test_an_own_recipe_trains_by_the_real_command(forking: Forking) -> None:
    code = "import runpy; runpy.run_module('mprun', run_name='__main__')"
    done = forking.run(code, "--config-dir=my configs", "recipe=points", "run.dir=run")
    code = Path("my_recipes.py").absolute()
    note = f"note: recipe.target=my_recipes.Points runs the code of {code}\n"
    assert (done.returncode, done.stderr) == (0, note)
    summary = read_summary(Path("run"))
    assert (summary.recipe, summary.status, summary.steps) == ("points", "completed", 4)
    losses = [line["loss"] for line in read_lines(Path("run")) if line["kind"] == "step"]
    assert losses[-1] < losses[0]


WITHOUT_TORCH = """
import sys
from mprun.cli.main import main
for words in sys.argv[1:]:
    status = main(words.split())
    print("=====", status, "torch" in sys.modules)
"""


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    Path("own.py").write_text("import torch\nraise SystemExit\n", encoding="utf-8")
    good = ["--help", "--version", "recipe=mnist --show-config"]
    good += ["recipe=own.py --show-config", "new-recipe mine"]
    command = [sys.executable, "-c", WITHOUT_TORCH, *good, "recipe=mnits", "train.lr=-1", "--foo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ends = [line for line in done.stdout.splitlines() if line.startswith("=====")]
    assert ends == ["===== 0 False"] * 5 + ["===== 2 False"] * 3


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mprun {__version__}\n"


@pytest.mark.representative(2)
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["recipe=linear", "--show-config"]])
def test_a_reader_that_left_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mprun", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
