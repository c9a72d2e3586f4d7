"""`mprun.run` and `mprun.compare` in Python: the commands' work, as results and errors."""

from __future__ import annotations

import pickle
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import mprun
from mprun.errors import ConditionMetError, MprunError, RunFailedError, UsageError
from mprun.records.result import Result
from mprun.records.run_record import read_summary
from mprun.study.compare.comparison import Comparison
from tests.each import each
from tests.study.compare.folders import write_run

pytestmark = pytest.mark.usefixtures("quick_runs")

RECIPE = """\
import os, signal
import torch
from torch import nn

DEFAULTS = {"train.max_steps": 3, "train.batch_size": 8, "device": "cpu", "train.lr": 0.01}
WIDTH = 4

def model():
    return nn.Linear(WIDTH, 2)

def data():
    x = torch.randn(64, WIDTH)
    return {"train": (x, (x[:, 0] > 0).long()), "test": (x, (x[:, 0] > 0).long())}

def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])
"""


@pytest.fixture
def recipe() -> Path:
    path = Path("my recipe.py")  # a name that an override has in quotation marks
    path.write_text(RECIPE, encoding="utf-8")
    return path


def pictures(result: Result) -> list[ElementTree.Element]:
    """The drawings in what a notebook shows."""
    sources = result._repr_html_().split('src="data:image/svg+xml;base64,')[1:]
    return [ElementTree.fromstring(b64decode(text.partition('"')[0])) for text in sources]


# ---- run -----------------------------------------------------------------------------------------


def test_a_run_is_a_result_with_summary_folder_table_and_curve(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = mprun.run("train.max_steps=2", recipe=recipe, precision="bf16_mixed", seed=3)
    assert capsys.readouterr().out == ""
    assert result.folder is not None
    assert result.record == read_summary(result.folder)
    summary = result.record
    assert (summary.steps, summary.precision, summary.seed) == (2, "bf16_mixed", 3)
    for text in ("precision bf16_mixed", "training loss", f"record: {result.folder}"):
        assert text in str(result)
        assert text in result._repr_html_()
    (curve,) = pictures(result)
    assert curve.tag == "{http://www.w3.org/2000/svg}svg"
    assert "--ink:" in curve.attrib["style"]  # else every line of it is black
    assert mprun.load(result.folder).config.seed == 3


def test_a_recipe_that_was_changed_is_read_again(recipe: Path) -> None:
    first = mprun.run(recipe=recipe, precision="fp32")
    recipe.write_text(RECIPE.replace("WIDTH = 4", "WIDTH = 5"), encoding="utf-8")
    second = mprun.run(recipe=recipe, precision=mprun.policy("fp32"))
    shapes = [mprun.load(x.folder).weights["weight"].shape for x in (second,) if x.folder]
    assert shapes == [(2, 5)]
    assert first.record.recipe_sha256 != second.record.recipe_sha256


MEANT = "did you mean 'bf16_mixed', 'bf16_true' or 'bf16_sr'?"
LINEAR = torch.nn.Linear(1, 1)
SWEEP = "mprun sweep recipe=... precision="


@each(
    ("call", "said"),
    [
        (lambda: mprun.run(precision=torch.bfloat16), ["'precision=torch.bfloat16': ", MEANT]),
        (lambda: mprun.run("precision=torch.bfloat16"), ["'precision=torch.bfloat16': ", MEANT]),
        (lambda: mprun.run(precision=torch.float16), ["did you mean 'fp16_mixed', 'fp16_true' or"]),
        (lambda: mprun.run(precision=["fp32", "tf32"]), ["a run has one precision", SWEEP]),
        (lambda: mprun.run(precision="fp32,tf32"), ["precision='fp32,tf32'", SWEEP, "mprun -m "]),
        (lambda: mprun.run(precision="p=fp32,c=bf16,o=bf16"), ["precision is one of bf16_mixed"]),
        (lambda: mprun.run(run={"dir": "x"}), ["run={'dir': 'x'}", "**{'run.dir': 'x'}"]),
        (
            lambda: mprun.run(train={"lr": 1, "optimizer": {"name": "sgd"}}),
            ["**{'train.lr': 1, 'train.optimizer': {'name': 'sgd'}}"],
        ),
        (lambda: mprun.run(recipe="it's.yaml"), ['"recipe=', "recipe is one of"]),
        (lambda: mprun.check(LINEAR, torch.ones(2, 1), precision=torch.bfloat16), [MEANT]),
        (lambda: mprun.check(recipe="linear", precision={torch.bfloat16}), [MEANT]),
    ],
    ids=[
        "dtype",
        "text",
        "fp16",
        "list",
        "comma",
        "policy",
        "dict",
        "nested",
        "quote",
        "check",
        "checks",
    ],
)
def test_what_is_no_value_of_a_run_is_answered_by_what_to_write(
    call: Callable[[], object], said: list[str]
) -> None:
    with pytest.raises(mprun.UsageError) as caught:
        call()
    text = str(caught.value)
    assert [x for x in said if x not in text] == []
    assert "''" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"precision": "bf16"}, "precision=bf16: precision is one of"),
        ({"seed": None}, "seed"),
        ({"sed": 1}, "did you mean 'seed'"),
    ],
)
def test_a_mistake_is_an_error_that_a_notebook_shows_in_one_line(
    recipe: Path, fields: dict[str, object], text: str
) -> None:
    with pytest.raises(UsageError, match=text.partition(":")[0]) as caught:
        mprun.run(recipe=recipe, **fields)
    (line,) = caught.value._render_traceback_()
    assert line == f"mprun: {caught.value}"
    assert not Path("outputs").exists()


