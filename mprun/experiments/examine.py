"""The whole examination of this machine."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import torch

from mprun import __version__
from mprun.assemble.machine_choices import choose_device
from mprun.console import ReportPart, report_nothing
from mprun.doctor import environment
from mprun.doctor.heap import steady_heap
from mprun.doctor.machine import examine_machine, threads_to_measure
from mprun.doctor.machine_findings import findings
from mprun.doctor.measure import measure_rates
from mprun.doctor.mode_verdicts import conclusions
from mprun.errors import MprunError
from mprun.experiments.machine_modes import examine_modes
from mprun.precision.rates import in_threads
from mprun.records.doctor_record import SCHEMA_VERSION, Examination, Measured


def examine(
    device_name: str,
    budget_s: float,
    report: ReportPart = report_nothing,
    keep_heap: bool = True,
) -> Examination:
    """Inspect the machine, measure its rates, and report what follows for each mode.

    Args:
        device_name: auto, cpu or cuda.
        budget_s: about how long rates are measured.
        report: is called before each part.
        keep_heap: whether the process keeps its memory from now on (`steady_heap`). False where a
            step of `speed=plain` is examined next, whose page faults are to be seen.

    Raises:
        UsageError: there is no such device.
        MprunError: the device has no memory for it.
    """
    device = choose_device(device_name)
    if keep_heap:
        steady_heap()
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
    measured = Measured(machine=machine, threads=threads, rates=rates, copy=copy, modes=modes)
    return Examination(
        schema_version=SCHEMA_VERSION,
        examined_at=examined_at,
        mprun_version=__version__,
        git_commit=environment.git_commit(),
        versions=versions(),
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
        **environment.versions(),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }
