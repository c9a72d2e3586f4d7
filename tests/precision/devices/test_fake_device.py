"""Runs on an accelerator that is made up: the code that any accelerator would run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.records.run_record import read_lines, read_summary

ROOT = Path(__file__).resolve().parents[3]
WORDS = [
    *("recipe=linear", "speed=plain", "train.max_steps=6", "train.checkpoint_every_steps=3"),
]


def run(*words: str) -> str:
    """What mprun prints on the device, in a process of its own: PyTorch keeps the device."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.precision.devices.fake_device", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(Path.cwd() / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


def losses(folder: str) -> list[float]:
    return [line["loss"] for line in read_lines(Path(folder)) if line["kind"] == "step"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["tf32", "bf16_mixed", "fp16_mixed"])
def test_other_modes_train_on_an_accelerator(mode: str) -> None:
    asked = run(*WORDS, f"precision={mode}", "device=fake", "run.dir=run")
    summary = read_summary(Path("run"))
    assert (summary.status, summary.hardware.device) == ("completed", "fake")
    if mode != "tf32":
        assert "autocast=" in asked, "autocast is that of the device"
    assert main([*WORDS, f"precision={mode}", "device=cpu", "run.dir=cpu"]) == 0
    # 6 steps of 64 samples in 8 bits of significand: the kernels cast at other places
    assert losses("run") == pytest.approx(losses("cpu"), rel=2e-2)


def test_a_run_on_an_accelerator_is_that_on_the_cpu_and_resumes() -> None:
    assert main([*WORDS, "precision=fp32", "device=cpu", "run.dir=cpu"]) == 0
    words = [*WORDS, "precision=fp32", "device=auto", "run.dir=run", "train.max_steps=3"]
    asked = run(*words)
    assert "device: fake, Fake 1" in asked
    assert "synchronize=" in asked, "without events each step is waited for"
    run("run.resume=run", "train.max_steps=6")
    assert losses("run") == losses("cpu")  # the device computes as the CPU does
    summary = read_summary(Path("run"))
    assert (summary.hardware.device, summary.hardware.name) == ("fake", "Fake 1")
    assert summary.memory_bytes.allocator_peak is None, "the device does not count"
    assert summary.step_time_ms.median is not None
