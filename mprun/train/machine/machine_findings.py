"""What follows from the examination of a machine: warnings and notes, and the use of each mode.

Warnings are about causes that make 16 bits slower than float32 or disturb measurements; everything
else is a note. A step consists of these ops and of others, in shares that depend on the model. So
the speed-up of a step is not computed from those of its ops; `mprun compare` measures it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from mprun import NEWEST_TORCH, release
from mprun.train.machine.doctor_result import (
    FORMATS,
    Conclusion,
    Cuda,
    Format,
    Machine,
    MachineFinding,
    Measured,
    Mode,
    OpName,
    Rate,
    SpeedVerdict,
)
from mprun.train.machine.machine import ALLOWED, NEEDED, is_busy

LIMIT = 1.1  # A smaller factor is no reason to change the precision: it counts as the same speed

State = Literal["faster", "same", "slower", "not known"]

ADVICE: dict[SpeedVerdict, str] = {
    "worth trying": "worth trying",
    "depends on the model": "worth trying if the faster ops dominate",
    "no gain": "no gain in speed",
    "not for speed": "for their effect on accuracy and memory, not for speed",
    "not known": "times vary too much, measure again",
}
PRODUCTS_OF_8_BITS = (
    "native products of 8 bits, whose casts and scales are many small kernels: whether they pay "
    "depends on the layers' sizes and on compiling (speed.compile=true); `mprun doctor recipe=...` "
    "measures them layer by layer"
)


def conclusions(measured: Measured) -> list[Conclusion]:
    """The use of each format's modes; native and emulated ones are separate."""
    natives, emulations = [], []
    for format_ in FORMATS:
        modes = [m for m in measured.modes if m.format == format_ != "float32"]
        native = [m for m in modes if m.execution == "native" and not m.products_of_8_bits]
        of_8_bits = [m.name for m in modes if m.products_of_8_bits]
        emulated = [m.name for m in modes if m.execution == "emulated"]
        if native:
            natives.append(_native(format_, native, largest(measured.rates, format_)))
        if of_8_bits:
            text = f"{', '.join(of_8_bits)}: {PRODUCTS_OF_8_BITS}"
            natives.append(
                Conclusion(format=format_, modes=of_8_bits, verdict="not known", text=text)
            )
        if emulated:
            text = f"{', '.join(emulated)}: emulated here: for accuracy, not for speed"
            emulations.append(
                Conclusion(format=format_, modes=emulated, verdict="not for speed", text=text)
            )
    return natives + emulations


def largest(rates: Sequence[Rate], format_: Format) -> dict[OpName, Rate]:
    """Each op's rate in a format, at the largest size it was measured at."""
    # by size, so the last one stays in the mapping
    mine = sorted((r for r in rates if r.format == format_), key=lambda r: r.flops)
    return {r.op: r for r in mine}


def judge(rate: Rate) -> State:
    """Whether an op is faster than in float32."""
    speedup = rate.speedup
    median, low, high = speedup.median, speedup.low, speedup.high  # the 95 % interval of the median
    if low > 1:
        return "faster" if median >= LIMIT else "same"
    if high < 1:
        return "slower" if median <= 1 / LIMIT else "same"
    # an interval that contains 1 and is wider than that: the machine was too busy
    return "same" if 1 / LIMIT < low <= high < LIMIT else "not known"


def times(rates: Mapping[OpName, Rate]) -> str:
    """Speed-ups as text: "matmul 5.6x, convolution 3.5x"."""
    return ", ".join(f"{_words(op)} {factor(r)}" for op, r in rates.items())


def _words(op: OpName) -> str:
    return op.replace("_", " ")


def factor(rate: Rate) -> str:
    """A rate over float32's, "5.6x"; with its interval if the result is not known."""
    speedup = rate.speedup
    median, low, high = (f"{x:#.2g}x" for x in (speedup.median, speedup.low, speedup.high))
    return f"{median} [{low} to {high}]" if judge(rate) == "not known" else median


