"""What to know before a run on a machine is timed: a pure function of what was measured.

Warnings are about what makes 16 bits slower than float32 or disturbs measurements; the rest is
notes. Every sentence follows from the examination alone, so made-up machines can test it.
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
OWN_LOOPS = "so PyTorch computes {0} in loops of its own"
CONVERTS = "so oneDNN converts {0} to float32 and back"


def findings(measured: Measured) -> list[Finding]:
    """What to know, warnings first."""
    machine = measured.machine
    every = [*_slow_formats(measured), *_gpu(machine)]
    if machine.cuda is None:
        every += [*_onednn(machine), *_vectors(machine), *_threads(machine), *_load(measured)]
    every += [*_disagreements(measured), *_noise(measured)]
    return sorted(every, key=lambda f: f.level == "note")


def _warning(about: str, text: str) -> Finding:
    return Finding(level="warning", about=about, text=text)


def _note(about: str, text: str) -> Finding:
    return Finding(level="note", about=about, text=text)


def _slow_formats(measured: Measured) -> Iterator[Finding]:
    """A warning for each format in which an op is slower than in float32."""
    for format_ in FORMATS[1:]:
        rates = largest(measured.rates, format_)
        slow = {op: rate for op, rate in rates.items() if judge(rate) == "slower"}
        if not slow:
            continue
        why = why_slow(format_, slow, measured.machine) or "why is not known"
        text = f"{format_} is slower than float32 here ({times(slow)}): {why}"
        replaced = [m.name for m in measured.modes if m.substituted and m.format == format_]
        if replaced:
            text += f"; {', '.join(replaced)} compute such ops in float32 (speed=auto)"
        yield _warning(format_, text)


def _disagreements(measured: Measured) -> Iterator[Finding]:
    """What records say and what larger sizes in all threads show may differ."""
    for name, said in measured.machine.hardware.accelerated.items():
        rate = largest(measured.rates, name).get("matmul")  # type: ignore[arg-type]
        if rate is None or judge(rate) != ("slower" if said else "faster"):
            continue
        word = "faster" if said else "not faster"
        yield _note(
            name,
            f"runs will record {name} as {word} than float32, by a short matmul in one thread; "
            f"at {rate.size} it is {factor(rate)} as fast (threads: {measured.threads})",
        )


def _noise(measured: Measured) -> Iterator[Finding]:
    """The rate whose times differ most, where that is much."""
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
        yield _note("gpu", "there is a GPU, and device=cpu was asked for: device=cuda examines it")
    elif machine.gpu_unused == "no cuda in torch":
        yield _warning("gpu", "there is an NVIDIA driver, and this PyTorch is built without CUDA")
    elif machine.gpu_unused == "not usable":
        yield _warning("gpu", "there is an NVIDIA driver, and PyTorch finds no GPU: see nvidia-smi")
    if cuda and machine.variables.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield _warning(
            "tf32",
            "NVIDIA_TF32_OVERRIDE=0 switches TF32 off in NVIDIA's libraries: precision=tf32 "
            "computes in float32; unset it",
        )


def _onednn(machine: Machine) -> Iterator[Finding]:
    """What the environment keeps oneDNN from."""
    limit, forbidden = machine.onednn.limit, forbidden_instructions(machine)
    if limit is None:
        return
    said = f"{machine.onednn.limit_by}={limit}"
    if machine.architecture != "x86_64":
        yield _note("instructions", f"{said} has no effect on {machine.architecture}")
    elif limit not in ALLOWED:
        yield _note("instructions", f"{said}: oneDNN knows no such value and ignores it")
    elif forbidden:
        yield _warning(
            "instructions",
            f"{said} keeps oneDNN from {', '.join(forbidden)}, which this CPU has: matmuls and "
            "convolutions can be slower than they need be; unset it",
        )
    elif None in machine.instructions.values():
        yield _note("instructions", f"{said} limits oneDNN; what the CPU has is not fully known")
    else:
        yield _note("instructions", f"{said} keeps oneDNN from nothing this CPU has")


def _vectors(machine: Machine) -> Iterator[Finding]:
    """What the environment keeps PyTorch's own kernels and MKL from."""
    used, has = machine.cpu_capability, machine.instructions
    if wanted := machine.variables.get("ATEN_CPU_CAPABILITY"):
        said = f"ATEN_CPU_CAPABILITY={wanted}"
        best = 2 if has.get("AVX512") else 1 if has.get("AVX2") else 0
        if wanted != used.lower():
            yield _note("instructions", f"PyTorch ignores {said} and uses {used}")
        elif VECTORS.get(used, best) < best:
            yield _warning(
                "instructions",
                f"{said} keeps PyTorch's own kernels (elementwise ops, casts, what oneDNN does not "
                f"take) at {used}: they are slower than they need be; unset it",
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
            f"{threads} threads, and the container may use {quota:g} cores: threads wait for each "
            f"other; set OMP_NUM_THREADS={max(1, int(quota))}",
        )
    elif threads > cores:
        yield _warning(
            "threads",
            f"{threads} threads on {cores} cores: threads wait for each other; set "
            f"OMP_NUM_THREADS={cores}",
        )
    said = [n for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if n in machine.variables]
    if said and threads < cores:
        text = ", ".join(f"{n}={machine.variables[n]}" for n in said)
        yield _note("threads", f"{threads} of {cores} cores used ({text})")


def _load(measured: Measured) -> Iterator[Finding]:
    machine = measured.machine
    if is_busy(machine):
        fewer = measured.threads < machine.threads
        of = f" are of {measured.threads} of {machine.threads} threads and" if fewer else ""
        yield _warning(
            "load",
            f"others compute here too: the load average was {machine.load_average:.1f} on "
            f"{machine.cores_total} cores before measuring; rates{of} may be too low: measure "
            "again when it is quiet",
        )


def why_slow(format_: Format, slow: Collection[OpName], machine: Machine) -> str | None:
    """The reason as text; None where the machine's facts give none.

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
    """What the CPU has and the environment keeps oneDNN from."""
    limit = machine.onednn.limit
    if machine.architecture != "x86_64" or limit not in ALLOWED:
        return []
    return [n for n, there in machine.instructions.items() if there and n not in ALLOWED[limit]]


def _consequence(format_: Format, machine: Machine) -> str:
    taken = machine.onednn.bfloat16 if format_ == "bfloat16" else machine.onednn.float16
    return (CONVERTS if taken else OWN_LOOPS).format("it")


def _on_gpu(format_: Format, cuda: Cuda) -> str | None:
    units = cuda.tensor_cores
    if units is None or format_ in units:
        return None
    return f"compute capability {cuda.compute_capability} has no tensor cores for {format_}"
