"""The whole examination of this machine: its facts, its rates, and what follows for each mode.

A matmul is timed in every format at a small size, which fits the budget even if a kernel is a
hundred times slower than the others; then at a large size, which shows the rate of fast kernels. A
format that would exceed the budget at the large size is left out: no rate is extrapolated. Each
round includes float32, and a speed-up is float32's time over another format's, round by round.

A step consists of matmuls and of other ops, in shares that depend on the model. So the speed-up of
a step is not computed from this one; `mprun compare` measures it. The modes are those of
`conf/precision/`, with the execution, the substitutions and the loss scale that a run would have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import accumulate
from typing import Literal, cast

import numpy as np
import torch
from scipy.stats import binom

from mprun import NEWEST_TORCH, __version__, release
from mprun.config import Config, compose
from mprun.config.settings import modes
from mprun.config.validate import loss_scale_kind
from mprun.errors import MprunError, as_usage_error
from mprun.precision import Policy, devices, has_tf32
from mprun.precision.execution import arithmetic_for, choose_execution, choose_fp32_fallback
from mprun.precision.policy import torch_dtype
from mprun.precision.rates import Timer, alternate, in_threads, matmul, timer
from mprun.records.console import ReportPart, report_nothing
from mprun.records.mode_names import SHIPPED_MODES
from mprun.train.assemble.dtype_choices import build_policy
from mprun.train.assemble.plan import choose_device
from mprun.train.machine.doctor_result import (
    FORMATS,
    SCHEMA_VERSION,
    Conclusion,
    Examination,
    Format,
    Machine,
    MachineFinding,
    Mode,
    Rate,
    Ratio,
    SpeedVerdict,
    Spread,
)
from mprun.train.machine.machine import (
    NEEDED,
    examine_machine,
    git_commit,
    is_busy,
    threads_to_measure,
)
from mprun.train.machine.machine import versions as record_versions

# Rounds: as many as fit the budget, between these; 6 are the fewest with a 95 % interval
FEWEST, MOST = 6, 25
WARMUP = 2  # Calls made before a matmul is timed in rounds
SMALL, LARGE = 0.35, 0.65  # Shares of the budget
SIDES = {"cpu": (256, 1024), "cuda": (2048, 4096)}  # Rows and columns, small and large
# Ops that may have no fast kernel, and their names in substitutions
ATEN = {
    "matmul": "aten.mm",
    "convolution": "aten.convolution",
    "convolution_backward": "aten.convolution_backward",
}
LIMIT = 1.1  # A smaller factor is no reason to change the precision: it counts as the same speed


def examine(device_name: str, budget_s: float, report: ReportPart = report_nothing) -> Examination:
    """Inspect the machine, measure its rates, and report what follows for each mode.

    Rates are measured for about `budget_s`; `report` is called before each part.

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
            rates = measure_rates(device, budget_s, report)
        measured_s = time.perf_counter() - start
    except (MemoryError, torch.OutOfMemoryError):
        raise MprunError(
            f"out of memory on {device.type} while measuring, which takes about 1 GiB: free some"
        ) from None
    report("examining the modes")
    found = Examination(
        machine=machine,
        versions=versions(),
        threads=threads,
        rates=rates,
        modes=examine_modes(device, machine.hardware.accelerated),
        schema_version=SCHEMA_VERSION,
        examined_at=examined_at,
        mprun_version=__version__,
        git_commit=git_commit(),
        budget_s=budget_s,
        measured_s=measured_s,
    )
    return replace(found, findings=findings(found), conclusions=conclusions(found))


def versions() -> dict[str, str | None]:
    """The versions in a record, and those of CUDA and cuDNN; None if absent."""
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        **record_versions(),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


# ---- the modes -----------------------------------------------------------------------------------


def examine_modes(device: torch.device, accelerated: dict[str, bool]) -> list[Mode]:
    """A row for each mode, in the order of `SHIPPED_MODES`.

    `accelerated`: 16-bit dtype to whether its matmuls are faster than float32's, as measured.
    """
    # modes of a user's own folder are not named there, and come last
    order = {name: n for n, name in enumerate(SHIPPED_MODES)}
    names = sorted(modes(), key=lambda name: order.get(name, len(order)))
    configs = [compose([f"precision={n}", f"device={device.type}"]).config for n in names]
    return [_mode(config, device, accelerated) for config in configs]


def format_of(policy: Policy) -> Format:
    """The number format of a mode's matmuls."""
    return "tf32" if policy.tf32 else cast(Format, policy.compute_dtype)


def _mode(config: Config, device: torch.device, accelerated: dict[str, bool]) -> Mode:
    policy, speed = build_policy(config), config.speed.name
    with as_usage_error():
        chosen = choose_execution(config.execution, policy, device, speed)
    # the kernels are measured once in a process
    fallback = choose_fp32_fallback(speed, policy, chosen.name, device)
    arithmetic = arithmetic_for(policy, chosen.name, fallback, config.seed)
    substituted = {s.op for s in arithmetic.substitutions}
    native = chosen.name == "native"
    return Mode(
        name=policy.name,
        format=format_of(policy),
        execution=cast(Literal["native", "emulated"], chosen.name),
        why_emulated=chosen.why_emulated,
        accelerated=accelerated.get(policy.compute_dtype) if native else None,
        substituted=[op for op, name in ATEN.items() if name in substituted],
        loss_scale=loss_scale_kind(config, ()),
        products_of_8_bits=native and policy.gemms != "none",
    )


# ---- the rates -----------------------------------------------------------------------------------


def formats_of(device: torch.device) -> list[Format]:
    """The formats that the device computes in without emulation."""
    has = {"tf32": has_tf32(device), "float64": devices.backend(device).float64}
    return [f for f in FORMATS if has.get(f, True)]


def measure_rates(
    device: torch.device, budget_s: float, report: ReportPart = report_nothing
) -> list[Rate]:
    """The rates of a matmul in each format, the small size first.

    It takes about `budget_s`; the fewest rounds are made in any case.

    Raises:
        torch.OutOfMemoryError: the matrices do not fit the device.
    """
    small, large = SIDES.get(device.type, SIDES["cuda"])
    rates = _measure(small, formats_of(device), device, budget_s * SMALL, report)
    factor = (large / small) ** 3 / 1e3  # of operations; and times are in milliseconds
    expected_s = {rate.format: rate.time_ms.median * factor for rate in rates}
    fitting = which_fit(expected_s, budget_s * LARGE)
    return rates + _measure(large, fitting, device, budget_s * LARGE, report)


def which_fit(expected_s: Mapping[Format, float], share_s: float) -> list[Format]:
    """The formats to measure: the slowest are left out until twice the fewest rounds fit the time.

    None if float32 does not fit: the speed-up needs it. `expected_s`: about how long a call in each
    format takes.
    """
    quickest = sorted(expected_s, key=lambda format_: expected_s[format_])
    total_s = accumulate(expected_s[format_] for format_ in quickest)
    each_s = share_s / (2 * FEWEST + WARMUP)  # twice: the estimate may be off by a factor
    fit = {format_ for format_, s in zip(quickest, total_s, strict=True) if s <= each_s}
    return [format_ for format_ in expected_s if format_ in fit and "float32" in fit]


def _measure(
    side: int, formats: Sequence[Format], device: torch.device, share_s: float, report: ReportPart
) -> list[Rate]:
    """The rates in formats, float32 among them, timed in turn."""
    size, flops = f"{side}x{side}x{side}", 2 * side**3
    timers = [_timer(side, format_, device) for format_ in formats]
    round_s = sum(t.round_s for t in timers)
    rounds = max(FEWEST, min(MOST, int(share_s / round_s))) if timers else 0

    def begin_round(done: int) -> None:
        report(f"rates at {size}: round", done, rounds)

    times_s = dict(zip(formats, alternate(timers, rounds, begin_round), strict=True))
    return [
        Rate(
            format=format_,
            size=size,
            flops=flops,
            time_ms=spread([t * 1e3 for t in times]),
            gflops=spread([flops / t / 1e9 for t in times]),
            speedup=ratio([base / t for base, t in zip(times_s["float32"], times, strict=True)]),
        )
        for format_, times in times_s.items()
    ]


def _timer(side: int, format_: Format, device: torch.device) -> Timer:
    tf32 = format_ == "tf32"  # a switch on float32 tensors
    return timer(matmul(side), torch_dtype("float32" if tf32 else format_), device, tf32)