def _native(format_: Format, modes: Sequence[Mode], rates: Mapping[OpName, Rate]) -> Conclusion:
    substituted = modes[0].substituted  # the same in all of a format: it depends on kernels
    own = {op: rate for op, rate in rates.items() if op not in substituted}
    verdict = _verdict([judge(rate) for rate in own.values()], len(substituted))
    names = [m.name for m in modes]
    text = (
        f"{format_} ({', '.join(names)}): {'; '.join(_facts(own, substituted))}: {ADVICE[verdict]}"
    )
    return Conclusion(format=format_, modes=names, verdict=verdict, text=text)


def _verdict(states: Sequence[State], substituted: int) -> SpeedVerdict:
    """The verdict on ops with kernels of their own and `substituted` ops with float32's speed."""
    if "not known" in states:
        return "not known"
    if "faster" in states:
        # an op that runs compute in float32 has float32's speed, less two casts
        every = set(states) == {"faster"} and not substituted
        return "worth trying" if every else "depends on the model"
    return "no gain" if "same" in states and "slower" not in states else "not for speed"


def _facts(own: Mapping[OpName, Rate], substituted: Sequence[OpName]) -> Iterator[str]:
    if own:
        yield f"{times(own)} as fast as float32"
    if substituted:
        yield f"{', '.join(map(_words, substituted))} computed in float32 (speed=auto)"


VECTORS = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}  # The levels of PyTorch's own kernels on x86


def findings(measured: Measured) -> list[MachineFinding]:
    """All findings, warnings first."""
    machine = measured.machine
    results = [*_slow_formats(measured), *_gpu(machine)]
    if machine.cuda is None:
        results += [*_onednn(machine), *_vectors(machine), *_threads(machine), *_load(measured)]
    results += _newer_torch(measured)
    return sorted(results, key=lambda f: f.level == "note")


def _warning(about: str, text: str) -> MachineFinding:
    return MachineFinding(level="warning", about=about, text=text)


def _note(about: str, text: str) -> MachineFinding:
    return MachineFinding(level="note", about=about, text=text)


def _slow_formats(measured: Measured) -> Iterator[MachineFinding]:
    for format_ in FORMATS[1:]:  # without float32
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


def _newer_torch(measured: Measured) -> Iterator[MachineFinding]:
    torch = measured.versions["torch"] or ""
    if release(torch) > NEWEST_TORCH:
        newest = ".".join(map(str, NEWEST_TORCH))
        yield _note("versions", f"mprun knows PyTorch up to {newest}, and this is {torch}")


def _gpu(machine: Machine) -> Iterator[MachineFinding]:
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


def _onednn(machine: Machine) -> Iterator[MachineFinding]:
    if forbidden := forbidden_instructions(machine):
        yield _warning(
            "instructions",
            f"{machine.onednn.limit_by}={machine.onednn.limit} keeps oneDNN from "
            f"{', '.join(forbidden)}, which this CPU has: matmuls and convolutions can be slower "
            "than necessary; unset it",
        )


def _vectors(machine: Machine) -> Iterator[MachineFinding]:
    used, has = machine.cpu_capability, machine.instructions
    if wanted := machine.variables.get("ATEN_CPU_CAPABILITY"):
        setting = f"ATEN_CPU_CAPABILITY={wanted}"
        best = 2 if has.get("AVX512") else 1 if has.get("AVX2") else 0
        # where the two differ, PyTorch has ignored the value
        if wanted == used.lower() and VECTORS.get(used, best) < best:
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


def _threads(machine: Machine) -> Iterator[MachineFinding]:
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


def _cores(count: float | None) -> str:
    if count is None:
        return "an unknown number of cores"
    return f"{count:g} core{'' if count == 1 else 's'}"


def _load(measured: Measured) -> Iterator[MachineFinding]:
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
    # one allowed instruction set is enough for a fast kernel
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
