"""The command line: mistakes end with status 2 and one line, good words with a run."""

from __future__ import annotations

import contextlib
import io
import os
import string
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mprun import __version__
from mprun.cli.arguments import parse_arguments
from mprun.cli.main import BY_NAME, main
from mprun.config import compose
from mprun.config.reference import GROUPS, Field, leaves, options
from mprun.errors import UsageError
from mprun.precision import devices
from mprun.records.run_record import read_lines, read_summary
from mprun.train.assemble import load_recipe
from tests.cli.processes import Forking

pytestmark = pytest.mark.usefixtures("quick_runs")

LINEAR = ["recipe=linear", "train.max_steps=2"]
RECIPES = ", ".join(options("recipe"))


def assert_refused(status: int, out: str, err: str) -> None:
    """Status 2, one printable line that starts with `mprun: `, and nothing left behind."""
    assert status == 2, err
    assert out == ""
    assert err.startswith("mprun: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), "more than one line, or control characters"
    assert "Traceback" not in err
    # Hypothesis keeps its own cache in the current folder.
    assert [p.name for p in Path.cwd().iterdir() if p.name != ".hypothesis"] == []


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message `mprun words` is refused with."""
    status = main(words)
    out, err = capsys.readouterr()
    assert_refused(status, out, err)
    return err


# What is typed, one word or several; what the answer holds: the word, what is legal, the nearest.
MISTAKES: list[tuple[str | tuple[str, ...], list[str]]] = [
    # Groups
    ("recipe=mnits", ["'recipe=mnits'", f"one of {RECIPES}", "did you mean 'mnist'?"]),
    ("precision=bf16", ["'precision=bf16'", "one of bf16_mixed, bf16_sr"]),
    ("recip=mnist", ["no field 'recip'", "did you mean 'recipe'?"]),
    (
        "precision=[fp32]",
        [
            "precision is one of bf16_mixed, bf16_sr, bf16_true, fp16_mixed",
            "did you mean 'fp32'?",
        ],
    ),
    ("recipe=../recipe/mnist", [f"recipe is one of {RECIPES}"]),
    # Names of fields
    ("train.batchsize=3", ["no field 'train.batchsize'", "did you mean 'train.batch_size'?"]),
    ("qqq=3", ["no field 'qqq'", "see mprun --help"]),
    ("lr=0.1", ["no field 'lr'", "did you mean 'train.lr'?"]),
    ("optimizer=sgd", ["did you mean 'train.optimizer.name'?"]),
    ("--batch-size=3", ["no option '--batch-size=3'", "did you mean 'train.batch_size'?"]),
    (("memory", "fits=16GiB"), ["no field 'fits'", "did you mean 'memory.fits'?"]),
    (("numerics", "steps=3"), ["did you mean 'numerics.steps' or 'train.max_steps'?"]),
    ("+foo=1", ["'+foo=1'", "no field 'foo'"]),
    ("hydra.job.name=x", ["'hydra.job.name=x'", "legal in a single run: hydra.run.dir"]),
    ("hydra/launcher=x", ["mprun -m reads Hydra's own settings"]),
    (
        "train.optimizer=adamw",
        ["train.optimizer has fields; set one of them: train.optimizer.name, "],
    ),
    # Form
    ("seed", ["'seed' is neither a command nor an override", "did you mean 'seed=...'?"]),
    ("", ["'' is neither a command nor an override", "write name=value"]),
    ("=1", ["'=1' has no name", "write name=value"]),
    ("~recipe=mnist", ["'~recipe=mnist'", "nothing can be deleted"]),
    ("seed==1", ["'seed==1' cannot be read"]),
    ("seed=nope(1)", ["'seed=nope(1)' cannot be read", "Unknown function 'nope'"]),
    ("run.dir=ü", ["'run.dir=ü' cannot be read", "in quotes that the shell leaves"]),
    ("seed=1\nmprun: done", [r"'seed=1\nmprun: done' cannot be read"]),
    ("seed='\x1b[31m'", [r"seed='\x1b[31m'", "seed is a whole number"]),
    ("x" * 10_000, ["is neither a command nor an override"]),
    ("seed=" + "x" * 10_000, ["seed is a whole number"]),
    ("seed=" + "[" * 1000 + "]" * 1000, ["cannot be read"]),
    ("trian", ["there is no command 'trian'", "did you mean 'train'?"]),
    # Several values
    ("seed=1,2", ["'seed=1,2' lists several values: a sweep, which needs -m"]),
    ("recipe=glob(*)", ["'recipe=glob(*)' lists several values"]),
    # Types
    ("train.lr=abc", ["'train.lr=abc'", "train.lr is a number"]),
    ("precision.tf32=maybe", ["precision.tf32 is true or false"]),
    ("device=tpu", ["device=tpu", "legal: auto, cpu, cuda, xpu, mps, hpu"]),
    (
        "train.optimizer.name=adam",
        ["one of sgd, rmsprop, adamw", "did you mean 'adamw'?"],
    ),
    ("recipe.target=null", ["'recipe.target=null'", "recipe.target is a text"]),
    ("seed=${foo}", ["'seed=${foo}'", "seed is a whole number", "'foo' not found"]),
    # Ranges
    ("train.lr=-1", ["train.lr=-1.0: legal is above 0"]),
    ("seed=4294967296", ["seed=4294967296: legal is 0 or more and at most 4294967295"]),
    (f"train.epochs={10**60}", ["legal is 1 or more and at most 2147483647"]),
    # A recipe's own parameters
    (
        "recipe.model.unitz=3",
        ["'recipe.model.unitz=3'", "did you mean 'units'?", "legal: recipe.model.units"],
    ),
    ("+recipe.model.unitz=3", ["Mnist has no such parameter; did you mean 'units'?"]),
    ("recipe.model.units=abc", ["'recipe.model.units=abc'", "units is a whole number"]),
    ("recipe.model.units=0", ["units=0: legal is 1 or more"]),
    ("recipe.model.units=${foo}", ["recipe.model.units=${foo}", "'foo' not found"]),
    ("recipe.target=nope.Nope", ["recipe.target=nope.Nope", "No module named 'nope'"]),
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
    (
        ("recipe=fashion_mnist", "recipe.model.log_softmax_dim=2"),
        ["log_softmax_dim=2: legal is 1 or 0"],
    ),
    # Options
    (
        "--foo",
        ["no option '--foo'", "legal: --config-dir, --multirun, --show-config, --cfg, --help"],
    ),
    ("--show-confg", ["no option '--show-confg'", "did you mean '--show-config'?"]),
    ("--config-dir", ["--config-dir/-cd: expected one argument"]),
    ("--config-dir=", ["--config-dir/-cd: expected a folder"]),
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


# Mistakes nobody thought of: what is drawn below is invalid by the way it is made.

NAMES = sorted({*GROUPS, *leaves()})
OPTIONS = {g: [p.stem for p in Path(str(files("mprun.conf") / g)).glob("*.yaml")] for g in GROUPS}


def is_no_name(key: str) -> bool:
    key = key.lstrip("+")
    return key not in NAMES and not key.startswith("recipe.model.")


def bad_values(field: Field) -> list[str]:
    """Values that are not of the field's type, or out of its range."""
    found = [] if "null" in field.legal else ["null"]
    if field.key == "recipe.model":
        return [*found, "1", "xyz", "[1]", "true"]
    if field.legal.startswith("a list"):  # a number is a text, too
        return [*found, "1", "xyz", "{a: 1}"]
    if field.legal.startswith("a mapping"):
        return [*found, "1", "xyz", "[1]"]
    found += ["[1]", "{a: 1}"]
    if field.legal.startswith("a text"):
        return found
    found += ["xyz", "1.5.2", "''", ""]
    if "number" in field.legal:
        allowed = field.limits
        low = allowed.gt if allowed.ge is None else allowed.ge
        high = allowed.lt if allowed.le is None else allowed.le
        found += ["true", "nan", "inf", "-inf", f"{low - 1:.0f}"]
        if high is not None:
            found.append(f"{high + 1:.0f}")
    if "whole number" in field.legal:
        found += ["1.5", "1e3", "2.0"]
    return found


@st.composite
def misspelt(draw: st.DrawFn, word: str) -> str:
    """`word` with a letter left out, put in, replaced or exchanged with the next."""
    i = draw(st.integers(0, len(word) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase + "_."))
    before, here, after = word[:i], word[i], word[i + 1 :]
    edits = [
        before + after,
        before + letter + here + after,
        before + letter + after,
        before + after[:1] + here + after[1:],
    ]
    return draw(st.sampled_from(edits))


def written(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(lambda values: form.format(*values))


def misspelt_option(group: str) -> st.SearchStrategy[str]:
    known = OPTIONS[group]
    wrong = st.sampled_from(known).flatmap(misspelt).filter(lambda word: word not in known)
    return written(f"{group}={{}}", wrong)


NAME = st.sampled_from(NAMES)
VALUE = st.sampled_from(["1", "xyz", "", "null", "[1]", "none"])
# No option, enum member, boolean, number or constant begins with x.
NO_WORD = st.text(string.ascii_lowercase, max_size=6).map(lambda text: f"x{text}")
# Neither options of the command line nor the two words that mean something alone.
TEXT = st.text(max_size=20).filter(
    lambda text: "=" not in text and not text.startswith("-") and text not in ("train", "help")
)
INVALID = st.one_of(
    written("{}={}", NAME.flatmap(misspelt).filter(is_no_name), VALUE),
    st.sampled_from([f"{f.key}={bad}" for f in leaves().values() for bad in bad_values(f)]),
    st.sampled_from(GROUPS).flatmap(misspelt_option),
    written("{}={},{}", NAME, NO_WORD, NO_WORD),
    written("{}={}{}", NAME, st.sampled_from("[({'\""), NO_WORD),
    written("~{}", NAME),
    written("--{}", NO_WORD),
    TEXT,
    written("{}={}", TEXT.filter(is_no_name), TEXT),
)


wrong_overrides = given(before=st.sampled_from([[], ["train"], LINEAR]), override=INVALID)
drawn = settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@wrong_overrides
@drawn
def test_whatever_is_wrong_is_answered_in_one_line(before: list[str], override: str) -> None:
    assert_answered_in_one_line(before, override)


@pytest.mark.exhaustive
@wrong_overrides
@settings(drawn, max_examples=1000)
def test_whatever_of_many_is_wrong_is_answered_in_one_line(
    before: list[str], override: str
) -> None:
    assert_answered_in_one_line(before, override)


def assert_answered_in_one_line(before: list[str], override: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*before, override])
    notes = "note: recipe is given 2 times"  # where `before` has one
    lines = [x for x in err.getvalue().splitlines(keepends=True) if not x.startswith(notes)]
    assert_refused(status, out.getvalue(), "".join(lines))


# Good words.


def test_options_are_taken_apart() -> None:
    args = ["seed=1", "--config-dir", "a b", "--show-config", "device=cpu"]
    known = parse_arguments(BY_NAME["train"], args)
    assert (known.overrides, known.config_dir) == (["seed=1", "device=cpu"], Path("a b"))
    assert (known.show_config, known.multirun) == (True, False)
    assert parse_arguments(BY_NAME["train"], ["--config-dir=a=b"]).config_dir == Path("a=b")
    none = parse_arguments(BY_NAME["train"], [])
    assert (none.overrides, none.config_dir) == ([], None)


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
    good += ["recipe=own.py --help", "new-recipe mine"]
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
