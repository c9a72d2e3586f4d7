"""The whole examination of this machine: its facts, its rates, and what follows for each mode.

The modes are those of `conf/precision/`, with the execution, the substitutions and the loss scale
that a run would have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Literal, cast

import torch

from mprun import __version__
from mprun.config import Config, compose
from mprun.config.settings import modes
from mprun.config.validate import loss_scale_kind
from mprun.errors import MprunError, as_usage_error
from mprun.precision import Policy
from mprun.precision.execution import arithmetic_for, choose_execution, choose_fp32_fallback
from mprun.precision.rates import in_threads
from mprun.records.console import ReportPart, report_nothing
from mprun.records.mode_names import SHIPPED_MODES
from mprun.train.assemble.dtype_choices import build_policy
from mprun.train.assemble.plan import choose_device
from mprun.train.machine.doctor_result import (
    SCHEMA_VERSION,
    Examination,
    Format,
    Measured,
    Mode,
    OpName,
)
from mprun.train.machine.machine import examine_machine, git_commit, threads_to_measure
from mprun.train.machine.machine import versions as record_versions
from mprun.train.machine.machine_findings import conclusions, findings
from mprun.train.machine.measure import measure_rates

# The measured ops, and their names in substitutions
ATEN: dict[OpName, str] = {
    "matmul": "aten.mm",
    "convolution": "aten.convolution",
    "convolution_backward": "aten.convolution_backward",
}


def examine_modes(device: torch.device, accelerated: dict[str, bool]) -> list[Mode]:
    """A row for each mode, in the order of `SHIPPED_MODES`.

    Args:
        device: the device.
        accelerated: 16-bit dtype to whether its matmuls are faster than float32's, as measured.
    """
    # modes of a user's own folder are not named there, and come last
    order = {name: n for n, name in enumerate(SHIPPED_MODES)}
    names = sorted(modes(), key=lambda name: order.get(name, len(order)))
    configs = [compose([f"precision={n}", f"device={device.type}"]).config for n in names]
    return list(_rows(configs, device, accelerated))


def format_of(policy: Policy) -> Format:
    """The number format of a mode's matmuls and convolutions."""
    return "tf32" if policy.tf32 else cast(Format, policy.compute_dtype)


def _rows(
    configs: Sequence[Config], device: torch.device, accelerated: dict[str, bool]
) -> Iterator[Mode]:
    # Measured once for all modes with the same arithmetic.
    fp32_fallback: dict[tuple[str, str], str] = {}
    for config in configs:
        policy = build_policy(config)
        with as_usage_error():
            chosen = choose_execution(config.execution, policy, device, config.speed.name)
        execution = chosen.name
        alike = (policy.compute_dtype, execution)
        if alike not in fp32_fallback:
            fp32_fallback[alike] = choose_fp32_fallback(
                config.speed.name, policy, execution, device
            )
        arithmetic = arithmetic_for(policy, execution, fp32_fallback[alike], config.seed)
        substituted = {s.op for s in arithmetic.substitutions}
        native = execution == "native"
        yield Mode(
            name=policy.name,
            format=format_of(policy),
            execution=cast(Literal["native", "emulated"], execution),
            why_emulated=chosen.why_emulated,
            accelerated=accelerated.get(policy.compute_dtype) if native else None,
            substituted=[op for op, name in ATEN.items() if name in substituted],
            loss_scale=loss_scale_kind(config, ()),
            products_of_8_bits=native and policy.gemms != "none",
        )


def examine(
    device_name: str,
    budget_s: float,
    report: ReportPart = report_nothing,
) -> Examination:
    """Inspect the machine, measure its rates, and report what follows for each mode.

    Args:
        device_name: auto, cpu or cuda.
        budget_s: about how long rates are measured.
        report: is called before each part.

    Raises:
        UsageError: there is no such device.
        MprunError: the device has no memory for it.
    """
    device = choose_device(device_name)
    examined_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report("examining the machine")
    try:
        machine = examine_machine(device)
        threads = threads_to_measure(machine)
        start = time.perf_counter()
        with in_threads(threads):
            rates, copy = measure_rates(device, budget_s, report)
        measured_s = time.perf_counter() - start
    except (MemoryError, torch.OutOfMemoryError):
        raise MprunError(
            f"out of memory on {device.type} while measuring, which takes about 2 GiB: free some"
        ) from None
    report("examining the modes")
    modes = examine_modes(device, machine.hardware.accelerated)
    measured = Measured(
        machine=machine,
        versions=versions(),
        threads=threads,
        rates=rates,
        copy=copy,
        modes=modes,
    )
    return Examination(
        schema_version=SCHEMA_VERSION,
        examined_at=examined_at,
        mprun_version=__version__,
        git_commit=git_commit(),
        budget_s=budget_s,
        measured_s=measured_s,
        **vars(measured),
        findings=findings(measured),
        conclusions=conclusions(measured),
    )


def versions() -> dict[str, str | None]:
    """The versions in a record, and those of CUDA and cuDNN; None if absent."""
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        **record_versions(),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }
