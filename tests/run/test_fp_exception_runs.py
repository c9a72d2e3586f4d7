"""`debug.fp_exceptions` in real runs: what is reported, recorded, dropped, and left as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.cli.main import main
from mprun.config import compose
from mprun.precision import Precision
from mprun.records.run_config import variant_hash
from mprun.records.run_record import Summary, read_lines, read_summary
from tests.run.test_resume import assert_equal, assert_same_run, trained
from tests.schema import conforms

RECIPE = '''
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from mprun.data import Splits, TensorSet
from mprun.recipe import Recipe


class Fault(nn.Module):
    """Breaks the training calls named."""

    def __init__(self, kind, calls):
        super().__init__()
        self.kind, self.calls, self.count = kind, calls, 0

    def forward(self, x):
        self.count += self.training
        if self.kind == "evaluation" and not self.training:
            x = x / (x - x)
        if self.training and self.count in self.calls:
            if self.kind == "forward":
                x = x.clamp(1, 1) * 6e4 * 6e4
            if self.kind == "backward":
                x = x + (x * 0).abs().sqrt()
            if self.kind == "zero":
                x = x / (x - x)
        return x


@dataclass(frozen=True)
class Planted(Recipe):
    kind: str
    calls: list[int]
    METRIC = ("loss", "min")

    def model(self):
        return nn.Sequential(
            nn.Linear(8, 8), Fault(self.kind, set(self.calls)),
            nn.Flatten(), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1),
        )

    def data(self, request):
        draw = torch.Generator().manual_seed(request.seed)
        x, y = torch.randn(64, 4, 8, generator=draw), torch.randn(64, 1, generator=draw)
        part = TensorSet(x, y)
        return Splits("planted", "generated", part, part.first(16), part.first(0))

    def loss(self, output, batch):
        return F.mse_loss(output, batch[1])
'''
CONFIG = """# @package _global_
# Breaks where the test asks for it
recipe: {name: planted, target: planted.Planted, model: {kind: none, calls: []}}
train: {epochs: 4, batch_size: 16, eval_batch_size: 16, lr: 0.01, optimizer: {name: adamw}}
"""


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("planted.py").write_text(RECIPE, encoding="utf-8")
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/planted.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(__import__("sys").modules, "planted", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed runs do not measure the memory of a step either."""
    monkeypatch.setattr("mprun.train.run.footprint", lambda *_: ({}, None))


WORDS = ["--config-dir=conf", "recipe=planted", "device=cpu"]


