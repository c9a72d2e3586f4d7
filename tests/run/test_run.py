"""Real runs from the command line: records, signals, failures, the smoke preset."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mprun.cli.main import main
from mprun.config.reference import options
from mprun.errors import RunFailedError
from mprun.records.run_record import Metric, Summary, read_lines, read_summary
from mprun.train import run as session
from tests.run.processes import Forking
from tests.schema import conforms
from tests.summaries import check_partials
from tests.waiting import is_filled, wait_for

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

QUICK = ["recipe=linear", "train.max_steps=6", "run.dir=run"]


def run(*words: str) -> Summary:
    assert main([*QUICK, *words]) == 0
    return read_summary(Path("run"))


@pytest.mark.representative(
    "mnist-fp32",
    "linear-bf16_mixed",
    "char_gpt-bf16_mixed",
    "tabular-bf16_mixed",
)
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("recipe", options("recipe"))
def test_a_record_has_every_field_of_the_contract(recipe: str, precision: str) -> None:
    words = [f"recipe={recipe}", f"precision={precision}", "preset=smoke", "run.dir=run"]
    words.append("train.max_time_s=600")  # the preset's own limit may leave fewer steps
    if recipe not in ("linear", "tabular"):
        words.append("data.source=generated")
    if recipe in ("char_gpt", "transformer"):
        words += [f"recipe.model.{size}" for size in ("layers=1", "width=32", "context=16")]
    assert main(words) == 0
    summary = read_summary(Path("run"))
    conforms(summary, Summary)
    assert summary.status == "completed"
    assert summary.precision == precision
    assert summary.effective == replace(
        summary.requested, partials_dtype=summary.effective.partials_dtype
    )
    check_partials(summary)
    assert summary.effective.compute_dtype == ("float32" if precision == "fp32" else "bfloat16")
    assert summary.execution == "native"
    is_local = recipe in ("char_gpt", "tabular", "transformer")  # real samples of this machine
    assert summary.data.source == ("local" if is_local else "generated")
    assert summary.steps == 36
    times = summary.step_time_ms
    # Full-size steps only: mnist's 4,096 samples make 128 batches of 32, all full.
    assert times.n + times.warmup <= 36
    memory = summary.memory_bytes
    parts = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "temporary")
    assert memory.peak == sum(getattr(memory, k) for k in parts)
    if recipe in ("linear", "char_gpt", "transformer"):
        assert summary.test.accuracy is None
        assert summary.metric == Metric(name="loss", higher_is_better=False)
    else:
        assert 0 <= float(summary.test.accuracy or 0) <= 1
    steps = [x for x in read_lines(Path("run")) if x["kind"] == "step"]
    assert [x["step"] for x in steps] == list(range(1, 37))


def test_the_smoke_preset_caps_the_batch_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=mnist", "preset=smoke", "data.source=generated", "run.dir=run"]) == 0
    assert "caps train.batch_size=8192 at 32" in capsys.readouterr().err
    assert read_summary(Path("run")).batch_size == 32


def test_the_smoke_preset_fails_where_the_loss_stands_still(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipe=linear", "preset=smoke", "train.lr=1e-30", "run.dir=run"]) == 1
    assert "the loss does not fall" in capsys.readouterr().err
    summary = read_summary(Path("run"))
    assert summary.status == "failed"
    assert "does not fall" in str(summary.error)


def test_of_too_few_steps_the_loss_is_not_judged() -> None:
    """A large model: time ended the smoke check, and its loss may still go up and down."""
    rising = [1.0, 2.0, 3.0]
    warning = session.check_loss_falls(rising, planned_steps=36)
    assert "not judged: train.max_time_s left 3 steps, and 12 are needed" in str(warning)
    with pytest.raises(RunFailedError, match="does not fall"):
        session.check_loss_falls([float(x) for x in range(12)], planned_steps=36)


def test_an_epoch_that_a_limit_cuts_off_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """12 of 20 steps are an epoch of ten and a part of the next."""
    data = ["data.source=generated", "data.train_limit=320", "data.validation_fraction=0"]
    sizes = ["train.batch_size=32", "train.eval_batch_size=64", "data.eval_limit=64"]
    assert main(["recipe=mnist", *data, *sizes, "train.max_steps=12", "run.dir=run"]) == 0
    out = capsys.readouterr().out
    assert "epoch 1:  training loss" in out
    assert "epoch 2 (cut off after 64 samples):  training loss" in out
    assert "(epoch cut off after 64 samples)" in out
    assert [e.train.samples for e in read_summary(Path("run")).history] == [None, 64]


def test_log_every_thins_the_lines_and_not_the_statistics() -> None:
    summary = run("train.log_every=3")
    steps = [x["step"] for x in read_lines(Path("run")) if x["kind"] == "step"]
    assert steps == [3, 6]
    assert summary.step_time_ms.n == 3  # six steps less three of warm-up


def test_a_mode_slower_than_float32_warns_before_it_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mprun.train.machine.machine.accelerated", lambda dtype, device: False)
    run("precision=bf16_mixed")
    assert "bfloat16 matmuls are slower than float32" in capsys.readouterr().out
    assert read_summary(Path("run")).hardware.accelerated == {"bfloat16": False}


def test_a_reader_that_leaves_does_not_end_the_run(forking: Forking) -> None:
    os.mkfifo("pipe")
    words = ["recipe=linear", "train.max_steps=40", "run.dir=run"]
    forking.start(words, Path.cwd(), {"OUT": "pipe"})
    with Path("pipe").open(encoding="utf-8") as reader:
        assert reader.readline()
    assert forking.wait() == 0
    assert "Traceback" not in Path("log.txt").read_text(encoding="utf-8")
    assert read_summary(Path("run")).status == "completed"


def test_backend_switches_are_restored_after_a_failed_run() -> None:
    before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    assert main([*QUICK[:1], "train.lr=1e30", "run.dir=run"]) == 1
    assert torch.backends.cudnn.conv.fp32_precision == before  # type: ignore[attr-defined]


@pytest.mark.representative(1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_a_usable_record_and_the_right_status(
    number: signal.Signals, status: int, forking: Forking
) -> None:
    # Without an end of its own: the signal comes while it trains, however busy the machine is.
    words = ["recipe=linear", "train.epochs=1000000", "run.dir=run"]
    pid = forking.start(words, Path.cwd())
    wait_for(lambda: is_filled(Path("run/metrics.jsonl")))
    running = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    assert running["status"] == "running"
    os.kill(pid, number)
    assert forking.wait() == status, Path("log.txt").read_text(encoding="utf-8")
    assert "Traceback" not in Path("log.txt").read_text(encoding="utf-8")
    summary = read_summary(Path("run"))
    conforms(summary, Summary)
    assert summary.status == "interrupted"
    lines = [x for x in read_lines(Path("run")) if x["kind"] == "step"]
    assert lines[-1]["step"] == summary.steps > 0
    assert summary.train.loss is not None
    saved = torch.load("run/checkpoints/last.pt", weights_only=True)
    assert saved["trainer"]["step"] == summary.steps


def test_a_signal_while_the_step_is_measured_waits_until_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception out of PyTorch's C++ code that calls Python ends the process."""
    measured = []

    def footprint(chosen: object, real: bool, quick: bool) -> tuple[dict[str, int], None]:
        signal.raise_signal(signal.SIGINT)
        measured.append(chosen)
        return {}, None

    monkeypatch.setattr(session, "footprint", footprint)
    monkeypatch.setattr("mprun.train.sums.EVERY_S", 0.0)  # measured after the first step
    assert main(QUICK) == 130
    assert measured
    summary = read_summary(Path("run"))
    assert (summary.status, summary.steps) == ("interrupted", 2)  # and it ends after the next one
