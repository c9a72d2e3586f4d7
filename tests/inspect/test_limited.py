"""With oneDNN limited: doctor says what limits it, and a run's record and warning agree.

oneDNN reads its limit once, at the start of a process, so each needs one of its own. Nothing here
depends on how fast the machine is, but for one thing: PyTorch's own bfloat16 loop, which AVX2
leaves, takes dozens of times as long as a float32 matmul.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from mprun.inspect.machine_examination import conclusions, findings
from mprun.records.run_record import read_summary
from mprun.train.machine.doctor_result import Examination
from mprun.train.machine.machine import architecture

pytestmark = pytest.mark.skipif(
    architecture() != "x86_64", reason="oneDNN's limits are for x86 processors"
)

OWN = {"ATEN_CPU_CAPABILITY": "default"}
"""Limits PyTorch's own kernels beside oneDNN's."""

BOTH = """
import sys
from mprun.cli.main import main
from mprun.inspect import machine_examination
machine_examination.modes = lambda: ["fp32", "bf16_mixed", "fp16_mixed"]
assert main(["doctor", "device=cpu", "doctor.json=true", "doctor.budget_s=0.1"]) == 0
sys.stdout.flush()
sys.stdout = sys.stderr
words = ["recipe=linear", "recipe.model.in_features=8", "recipe.model.out_features=8"]
words += ["recipe.model.samples=8", "train.batch_size=8", "device=cpu", "train.max_steps=1"]
assert main([*words, "precision=bf16_mixed", "run.dir=run"]) == 0
"""


def under(**variables: str) -> tuple[Examination, str]:
    """What doctor found, and what a run in bf16_mixed printed, into the folder `run`."""
    command = [sys.executable, "-c", BOTH]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout, type=Examination)  # one object, and nothing else
    return found, done.stderr


def about(found: Examination, topic: str) -> list[str]:
    return [f.text for f in found.findings if f.about == topic]


@pytest.mark.representative(0)
@pytest.mark.parametrize(("limit", "own"), [("AVX512_CORE", {}), ("AVX2", OWN)], ids=str)
def test_a_limit_is_told_and_all_that_is_said_follows_from_the_numbers(
    limit: str, own: dict[str, str]
) -> None:
    found, printed = under(ONEDNN_MAX_CPU_ISA=limit, **own)
    machine = found.machine
    assert limit == machine.variables["ONEDNN_MAX_CPU_ISA"]
    said = about(found, "instructions")
    of_onednn = [t for t in said if t.startswith(f"ONEDNN_MAX_CPU_ISA={limit} ")]
    assert len(of_onednn) == 1
    of_pytorch = [t for t in said if t not in of_onednn]
    assert len(of_pytorch) == len(own)
    for text in of_pytorch:
        assert text.startswith("ATEN_CPU_CAPABILITY=default can slow down PyTorch's own kernels")
        assert machine.cpu_capability == "DEFAULT"
    assert found.findings == findings(found)
    assert found.conclusions == conclusions(found)

    summary = read_summary(Path("run"))
    recorded, native = summary.hardware.accelerated["bfloat16"], summary.execution == "native"
    slow = native and not recorded
    assert ("bfloat16 matmuls are slower than float32" in printed) == slow
    assert ("bfloat16 is computed in float32 and rounded: native" in printed) == (not native)
    mode = {m.name: m for m in found.modes}["bf16_mixed"]
    if mode.execution == "native":
        assert mode.accelerated == machine.hardware.accelerated["bfloat16"]
    else:
        assert "times as long as float32" in str(mode.why_emulated)
    if limit == "AVX2":
        assert (summary.execution, mode.execution) == ("emulated", "emulated")
        slow_by_loops(found, recorded)


def slow_by_loops(found: Examination, recorded: bool) -> None:
    """Below AVX512 PyTorch hands oneDNN no bfloat16: the one case that is sure to be slow."""
    assert found.machine.onednn.bfloat16 is False
    assert found.machine.hardware.accelerated["bfloat16"] is False
    assert recorded is False
    (why,) = about(found, "bfloat16")
    assert why.startswith("bfloat16 is slower than float32 here (matmul 0.")
    verdict = {c.format: c.verdict for c in found.conclusions}["bfloat16"]
    assert verdict == "not for speed"
