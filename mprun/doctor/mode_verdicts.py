"""From measured rates to the use of each mode.

An op is faster than in float32 if the median speed-up is at least `LIMIT` and its 95 % interval
lies above 1. It is slower if the median is at most 1 / `LIMIT` and the interval lies below 1. It is
the same if the interval lies within a factor of `LIMIT` of 1, or if the median does and the
interval excludes 1. Otherwise the result is not known, because the machine was too busy. An op that
runs compute in float32 (`substituted`) has float32's speed, less two casts. Products of 8 bits are
not measured here.

A step consists of these ops and of others, in shares that depend on the model. So the speed-up of a
step is not computed from those of its ops; `mprun compare` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mprun.records.doctor_record import (
    FORMATS,
    Conclusion,
    Format,
    Measured,
    Mode,
    OpName,
    Rate,
    SpeedVerdict,
)

LIMIT = 1.1

State = Literal["faster", "same", "slower", "not known"]

OP_NAMES: dict[OpName, str] = {
    "matmul": "matmul",
    "convolution": "convolution",
    "convolution_backward": "convolution backward",
}
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
    mine = sorted((r for r in rates if r.format == format_), key=lambda r: r.flops)
    return {r.op: r for r in mine}


def judge(rate: Rate) -> State:
    """Whether an op is faster than in float32."""
    speedup = rate.speedup
    median, low, high = speedup.median, speedup.low, speedup.high
    if low > 1:
        return "faster" if median >= LIMIT else "same"
    if high < 1:
        return "slower" if median <= 1 / LIMIT else "same"
    return "same" if 1 / LIMIT < low <= high < LIMIT else "not known"


def times(rates: Mapping[OpName, Rate]) -> str:
    """Speed-ups as text: "matmul 5.6x, convolution 3.5x"."""
    return ", ".join(f"{OP_NAMES[op]} {factor(r)}" for op, r in rates.items())


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
        every = set(states) == {"faster"} and not substituted
        return "worth trying" if every else "depends on the model"
    return "no gain" if "same" in states and "slower" not in states else "not for speed"


def _facts(own: Mapping[OpName, Rate], substituted: Sequence[OpName]) -> Iterator[str]:
    if own:
        yield f"{times(own)} as fast as float32"
    if substituted:
        yield f"{', '.join(OP_NAMES[op] for op in substituted)} computed in float32 (speed=auto)"