def spread(values: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile of at least one value."""
    p10, median, p90 = (float(x) for x in np.percentile(values, [10, 50, 90]))
    return Spread(median=median, p10=p10, p90=p90, n=len(values))


def ratio(values: Sequence[float]) -> Ratio:
    """The median and its 95 % interval.

    The interval is from the k-th smallest value to the k-th largest, k as large as leaves 2.5 % or
    less outside on either side (Hahn and Meeker, "Statistical Intervals").
    """
    ordered, n = sorted(values), len(values)
    # Whatever the distribution, the number of values below its median is binomial with p = 1/2.
    # Fewer than six values reach no 95 %: k is 1, and their interval is all of them.
    k = max(1, int(binom.ppf(0.025, n, 0.5)))
    return Ratio(median=float(np.median(ordered)), low=ordered[k - 1], high=ordered[n - k], n=n)


# ---- what follows --------------------------------------------------------------------------------

ADVICE: dict[SpeedVerdict, str] = {
    "worth trying": "worth trying",
    "no gain": "no gain in speed",
    "not for speed": "for their effect on accuracy and memory, not for speed",
    "not known": "times vary too much, measure again",
}
PRODUCTS_OF_8_BITS: tuple[SpeedVerdict, str] = (
    "not known",
    "native products of 8 bits: whether they pay depends on the layers' sizes and on compiling "
    "(speed.compile=true); `mprun doctor recipe=...` measures them layer by layer",
)
EMULATED: tuple[SpeedVerdict, str] = ("not for speed", "emulated here: for accuracy, not for speed")


def judge(rate: Rate) -> SpeedVerdict:
    """What a format is good for, by the 95 % interval of its matmul's speed-up."""
    speedup = rate.speedup
    if speedup.low > 1 and speedup.median >= LIMIT:
        return "worth trying"
    if speedup.high < 1 and speedup.median <= 1 / LIMIT:
        return "not for speed"
    excludes_1 = speedup.low > 1 or speedup.high < 1
    # an interval that contains 1 and is wider than the limits: the machine was too busy
    is_narrow = 1 / LIMIT < speedup.low <= speedup.high < LIMIT
    return "no gain" if excludes_1 or is_narrow else "not known"


def conclusions(found: Examination) -> list[Conclusion]:
    """The use of each format's modes; native and emulated ones are separate."""
    rates = {rate.format: rate for rate in found.rates}  # the larger size last
    natives, emulations = list[Conclusion](), list[Conclusion]()
    for format_ in FORMATS[1:]:  # without float32
        modes = [mode for mode in found.modes if mode.format == format_]
        native = [m for m in modes if m.execution == "native"]
        if plain := [m for m in native if not m.products_of_8_bits]:
            natives.append(_native(format_, plain, rates[format_]))
        natives += _conclude(format_, [m for m in native if m not in plain], PRODUCTS_OF_8_BITS)
        emulations += _conclude(format_, [m for m in modes if m not in native], EMULATED)
    return natives + emulations


def _native(format_: Format, modes: Sequence[Mode], rate: Rate) -> Conclusion:
    substituted = modes[0].substituted  # the same in all of a format: it depends on kernels
    facts = [] if "matmul" in substituted else [f"matmul {factor(rate)} as fast as float32"]
    verdict = judge(rate) if facts else "not for speed"
    if substituted:
        ops = ", ".join(op.replace("_", " ") for op in substituted)
        facts.append(f"{ops} computed in float32 (speed=auto)")
    names = [mode.name for mode in modes]
    text = f"{format_} ({', '.join(names)}): {'; '.join(facts)}: {ADVICE[verdict]}"
    return Conclusion(format=format_, modes=names, verdict=verdict, text=text)


def _conclude(
    format_: Format, modes: Sequence[Mode], advice: tuple[SpeedVerdict, str]
) -> Iterator[Conclusion]:
    """The same advice for all of these; none without a mode."""
    if names := [mode.name for mode in modes]:
        text = f"{', '.join(names)}: {advice[1]}"
        yield Conclusion(format=format_, modes=names, verdict=advice[0], text=text)


def factor(rate: Rate) -> str:
    """A rate over float32's, "5.6x"; with its interval if the result is not known."""
    speedup = rate.speedup
    median, low, high = (f"{x:#.2g}x" for x in (speedup.median, speedup.low, speedup.high))
    return f"{median} [{low} to {high}]" if judge(rate) == "not known" else median


# Environment variables that limit kernels, to those kernels
LIMITING = {
    "ONEDNN_MAX_CPU_ISA": "oneDNN, which computes matmuls and convolutions",
    "DNNL_MAX_CPU_ISA": "oneDNN, which computes matmuls and convolutions",
    "ATEN_CPU_CAPABILITY": "PyTorch's own kernels (elementwise ops, casts)",
    "MKL_ENABLE_INSTRUCTIONS": "MKL, which computes float32 matmuls",
}
GPU_UNUSED = {
    "cpu asked for": "there is a GPU, but device=cpu was set: device=cuda examines it",
    "no cuda in torch": "there is an NVIDIA driver, but this PyTorch is built without CUDA",
    "not usable": "there is an NVIDIA driver, but PyTorch finds no GPU: see nvidia-smi",
}


def findings(found: Examination) -> list[MachineFinding]:
    """Facts that affect timed runs: warnings, of what makes them slower than need be, first."""
    warnings = [*_slow_formats(found), *_of_environment(found)]
    notes = list[tuple[str, str]]()
    if (why := found.machine.gpu_unused) is not None:
        (notes if why == "cpu asked for" else warnings).append(("gpu", GPU_UNUSED[why]))
    if release(torch_version := found.versions["torch"] or "") > NEWEST_TORCH:
        newest = ".".join(map(str, NEWEST_TORCH))
        notes.append(("versions", f"mprun knows PyTorch up to {newest}, this is {torch_version}"))
    return [
        *(MachineFinding(level="warning", about=about, text=text) for about, text in warnings),
        *(MachineFinding(level="note", about=about, text=text) for about, text in notes),
    ]


def _slow_formats(found: Examination) -> Iterator[tuple[str, str]]:
    """What a text is about, and the text."""
    rates = {rate.format: rate for rate in found.rates}  # the larger size last
    for format_, rate in rates.items():
        if judge(rate) == "not for speed" and format_ != "float64":  # of which nobody expects it
            slow = f"{format_} is slower than float32 here (matmul {factor(rate)})"
            yield format_, f"{slow}: {why_slow(format_, found.machine)}"


def _of_environment(found: Examination) -> Iterator[tuple[str, str]]:
    """What limits the kernels of the device that is examined."""
    machine = found.machine
    if machine.cuda is None:
        for name, kernels in LIMITING.items():
            if value := machine.variables.get(name):
                yield "instructions", f"{name}={value} can slow down {kernels}; unset it"
        yield from _shared_cores(machine, found.threads)
    elif machine.variables.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield "tf32", "NVIDIA_TF32_OVERRIDE=0: precision=tf32 computes in float32; unset it"


def _shared_cores(machine: Machine, threads: int) -> Iterator[tuple[str, str]]:
    cores = float(machine.hardware.cores)
    fitting = cores if machine.cpu_quota is None else min(cores, machine.cpu_quota)
    if machine.threads > max(1, fitting):
        yield (
            "threads",
            f"{machine.threads} threads, but this process may use {fitting:g} cores: threads wait "
            f"for each other; set OMP_NUM_THREADS={max(1, int(fitting))}",
        )
    if is_busy(machine):
        yield (
            "load",
            f"other processes use the cores: the load average was {machine.load_average:.1f} on "
            f"{machine.cores_total} cores before measuring; rates, of {threads} of "
            f"{machine.threads} threads, may be too low: measure again when the machine is idle",
        )


def why_slow(format_: Format, machine: Machine) -> str:
    """The reason in a few words."""
    cuda, needed = machine.cuda, NEEDED.get(machine.architecture, {}).get(format_, ())
    if cuda is not None and cuda.tensor_cores is not None and format_ not in cuda.tensor_cores:
        return f"compute capability {cuda.compute_capability} has no tensor cores for it"
    if cuda is None and needed and all(machine.instructions.get(name) is False for name in needed):
        return f"this CPU has no {' or '.join(needed)}"
    return "the reason is not known"
