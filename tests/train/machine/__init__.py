"""Machines made up: what `mprun doctor` would have found on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from mprun.train.machine.doctor_result import (
    FORMATS,
    SCHEMA_VERSION,
    Examination,
    Format,
    Machine,
    Mode,
    Rate,
    Ratio,
    Spread,
)
from mprun.train.machine.machine import INSTRUCTIONS

Speedups = dict[Format, float]
"""Format to the speed-up of its matmul over float32's."""


def spread(median: float, width: float = 1.0) -> Spread:
    """A spread from median / width to median * width."""
    return Spread(median=median, p10=median / width, p90=median * width, n=25)


def ratio(median: float, low: float | None = None, high: float | None = None) -> Ratio:
    """A speed-up, by default with an interval of 1 % on either side."""
    return Ratio(
        median=median,
        low=median / 1.01 if low is None else low,
        high=median * 1.01 if high is None else high,
        n=25,
    )


def rate(format_: Format, speedup: Ratio, flops: int = 10**9, width: float = 1.1) -> Rate:
    """One measured rate; float32 would do 100 GFLOP/s."""
    return Rate(
        format=format_,
        size=f"{flops} operations",
        flops=flops,
        time_ms=spread(flops / 1e8 / speedup.median, width),
        gflops=spread(100 * speedup.median, width),
        speedup=speedup,
    )


def rates(speedups: Speedups, flops: int = 10**9) -> list[Rate]:
    """Rates in float32 and the formats given."""
    every: Speedups = {"float32": 1.0, **speedups}
    return [rate(name, ratio(every[name]), flops) for name in FORMATS if name in every]


def modes(substituted: tuple[str, ...] = (), tf32: bool = False) -> list[Mode]:
    """Every mode; `substituted` are float16's ops computed in float32."""
    rows: list[tuple[str, Format, bool]] = [
        ("fp32", "float32", True),
        ("tf32", "tf32", tf32),
        ("bf16_mixed", "bfloat16", True),
        ("bf16_true", "bfloat16", True),
        ("fp16_mixed", "float16", True),
        ("half_sr_full", "float16", False),
    ]
    return [
        Mode(
            name=name,
            format=format_,
            execution="native" if native else "emulated",
            why_emulated=None if native else "there is a reason",
            accelerated=None,
            substituted=[*substituted] if format_ == "float16" and native else [],
            loss_scale="dynamic" if format_ == "float16" else "none",
        )
        for name, format_, native in rows
    ]


def machine(
    *has: str,
    architecture: str = "x86_64",
    onednn: dict[str, Any] | None = None,
    accelerated: dict[str, bool] | None = None,
    **changes: Any,
) -> Machine:
    """A quiet machine of 8 cores with these of its architecture's instructions.

    Args:
        has: names in `INSTRUCTIONS`; the others are not there.
        architecture: the processor's.
        onednn: fields of `OneDnn` that differ from a library that takes both.
        accelerated: of `hardware`; by default neither format.
        changes: fields of `Machine` that differ.
    """
    names = INSTRUCTIONS.get(architecture, {})
    assert set(has) <= set(names)
    library = {
        "version": "3.13.3",
        "bfloat16": True,
        "float16": True,
    }
    made = {
        "system": "Linux",
        "architecture": architecture,
        "hardware": {
            "device": "cpu",
            "name": "Some CPU",
            "cores": 8,
            "memory_bytes": 2**34,
            "accelerated": accelerated or {},
        },
        "cores_total": 8,
        "cpu_quota": None,
        "threads": 8,
        "load_average": 0.1,
        "instructions": {name: name in has for name in names},
        "cpu_capability": "AVX512" if "AVX512" in has else "AVX2",
        "onednn": {**library, **(onednn or {})},
        "variables": {},
        "cuda": None,
        "gpu_unused": None,
        **changes,
    }
    return msgspec.convert(msgspec.to_builtins(made), Machine)


def measured(
    where: Machine, speedups: Speedups, kept: list[Mode] | None = None, **changes: Any
) -> Examination:
    """An examination of `where` that found these speed-ups over float32."""
    found = Examination(
        machine=where,
        versions={"python": "3.12.0", "torch": "2.11.0", "cuda": None},
        threads=where.threads,
        rates=rates({"bfloat16": 1.0, "float16": 1.0, **speedups}),
        modes=modes() if kept is None else kept,
        schema_version=SCHEMA_VERSION,
        examined_at="2024-02-29T12:00:00+00:00",
        mprun_version="0.1.0",
        git_commit=None,
        budget_s=5.0,
        measured_s=4.2,
    )
    return replace(found, **changes)


AVX2_ONLY = machine("AVX2", onednn={"bfloat16": False, "float16": False})
AVX512_ONLY = machine("AVX2", "AVX512", onednn={"float16": False})
WITH_BF16 = machine("AVX2", "AVX512", "AVX512-BF16", onednn={"float16": False})
WITH_AMX = machine("AVX2", "AVX512", "AVX512-BF16", "AVX512-FP16", "AMX-BF16")
GRANITE = machine("AVX2", "AVX512", "AVX512-BF16", "AVX512-FP16", "AMX-BF16", "AMX-FP16")
M1 = machine("FP16", architecture="aarch64", system="Darwin", cpu_capability="DEFAULT")
M2 = machine("FP16", "BF16", architecture="aarch64", system="Darwin", cpu_capability="DEFAULT")


def gpu(capability: str, *units: str, **changes: Any) -> Machine:
    """A machine whose GPU is examined."""
    cuda = {
        "compute_capability": capability,
        "tensor_cores": [*units],
        "multiprocessors": 132,
        "memory_free_bytes": 2**36,
    }
    made = machine("AVX2", "AVX512", cuda=cuda, **changes)
    made.hardware.device = "cuda"
    return made


H100 = gpu("9.0", "float16", "tf32", "bfloat16", "float8")
T4 = gpu("7.5", "float16")