def run(name: str, *words: str, status: int = 0, measured: bool = False) -> Summary:
    """A run into the folder `name`, which ends with this status.

    The memory of a step is only `measured` where asked, for that takes as long as the run.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not measured:
            patch.setattr("mprun.train.run.footprint", lambda *_: ({}, None))
        assert main([*WORDS, *words, f"run.dir={name}"]) == status
    summary = read_summary(Path(name))
    conforms(summary, Summary)
    return summary


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(name, "fp_exceptions.json").read_text(encoding="utf-8"))
    return found


def events(name: str) -> list[dict[str, Any]]:
    lines = read_lines(Path(name))
    return [x for x in lines if x["kind"] == "event" and x["event"] == "fp_exception"]


def line_of(code: str) -> str:
    """Where some code stands in the recipe."""
    number = next(n for n, text in enumerate(RECIPE.splitlines(), start=1) if code in text)
    return f"planted.py:{number} (forward)"


def fault(kind: str, *calls: int) -> list[str]:
    return [f"recipe.model.kind={kind}", f"recipe.model.calls=[{','.join(map(str, calls))}]"]


# ---- off and clean -------------------------------------------------------------------------------


def test_off_nothing_is_different() -> None:
    """Not even the class of what the loop runs on, so there is nothing that could cost."""
    from mprun.train.assemble import make_plan
    from mprun.train.assemble.parts import build_exceptions, build_precision

    chosen = make_plan(compose(["recipe=linear"]).config, ())
    off = build_exceptions(chosen)
    assert type(build_precision(chosen, make=off.precision)) is Precision
    summary = run("run")
    assert summary.fp_exceptions is None
    assert not Path("run/fp_exceptions.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["precision=fp16_mixed", "train.accumulate=2", "train.clip_norm=0.1"],
        ["precision=fp16_true", "speed=auto"],
        ["precision=half_sr_full"],
    ],
    ids=" ".join,
)
def test_the_bits_are_those_without(words: list[str]) -> None:
    """Nothing is found here, so that skip drops nothing."""
    summary = run("off", *words, "train.epochs=2")
    assert summary.skipped_steps < summary.steps
    for action in ("log", "skip") if "precision=fp16_mixed" in words else ("log",):
        summary = run(action, *words, "train.epochs=2", f"debug.fp_exceptions={action}")
        assert summary.fp_exceptions is not None
        assert summary.fp_exceptions.finding == 0
        assert_equal(trained(Path("off")), trained(Path(action)))


def test_steps_that_are_looked_at_are_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run("run", "debug.fp_exceptions=log", measured=True)
    assert (summary.memory_bytes.peak or 0) > 0
    assert summary.step_time_ms.n == 0
    assert summary.step_time_ms.median is summary.samples_per_second is None
    out = capsys.readouterr().out
    assert "note: debug.fp_exceptions inspects every op of a training step" in out
    assert "steps are not timed while debug.fp_exceptions slows them" in out
    assert "0 findings, 0 expected, 0 absorbed" in out


def test_evaluation_is_not_looked_at() -> None:
    summary = run("run", *fault("evaluation"), "debug.fp_exceptions=halt")
    assert summary.history[-1].validation.loss in ("nan", "inf")
    assert events("run") == recorded("run")["exceptions"] == []


# ---- log, halt -----------------------------------------------------------------------------------


def test_halt_ends_the_run_with_a_line_that_names_op_and_module(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*fault("forward", 3), "precision=fp16_true", "loss_scale=none"]
    summary = run("run", *words, "debug.fp_exceptions=halt", status=1)
    *notes, line = capsys.readouterr().err.strip().splitlines()
    assert all(note.startswith("note: recipe.target=") for note in notes)
    assert line.startswith(
        "mprun: debug.fp_exceptions=halt: at step 3: overflow: mul in 1 (Fault), forward, "
        f"{line_of('6e4 * 6e4')}; inputs up to"
    )
    assert line.endswith("fp_exceptions.json in the run's folder has the details")
    assert (summary.status, summary.steps) == ("failed", 2)
    assert summary.error is not None
    (event,) = events("run")
    assert event == {
        "kind": "event",
        "event": "fp_exception",
        "step": 3,
        "verdict": "finding",
        "what": "overflow",
        "op": "mul",
        "phase": "forward",
        "module": "1",
        "location": line_of("6e4 * 6e4"),
    }
    (details,) = recorded("run")["exceptions"]
    assert details["inputs"][0]["dtype"] == details["outputs"][0]["dtype"] == "float16"
    assert details["inputs"][0]["shape"] == [16, 4, 8]
    assert details["outputs"][0]["inf"] == details["in_float64"]["shape"][0] * 4 * 8
    assert "parameter 5.weight" in details["reached"]


def test_overflows_that_dynamic_scaling_skips_are_expected() -> None:
    words = ["precision=fp16_mixed", "loss_scale.value=1e9", "debug.fp_exceptions=halt"]
    summary = run("run", *words, "train.epochs=12")  # long enough for the scale to come down
    assert summary.status == "completed"
    assert summary.skipped_steps < summary.steps
    row = summary.fp_exceptions
    assert row is not None
    assert (row.finding, row.expected > 0) == (0, True)
    assert len({e["step"] for e in events("run")}) == summary.skipped_steps > 3
    first = recorded("run")["exceptions"][0]
    assert (first["verdict"], first["phase"], first["kind"]) == ("expected", "backward", "overflow")
    assert first["loss_scale"] == pytest.approx(1e9)


def test_halt_acts_after_some_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["precision=fp16_mixed", "loss_scale.value=1e12", "debug.fp_exceptions=halt"]
    summary = run("run", *words, "debug.halt_after=3", status=1)
    assert (summary.steps, summary.skipped_steps) == (2, 2)
    line = capsys.readouterr().err
    assert "at step 3: 3 steps in a row overflowed and were skipped; the last one: overflow" in line
    assert "without the loss scale of 2.5e+11" in line


# ---- skip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("backward", ["precision=bf16_true"]),
        ("forward", ["precision=fp16_true", "loss_scale=none"]),
    ],
    ids=str,
)
def test_skip_drops_the_whole_step(kind: str, words: list[str]) -> None:
    words = [*words, "debug.fp_exceptions=skip", "train.checkpoint_every_steps=1"]
    words += ["train.optimizer.weight_decay=0.5", "train.scheduler=linear"]
    run("before", *fault(kind, 3, 4), *words, "train.max_steps=16", "train.epochs=null")
    summary = read_summary(Path("before"))
    assert summary.status == "completed"
    assert summary.skipped_steps == 2
    assert summary.fp_exceptions is not None
    assert summary.fp_exceptions.dropped_steps == 2
    skipped = [x["step"] for x in read_lines(Path("before")) if x.get("skipped")]
    assert skipped == [3, 4]
    state = trained(Path("before"))
    for name, value in state["model"].items():
        assert bool(torch.isfinite(value).all()), name
    assert state["model"]["3.num_batches_tracked"] == 16 - 2
    steps = [entry["step"] for entry in state["optimizer"]["state"].values()]
    assert {int(x) for x in steps} == {16 - 2}
    assert state["scheduler"]["last_epoch"] == 16 - 2


# ---- resuming, variants --------------------------------------------------------------------------


@pytest.mark.usefixtures("unmeasured")
def test_a_run_can_be_resumed_to_be_looked_at() -> None:
    run("run", "train.max_steps=6")
    assert main(["run.resume=run", "train.max_steps=12", "debug.fp_exceptions=halt"]) == 0
    run("whole", "train.max_steps=12")
    assert_same_run(Path("run"), Path("whole"))
    row = read_summary(Path("run")).fp_exceptions
    assert row is not None
    assert row.action == "halt"


@pytest.mark.usefixtures("unmeasured")
def test_what_was_found_before_goes_on() -> None:
    words = [*fault("zero", 2, 5), "precision=fp16_mixed", "loss_scale=static"]
    words += ["debug.fp_exceptions=log"]
    run("run", *words, "train.max_steps=4")
    assert main(["run.resume=run", "train.max_steps=9"]) == 0
    # The fault counts the calls of its own process: the second one after four steps is step 6.
    assert [e["step"] for e in events("run")] == [*[2] * 2, *[6] * 2, *[9] * 2]
    first = recorded("run")["exceptions"][0]
    assert (first["step"], first["last_step"], first["count"]) == (2, 9, 3)
    row = read_summary(Path("run")).fp_exceptions
    assert row is not None
    assert row.finding == recorded("run")["counts"]["finding"] == len(events("run"))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("before", "given", "legal"),
    [("skip", "log", False), ("off", "skip", False), ("log", "off", True)],
)
def test_dropping_steps_is_no_change_for_a_resumed_run(
    before: str, given: str, legal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run("run", "train.max_steps=2", f"debug.fp_exceptions={before}")
    status = main(["run.resume=run", "train.max_steps=3", f"debug.fp_exceptions={given}"])
    assert status == (0 if legal else 2)
    if not legal:
        assert "skip decides what is computed" in capsys.readouterr().err


def test_looking_is_the_same_variant_and_dropping_another() -> None:
    def hashed(action: str) -> str:
        return variant_hash(compose(["recipe=linear", f"debug.fp_exceptions={action}"]).resolved)

    plain = compose(["recipe=linear"]).resolved
    before = {key: value for key, value in plain.items() if key != "debug"}  # of older records
    assert hashed("off") == hashed("log") == hashed("halt") == variant_hash(before)
    assert hashed("skip") != hashed("off")
    run("run", "train.max_steps=1", "debug.fp_exceptions=skip", "debug.halt_after=7")
    assert read_summary(Path("run")).variant == "fp32+skip"


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "fragment"),
    [
        ("debug.fp_exceptions=on", "debug.fp_exceptions is one of off, log, halt, skip"),
        ("debug.halt_after=0", "debug.halt_after=0: legal is 1 or more"),
    ],
)
def test_a_mistake_is_one_line(
    word: str, fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, word, "run.dir=run"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert fragment in line
    assert not Path("run").exists()
