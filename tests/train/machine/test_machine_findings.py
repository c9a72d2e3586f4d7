"""Findings on invented machines: what is slow, why, and what disturbs measurements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from mprun import NEWEST_TORCH
from mprun.train.machine.doctor_result import OPS, Machine
from mprun.train.machine.machine import ALLOWED
from mprun.train.machine.machine_findings import findings
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
    limited,
    machine,
    measured,
    modes,
)

SLOW = (0.03, 0.04, 0.3)
FAST = (4.0, 2.0, 2.0)


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
        f"note versions: mprun knows PyTorch up to {tried}, and this is 2.99.0.dev20270101"
    ]


# ---- 16 bits slower than float32, and why --------------------------------------------------------

LOOPS = "so PyTorch computes it in its own loops"
CONVERTS = "so oneDNN converts it to float32 and back"


@pytest.mark.parametrize(
    ("where", "speedups", "reason"),
    [
        (AVX2_ONLY, {"bfloat16": SLOW}, f"this CPU has neither AVX512-BF16 nor AMX-BF16, {LOOPS}"),
        (AVX2_ONLY, {"float16": SLOW}, f"this CPU has neither AVX512-FP16 nor AMX-FP16, {LOOPS}"),
        (
            AVX512_ONLY,
            {"bfloat16": (0.7, 0.5, 0.5)},
            f"this CPU has neither AVX512-BF16 nor AMX-BF16, {CONVERTS}",
        ),
        (
            WITH_AMX,
            {"float16": (1.0, 1.0, 0.05)},
            "oneDNN has no fast float16 kernel for the backward pass of convolutions",
        ),
        (WITH_AMX, {"bfloat16": SLOW}, "the reason is not known"),
        (M1, {"bfloat16": SLOW}, f"this CPU has no BF16, {CONVERTS}"),
        (M2, {"bfloat16": SLOW}, "the reason is not known"),
        (machine(architecture="riscv64"), {"bfloat16": SLOW}, "the reason is not known"),
        (T4, {"bfloat16": SLOW}, "compute capability 7.5 has no tensor cores for bfloat16"),
        (H100, {"bfloat16": SLOW}, "the reason is not known"),
    ],
    ids=str,
)
def test_a_slow_format_is_warned_of_with_its_reason(
    where: Machine, speedups: Speedups, reason: str
) -> None:
    (format_,) = speedups
    (warning,) = texts_of(where, speedups)
    assert warning.startswith(f"warning {format_}: {format_} is slower than float32 here (")
    assert warning.endswith(f": {reason}")


def test_instructions_that_are_not_known_are_no_reason() -> None:
    where = machine("AVX2")
    where.instructions["AMX-BF16"] = None
    (warning,) = texts_of(where, {"bfloat16": SLOW})
    assert warning.endswith("the reason is not known")


def test_a_gpu_of_another_maker_is_not_judged_by_nvidia_s_table() -> None:
    where = gpu("9.4")
    assert where.cuda
    where.cuda.tensor_cores = None
    (warning,) = texts_of(where, {"bfloat16": SLOW})
    assert warning.endswith("the reason is not known")


def test_the_ops_that_are_slower_are_named_with_their_factors_and_no_others() -> None:
    (warning,) = texts_of(WITH_BF16, {"bfloat16": (4.0, 0.84, 0.5)})
    assert "(convolution 0.84x, convolution backward 0.50x)" in warning


def test_what_runs_do_about_it_is_reported() -> None:
    (warning,) = texts_of(AVX2_ONLY, {"float16": SLOW}, kept=modes(OPS))
    assert warning.endswith("; fp16_mixed compute such ops in float32 (speed=auto)")


@pytest.mark.parametrize("value", ["AVX512_CORE", "AVX2"])
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_limit_is_the_reason_where_it_forbids_what_the_cpu_has(variable: str, value: str) -> None:
    taken = value != "AVX2"  # below AVX512 PyTorch hands oneDNN no bfloat16
    where = machine(
        *("AVX2", "AVX512", "AVX512-BF16"),
        onednn=limited(variable, value, bfloat16=taken, float16=False),
    )
    slow, limit = texts_of(where, {"bfloat16": (0.7, 0.5, 0.5)})
    kept = f"{variable}={value} keeps oneDNN from"
    assert slow.endswith(f": {kept} AVX512-BF16, {CONVERTS if taken else LOOPS}")
    lost = "AVX512-BF16" if taken else "AVX512, AVX512-BF16"
    assert limit.startswith(f"warning instructions: {kept} {lost}, which this CPU has")
    assert "unset it" in limit


def test_a_limit_is_no_reason_where_one_of_two_sets_is_left() -> None:
    """AVX512_CORE_BF16 forbids AMX and leaves AVX512-BF16: another cause makes bfloat16 slow."""
    limit = limited("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    where = machine("AVX2", "AVX512", "AVX512-BF16", "AVX512-FP16", "AMX-BF16", onednn=limit)
    slow, instructions = texts_of(where, {"bfloat16": SLOW})
    assert slow.endswith("the reason is not known")
    assert "keeps oneDNN from AVX512-FP16, AMX-BF16, which this CPU has" in instructions


# ---- instructions capped -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (WITH_BF16, "AVX512_CORE_BF16"),  # as much as the CPU has
        (WITH_BF16, "AVX3"),  # oneDNN ignores an unknown value
        (M2, "AVX2"),  # and has no limit on other architectures
    ],
    ids=str,
)
def test_a_limit_without_effect_is_no_finding(where: Machine, value: str) -> None:
    onednn = replace(where.onednn, **limited("ONEDNN_MAX_CPU_ISA", value))
    assert texts_of(replace(where, onednn=onednn)) == []


def test_higher_limits_allow_more() -> None:
    """Each name allows what its own predecessors allow; all need AVX2 from AVX2 on."""
    chain = ["AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_FP16"]
    chain += ["AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16"]
    for lower, higher in pairwise(chain):
        assert ALLOWED[lower] < ALLOWED[higher]
    assert ALLOWED["DEFAULT"] == ALLOWED["AVX512_CORE_AMX_FP16"]


@pytest.mark.parametrize(
    ("wanted", "used", "expected"),
    [
        ("avx2", "AVX2", "warning instructions: ATEN_CPU_CAPABILITY=avx2 keeps PyTorch's own"),
        ("default", "DEFAULT", "warning instructions: ATEN_CPU_CAPABILITY=default keeps PyTorch's"),
        ("AVX2", "AVX512", None),  # PyTorch ignores it
        ("avx512", "AVX512", None),
    ],
)
def test_vectors_capped_for_pytorch_s_own_kernels(
    wanted: str, used: str, expected: str | None
) -> None:
    variables = {"ATEN_CPU_CAPABILITY": wanted}
    where = machine("AVX2", "AVX512", variables=variables, cpu_capability=used)
    texts = texts_of(where)
    assert (texts == []) if expected is None else texts[0].startswith(expected)
    assert len(texts) == (expected is not None)


def test_a_limit_on_mkl_is_noted_as_it_slows_float32() -> None:
    (note,) = texts_of(machine("AVX2", variables={"MKL_ENABLE_INSTRUCTIONS": "AVX2"}))
    assert "note instructions: MKL_ENABLE_INSTRUCTIONS=AVX2" in note


def test_cpu_limits_are_not_reported_of_a_gpu() -> None:
    limit = limited("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert texts_of(gpu("9.0", "float16", onednn=limit, threads=64, load_average=99.0)) == []


# ---- threads and load ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"threads": 9}, "warning threads: 9 threads on 8 cores"),
        ({"threads": 8, "cpu_quota": 1.5}, "warning threads: 8 threads, but the container may use"),
        ({"threads": 1, "cpu_quota": 0.5}, None),  # there is no less than one
        ({"threads": 4, "cpu_quota": 4.0}, None),
        ({"threads": 4}, None),  # a thread per core, where the system counts two
    ],
    ids=str,
)
def test_threads_that_do_not_fit_the_cores(changes: dict[str, Any], expected: str | None) -> None:
    texts = texts_of(machine("AVX2", **changes))
    assert (texts == []) if expected is None else (len(texts) == 1 and expected in texts[0])


def test_the_number_of_threads_to_set_is_reported() -> None:
    (quota,) = texts_of(machine("AVX2", cpu_quota=2.5))
    assert quota.endswith("set OMP_NUM_THREADS=2")


@pytest.mark.parametrize(
    ("load", "warned"), [(0.4, False), (0.6, True), (30.0, True), (None, False)]
)
def test_load_by_others_is_warned_of(load: float | None, warned: bool) -> None:
    texts = texts_of(machine("AVX2", load_average=load), threads=3)
    assert len(texts) == warned
    if warned:
        assert f"load average was {load:.1f} on 8 cores" in texts[0]
        assert "rates are of 3 of 8 threads and may be too low" in texts[0]
        (all_used,) = texts_of(machine("AVX2", load_average=load))
        assert "; rates may be too low: measure again" in all_used


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


def test_warnings_come_first() -> None:
    variables = {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    where = machine("AVX2", variables=variables, gpu_unused="not usable")
    levels = [f.split()[0] for f in texts_of(where, {"bfloat16": SLOW})]
    assert levels == ["warning", "warning", "note"]
