"""Warnings and notes about a machine, derived from its measurements.

Warnings are about causes that make 16 bits slower than float32 or disturb measurements; everything
else is a note. The input is plain data, so tests can use invented machines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mprun.doctor.machine import ALLOWED, NEEDED, is_busy
from mprun.doctor.mode_verdicts import factor, judge, largest, times
from mprun.records.doctor_record import (
    FORMATS,
    Cuda,
    Finding,
    Format,
    Machine,
    Measured,
    OpName,
)

NOISY = 1.5
"""Times that differ by more than this, from the 10th to the 90th percentile, are noted."""
VECTORS = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}
"""The levels of PyTorch's own kernels on x86."""


def findings(measured: Measured) -> list[Finding]:
    """All findings, warnings first."""
    machine = measured.machine
    results = [*_slow_formats(measured), *_gpu(machine)]
    if machine.cuda is None:
        results += [*_onednn(machine), *_vectors(machine), *_threads(machine), *_load(measured)]
    results += [*_disagreements(measured), *_noise(measured)]
    return sorted(results, key=lambda f: f.level == "note")


def _warning(about: str, text: str) -> Finding:
    return Finding(level="warning", about=about, text=text)


def _note(about: str, text: str) -> Finding:
    return Finding(level="note", about=about, text=text)


def _slow_formats(measured: Measured) -> Iterator[Finding]:
    for format_ in FORMATS[1:]:
        rates = largest(measured.rates, format_)
        slow = {op: rate for op, rate in rates.items() if judge(rate) == "slower"}
        if not slow:
            continue
        why = why_slow(format_, slow, measured.machine) or "the reason is not known"
        text = f"{format_} is slower than float32 here ({times(slow)}): {why}"
        replaced = [m.name for m in measured.modes if m.substituted and m.format == format_]
        if replaced:
            text += f"; {', '.join(replaced)} compute such ops in float32 (speed=auto)"
        yield _warning(format_, text)


def _disagreements(measured: Measured) -> Iterator[Finding]:
    """Where the records' short test and the larger sizes in all threads disagree."""
    for name, is_faster in measured.machine.hardware.accelerated.items():
        rate = largest(measured.rates, name).get("matmul")  # type: ignore[arg-type]
        if rate is None or judge(rate) != ("slower" if is_faster else "faster"):
            continue
        word = "faster" if is_faster else "not faster"
        yield _note(
            name,
            f"runs will record {name} as {word} than float32, by a short matmul in one thread; "
            f"at {rate.size} it is {factor(rate)} as fast (threads: {measured.threads})",
        )


def _noise(measured: Measured) -> Iterator[Finding]:
    worst = max(measured.rates, key=lambda r: r.time_ms.p90 / r.time_ms.p10)
    ratio = worst.time_ms.p90 / worst.time_ms.p10
    if ratio > NOISY:
        yield _note(
            "noise",
            f"times vary: by {ratio:.1f}x from the 10th to the 90th percentile for {worst.op} "
            f"in {worst.format} at {worst.size}",
        )


def _gpu(machine: Machine) -> Iterator[Finding]:
    cuda = machine.cuda
    if machine.gpu_unused == "cpu asked for":
        yield _note("gpu", "there is a GPU, but device=cpu was set: device=cuda examines it")
    elif machine.gpu_unused == "no cuda in torch":
        yield _warning("gpu", "there is an NVIDIA driver, but this PyTorch is built without CUDA")
    elif machine.gpu_unused == "not usable":
        yield _warning("gpu", "there is an NVIDIA driver, but PyTorch finds no GPU: see nvidia-smi")
    if cuda and machine.variables.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield _warning(
            "tf32",
            "NVIDIA_TF32_OVERRIDE=0 switches TF32 off in NVIDIA's libraries: precision=tf32 "
            "computes in float32; unset it",
        )


def _onednn(machine: Machine) -> Iterator[Finding]:
    limit, forbidden = machine.onednn.limit, forbidden_instructions(machine)
    if limit is None:
        return
    setting = f"{machine.onednn.limit_by}={limit}"
    if machine.architecture != "x86_64":
        yield _note("instructions", f"{setting} has no effect on {machine.architecture}")
    elif limit not in ALLOWED:
        yield _note("instructions", f"{setting}: oneDNN does not know this value and ignores it")
    elif forbidden:
        yield _warning(
            "instructions",
            f"{setting} keeps oneDNN from {', '.join(forbidden)}, which this CPU has: matmuls and "
            "convolutions can be slower than necessary; unset it",
        )
    elif None in machine.instructions.values():
        yield _note(
            "instructions", f"{setting} limits oneDNN; the CPU's instruction sets are not all known"
        )
    else:
        yield _note("instructions", f"{setting} forbids oneDNN nothing that this CPU has")