def test_a_run_that_fails_raises_and_leaves_its_record(recipe: Path) -> None:
    broken = RECIPE.replace("cross_entropy(output", "cross_entropy(output[:, :, None]")
    recipe.write_text(broken, encoding="utf-8")
    with pytest.raises(RunFailedError):
        mprun.run("run.dir=out", recipe=recipe, precision="fp32")
    assert read_summary(Path("out")).status == "failed"


def test_an_interrupt_ends_a_loop_over_runs_and_the_run_is_resumed(recipe: Path) -> None:
    stopping = RECIPE.replace(
        "def loss(output, batch):\n",
        "calls = []\n\ndef loss(output, batch):\n"
        "    calls.append(0)\n"
        "    if len(calls) == 30:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n",
    )
    recipe.write_text(stopping, encoding="utf-8")
    with pytest.raises(KeyboardInterrupt, match=r"mprun.run\('run.resume=out'\)"):
        mprun.run("run.dir=out", "train.max_steps=50", recipe=recipe, precision="fp32")
    summary = read_summary(Path("out"))
    assert (summary.status, 0 < summary.steps < 50) == ("interrupted", True)
    assert mprun.run("run.resume=out").record.steps == 50


# ---- compare -------------------------------------------------------------------------------------


def write_study() -> list[Path]:
    accuracies = {"fp32": (0.95, 0.96, 0.955), "bf16_mixed": (0.9501, 0.9601, 0.9552)}
    return [
        write_run(Path("study", f"{mode}-{seed}"), mode, seed, accuracy=accuracy)
        for mode, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]


def test_folders_and_globs_and_results_are_compared_and_nothing_is_written() -> None:
    folders = write_study()
    results = [Result(None, folder=folder) for folder in folders]
    expected = str(mprun.compare("study"))
    assert "keep the accuracy of fp32" in expected
    for runs in ([folders], [results], ["study/*"], [results[:3], *folders[3:]]):
        assert str(mprun.compare(*runs)) == expected
    assert [path for path in Path("study").iterdir() if path.is_file()] == []
    assert not Path("comparison").exists()


def test_a_comparison_has_verdicts_settings_and_plots() -> None:
    write_study()
    result = mprun.compare("study", "compare.baseline=fp32", margin=0.001)
    comparison = result.record
    assert isinstance(comparison, Comparison)
    assert comparison.margin == 0.001
    assert comparison.variants[1].verdict.word == "equivalent"
    assert '"word": "equivalent"' in result.json
    assert len(pictures(result)) >= 2
    assert "Difference from fp32" in result._repr_html_()
    mprun.compare("study", dir="report")
    assert Path("report/report.html").is_file()


