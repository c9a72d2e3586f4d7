"""On invented machines: what is slow and why, what disturbs, and what modes are good for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mprun import NEWEST_TORCH
from mprun.inspect.machine_examination import LIMITING, conclusions, findings, judge
from mprun.train.machine.doctor_result import Machine, modes_table
from tests.train.machine import (
    AVX2_ONLY,
    AVX512_ONLY,
    GRANITE,
    H100,
    M1,
    M2,
    T4,
    WITH_AMX,
    WITH_BF16,
    Speedups,
    gpu,
    machine,
    measured,
    modes,
    rate,
    rates,
    ratio,
)

SLOW, FAST = 0.03, 4.0


def texts_of(where: Machine, speedups: Speedups | None = None, **changes: Any) -> list[str]:
    """The findings in words: "warning bfloat16: ..."."""
    results = findings(measured(where, speedups or {}, **changes))
    return [f"{f.level} {f.about}: {f.text}" for f in results]


@pytest.mark.parametrize("where", [AVX2_ONLY, WITH_AMX, GRANITE, M1, H100], ids=lambda m: m.system)
def test_a_quiet_machine_that_is_fast_has_no_finding(where: Machine) -> None:
    assert texts_of(where, {"bfloat16": FAST, "float16": FAST}) == []


def test_a_pytorch_newer_than_any_that_was_tried_is_noted() -> None:
    tried = ".".join(map(str, NEWEST_TORCH))
    for version in (f"{tried}.9+cu130", "2.11.0", None):
        assert texts_of(H100, versions={"torch": version}) == []
    assert texts_of(H100, versions={"torch": "2.99.0.dev20270101"}) == [
        f"note versions: mprun knows PyTorch up to {tried}, this is 2.99.0.dev20270101"
    ]


# ---- 16 bits slower than float32, and why --------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "speedups", "reason"),
    [
        (AVX2_ONLY, {"bfloat16": SLOW}, "this CPU has no AVX512-BF16 or AMX-BF16"),
        (AVX512_ONLY, {"float16": 0.7}, "this CPU has no AVX512-FP16 or AMX-FP16"),
        (WITH_AMX, {"bfloat16": SLOW}, "the reason is not known"),
        (M1, {"bfloat16": SLOW}, "this CPU has no BF16"),
        (M2, {"bfloat16": SLOW}, "the reason is not known"),
        (machine(architecture="riscv64"), {"bfloat16": SLOW}, "the reason is not known"),
        (T4, {"bfloat16": SLOW}, "compute capability 7.5 has no tensor cores for it"),
        (H100, {"bfloat16": SLOW}, "the reason is not known"),
    ],
    ids=str,
)
def test_a_slow_format_is_warned_of_with_its_reason(
    where: Machine, speedups: Speedups, reason: str
) -> None:
    ((format_, speedup),) = speedups.items()
    (warning,) = texts_of(where, speedups)
    slow = f"{format_} is slower than float32 here (matmul {speedup:#.2g}x)"
    assert warning == f"warning {format_}: {slow}: {reason}"


def test_a_gpu_of_another_maker_is_not_judged_by_nvidia_s_table() -> None:
    where = gpu("9.4")
    assert where.cuda
    where.cuda.tensor_cores = None
    (warning,) = texts_of(where, {"bfloat16": SLOW})
    assert warning.endswith("the reason is not known")


# ---- instructions capped -------------------------------------------------------------------------


@pytest.mark.parametrize("variable", LIMITING)
def test_a_variable_that_limits_kernels_is_reported(variable: str) -> None:
    (warning,) = texts_of(machine("AVX2", variables={variable: "AVX2"}))
    assert warning.startswith(f"warning instructions: {variable}=AVX2 can slow down ")


def test_cpu_limits_are_not_reported_of_a_gpu() -> None:
    limit = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert texts_of(gpu("9.0", "float16", variables=limit, threads=64, load_average=99.0)) == []


# ---- threads and load ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"threads": 9}, "warning threads: 9 threads, but this process may use 8 cores"),
        ({"threads": 8, "cpu_quota": 2.5}, "set OMP_NUM_THREADS=2"),
        ({"threads": 1, "cpu_quota": 0.5}, None),  # there is no less than one
        ({"threads": 4, "cpu_quota": 4.0}, None),
        ({"threads": 4}, None),  # a thread per core, where the system counts two
    ],
    ids=str,
)
def test_threads_that_do_not_fit_the_cores(changes: dict[str, Any], expected: str | None) -> None:
    texts = texts_of(machine("AVX2", **changes))
    assert (texts == []) if expected is None else (len(texts) == 1 and expected in texts[0])


@pytest.mark.parametrize(
    ("load", "warned"), [(0.4, False), (0.6, True), (30.0, True), (None, False)]
)
def test_load_by_others_is_warned_of(load: float | None, warned: bool) -> None:
    texts = texts_of(machine("AVX2", load_average=load), threads=3)
    assert len(texts) == warned
    if warned:
        assert f"load average was {load:.1f} on 8 cores" in texts[0]
        assert "rates, of 3 of 8 threads, may be too low: measure again" in texts[0]


# ---- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("cpu asked for", "note gpu: there is a GPU, but device=cpu was set"),
        ("no cuda in torch", "warning gpu: there is an NVIDIA driver, but this PyTorch is built"),
        ("not usable", "warning gpu: there is an NVIDIA driver, but PyTorch finds no GPU"),
    ],
)
def test_a_gpu_that_is_not_examined_is_reported(why: str, expected: str) -> None:
    (finding,) = texts_of(machine("AVX2", gpu_unused=why))
    assert finding.startswith(expected)


def test_tf32_switched_off_from_outside() -> None:
    (warning,) = texts_of(gpu("9.0", "tf32", variables={"NVIDIA_TF32_OVERRIDE": "0"}))
    assert warning.startswith("warning tf32: NVIDIA_TF32_OVERRIDE=0")
    assert texts_of(gpu("9.0", "tf32", variables={"NVIDIA_TF32_OVERRIDE": "1"})) == []


# ---- what modes are good for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("median", "low", "high", "verdict"),
    [
        (2.0, 1.8, 2.2, "worth trying"),
        (1.2, 1.01, 1.4, "worth trying"),
        (1.0, 0.95, 1.05, "no gain"),
        (1.0, 0.5, 2.0, "not known"),
        (0.95, 0.92, 0.98, "no gain"),
        (0.5, 0.4, 0.6, "not for speed"),
    ],
)
def test_a_format_is_judged_by_median_and_interval(
    median: float, low: float, high: float, verdict: str
) -> None:
    assert judge(rate("bfloat16", ratio(median, low, high))) == verdict


def test_a_format_counts_at_the_largest_size_it_was_measured_at() -> None:
    found = measured(WITH_BF16, {})
    found.rates = [*rates({"bfloat16": 0.5, "float16": 1.0}), rate("bfloat16", ratio(3.0), 10**12)]
    assert conclusions(found)[0].verdict == "worth trying"
    assert findings(found) == []


def test_conclusions_are_sentences_with_the_numbers() -> None:
    found = measured(WITH_BF16, {"bfloat16": 4.21, "float16": 0.026}, modes(("matmul",)))
    assert [c.text for c in conclusions(found)] == [
        "bfloat16 (bf16_mixed, bf16_true): matmul 4.2x as fast as float32: worth trying",
        "float16 (fp16_mixed): matmul computed in float32 (speed=auto): for their effect on "
        "accuracy and memory, not for speed",
        "tf32: emulated here: for accuracy, not for speed",
        "half_sr_full: emulated here: for accuracy, not for speed",
    ]
    found.modes = modes(("convolution_backward",))
    assert conclusions(found)[1].text == (
        "float16 (fp16_mixed): matmul 0.026x as fast as float32; convolution backward computed in "
        "float32 (speed=auto): for their effect on accuracy and memory, not for speed"
    )
    found.rates[1].speedup = ratio(2.0, 0.4, 9.0)
    assert conclusions(found)[0].text.endswith(
        "matmul 2.0x [0.40x to 9.0x] as fast as float32: times vary too much, measure again"
    )


def test_products_of_8_bits_do_not_have_the_rates_of_bfloat16() -> None:
    of_8_bits = replace(modes()[2], name="fp8_rowwise", products_of_8_bits=True)
    found = measured(WITH_BF16, {"bfloat16": 14.0}, [*modes(), of_8_bits])
    sixteen, eight = conclusions(found)[:2]
    assert sixteen.modes == ["bf16_mixed", "bf16_true"]
    assert (eight.modes, eight.verdict) == (["fp8_rowwise"], "not known")
    assert "mprun doctor recipe=" in eight.text
    lines = [" ".join(x.split()) for x in str(modes_table(found.modes, found.rates)).splitlines()]
    assert "bf16_mixed native 14.0 none" in lines
    assert "fp8_rowwise native - none" in lines