def _vectors(machine: Machine) -> Iterator[Finding]:
    used, has = machine.cpu_capability, machine.instructions
    if wanted := machine.variables.get("ATEN_CPU_CAPABILITY"):
        setting = f"ATEN_CPU_CAPABILITY={wanted}"
        best = 2 if has.get("AVX512") else 1 if has.get("AVX2") else 0
        if wanted != used.lower():
            yield _note("instructions", f"PyTorch ignores {setting} and uses {used}")
        elif VECTORS.get(used, best) < best:
            yield _warning(
                "instructions",
                f"{setting} keeps PyTorch's own kernels (elementwise ops, casts, whatever oneDNN "
                f"does not take) at {used}: they are slower than necessary; unset it",
            )
    if wanted := machine.variables.get("MKL_ENABLE_INSTRUCTIONS"):
        yield _note(
            "instructions",
            f"MKL_ENABLE_INSTRUCTIONS={wanted} limits MKL, which computes float32 matmuls: against "
            "a slow float32, 16 bits look better than they are",
        )


def _threads(machine: Machine) -> Iterator[Finding]:
    threads, cores, quota = machine.threads, machine.hardware.cores, machine.cpu_quota
    if quota is not None and threads > max(1, quota):
        yield _warning(
            "threads",
            f"{threads} threads, but the container may use {_cores(quota)}: threads wait for each "
            f"other; set OMP_NUM_THREADS={max(1, int(quota))}",
        )
    elif threads > cores:
        yield _warning(
            "threads",
            f"{threads} threads on {_cores(cores)}: threads wait for each other; set "
            f"OMP_NUM_THREADS={cores}",
        )
    limits = [n for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if n in machine.variables]
    if limits and threads < cores:
        text = ", ".join(f"{n}={machine.variables[n]}" for n in limits)
        yield _note("threads", f"{threads} of {cores} cores used ({text})")


def _cores(count: float | None) -> str:
    if count is None:
        return "an unknown number of cores"
    return f"{count:g} core{'' if count == 1 else 's'}"


def _load(measured: Measured) -> Iterator[Finding]:
    machine = measured.machine
    if is_busy(machine):
        fewer = measured.threads < machine.threads
        of = f" are of {measured.threads} of {machine.threads} threads and" if fewer else ""
        yield _warning(
            "load",
            f"other processes use the cores: the load average was {machine.load_average:.1f} on "
            f"{_cores(machine.cores_total)} before measuring; rates{of} may be too low: measure "
            "again when the machine is idle",
        )


def why_slow(format_: Format, slow: Collection[OpName], machine: Machine) -> str | None:
    """The reason as text; None if it does not follow from the machine's facts.

    Args:
        format_: a format other than float32.
        slow: the ops that are slower in it than in float32.
        machine: the facts.
    """
    if machine.cuda is not None:
        return _on_gpu(format_, machine.cuda)
    needed = NEEDED.get(machine.architecture, {}).get(format_)
    if needed is None:
        return None
    has = {name: machine.instructions.get(name) for name in needed}
    ending = f", {_consequence(format_, machine)}"
    if not any(has.values()):
        if None in has.values():
            return None
        neither = f"neither {' nor '.join(needed)}" if len(needed) > 1 else f"no {needed[0]}"
        return f"this CPU has {neither}{ending}"
    forbidden = forbidden_instructions(machine)
    if all(name in forbidden for name, there in has.items() if there):
        present = ", ".join(name for name, there in has.items() if there)
        onednn = machine.onednn
        return f"{onednn.limit_by}={onednn.limit} keeps oneDNN from {present}{ending}"
    if format_ == "float16" and set(slow) == {"convolution_backward"}:
        return "oneDNN has no fast float16 kernel for the backward pass of convolutions"
    return None


def forbidden_instructions(machine: Machine) -> list[str]:
    """The CPU's instruction sets that the environment forbids oneDNN."""
    limit = machine.onednn.limit
    if machine.architecture != "x86_64" or limit not in ALLOWED:
        return []
    return [n for n, there in machine.instructions.items() if there and n not in ALLOWED[limit]]


def _consequence(format_: Format, machine: Machine) -> str:
    taken = machine.onednn.bfloat16 if format_ == "bfloat16" else machine.onednn.float16
    if taken:
        return "so oneDNN converts it to float32 and back"
    return "so PyTorch computes it in its own loops"


def _on_gpu(format_: Format, cuda: Cuda) -> str | None:
    units = cuda.tensor_cores
    if units is None or format_ in units:
        return None
    return f"compute capability {cuda.compute_capability} has no tensor cores for {format_}"