def test_what_cannot_be_compared_is_an_error() -> None:
    write_study()
    with pytest.raises(UsageError, match="no folder 'nowhere'"):
        mprun.compare("nowhere")
    with pytest.raises(UsageError, match="not of a run"):
        mprun.compare(mprun.compare("study"))
    with pytest.raises(UsageError, match=r"did you mean 'compare\.margin'"):
        mprun.compare("study", margn=0.1)
    with pytest.raises(ConditionMetError, match="not_equivalent"):
        mprun.compare("study", margin=1e-5, fail_if="not_equivalent")
    assert issubclass(ConditionMetError, MprunError)


# ---- the names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [mprun, mprun.run, mprun.compare])
def test_a_function_of_a_notebook_that_uses_it_can_be_sent_to_another_process(
    value: object,
) -> None:
    assert pickle.loads(pytest.importorskip("cloudpickle").dumps(value)) is value


@each(
    ("call", "said"),
    [
        (lambda: mprun.load("nowhere"), "there is no run"),
        (lambda: mprun.load(3), "legal: a folder"),  # type: ignore[arg-type]
        (lambda: mprun.run(3), "legal: texts such as 'recipe=my.py'"),
        (lambda: mprun.run("my.py"), "did you mean 'recipe=my.py'"),
        (lambda: mprun.run("mnist"), "did you mean 'recipe=mnist'"),
        (lambda: mprun.compare(3), "legal: results of mprun.run"),
        (lambda: mprun.policy(3), "legal: a name"),  # type: ignore[arg-type]
        (
            lambda: mprun.policy(torch.bfloat16),  # type: ignore[arg-type]
            r"legal: a name.* 'bf16_mixed', 'bf16_true' or 'bf16_sr'\?$",
        ),
        (
            lambda: mprun.Precision(torch.bfloat16),  # type: ignore[arg-type]
            r"a policy of type dtype.* 'bf16_mixed', 'bf16_true' or 'bf16_sr'\?$",
        ),
        (
            lambda: mprun.optim.for_policy(torch.float16, torch.optim.SGD, []),  # type: ignore[arg-type]
            "a policy of type dtype; legal: the name of a mode",
        ),
        (
            lambda: mprun.audit("m"),
            "^audit got arguments of type str, None.*legal: a torch.nn.Module",
        ),  # type: ignore[arg-type]
        (
            lambda: mprun.audit(torch.nn.Linear(1, 1), "x"),  # type: ignore[arg-type]
            "^audit got arguments of type Linear, str, None.*legal: .* its optimizer or None",
        ),
        (
            lambda: mprun.audit(torch.nn.Linear(1, 1), casts=1),  # type: ignore[arg-type]
            "^audit got arguments of type Linear, NoneType, int; .*mprun.numerics.CastCounts",
        ),
        (lambda: mprun.diff("a", "b", 1), "legal: a model"),  # type: ignore[arg-type]
    ],
    ids=[
        *("folder", "number", "run", "file", "recipe", "compare", "policy", "policy-dtype"),
        *("precision-dtype", "optim-dtype", "audit", "audit-optimizer", "audit-casts", "diff"),
    ],
)
def test_a_wrong_argument_is_answered_by_what_is_legal(
    call: Callable[[], object], said: str
) -> None:
    with pytest.raises((UsageError, TypeError), match=said):
        call()


def test_a_result_is_loaded_and_an_observed_run_is_not(tmp_path: Path) -> None:
    result = mprun.run("recipe=linear", "train.max_steps=2", f"run.dir={tmp_path / 'run'}")
    assert mprun.load(result).config.recipe.name == "linear"
    model = torch.nn.Linear(1, 1)
    with mprun.observe(model, torch.optim.SGD(model.parameters()), out=tmp_path / "observed"):
        pass
    with pytest.raises(UsageError, match="was observed"):
        mprun.load(tmp_path / "observed")


def test_a_complete_run_that_is_resumed_keeps_its_memory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    mprun.run("recipe=linear", "train.max_steps=2", f"run.dir={folder}")
    before = read_summary(folder).memory_bytes
    mprun.run(f"run.resume={folder}")
    assert before.peak
    assert read_summary(folder).memory_bytes == before
