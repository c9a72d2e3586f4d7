"""What is told of a floating-point exception, and the list of them. No torch: plain data.

An exception is an op that made a NaN, an infinity or a saturated number out of finite ones. What
became of that number decides the verdict:

    finding    it reached the loss, a gradient, a weight, a buffer or the optimizer's state; or a
               number that a wider dtype holds overflowed, and what was made of that is finite, and
               wrong (x / inf is 0): float64 has another result
    expected   an overflow of the scaled loss or of its backward pass, in a step that dynamic loss
               scaling skipped for it
    absorbed   neither: an infinity that served as a mask or a limit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

VERDICTS = ("finding", "expected", "absorbed")
LARGEST = {"float16": "65504", "bfloat16": "3.39e+38", "float32": "3.4e+38"}
TOLD = 5
"""Findings of one step that are told: the first ones count."""
KINDS_KEPT = 100
"""Distinct exceptions of each verdict whose details are kept; the rest is counted."""


class TensorStats(NamedTuple):
    """A tensor an op took or made; of what has no numbers only dtype and shape are known."""

    name: str
    """What the op's schema calls it."""
    dtype: str
    shape: tuple[int, ...]
    low: float | None = None
    """The least finite value."""
    high: float | None = None
    """The largest finite value."""
    nan: int | None = None
    """How many NaN it holds."""
    inf: int | None = None
    """How many infinities, of both signs."""

    @property
    def max_abs(self) -> float | None:
        """The largest finite magnitude."""
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self._asdict(), "shape": list(self.shape), "max_abs": self.max_abs}


class PastOp(NamedTuple):
    """An op that ran before, with its first result."""

    op: str
    phase: str
    module: str
    location: str | None
    dtype: str | None
    shape: tuple[int, ...]
    low: float | None
    high: float | None


class WrongResult(NamedTuple):
    """A finite number that an op made of an overflow, and that is not what float64 has."""

    op: str
    phase: str
    module: str
    location: str | None
    value: float
    exact: float


@dataclass(frozen=True)
class FpException:
    """One floating-point exception."""

    verdict: str
    """One of `VERDICTS`."""
    kind: str
    """What happened.

    overflow          too large for the dtype, finite in float64
    invalid           NaN, in float64 too: 0/0, inf - inf, the root of a negative number
    infinite          an infinity in float64 too: 1/0, log(0), exp(1000)
    saturated         beyond the dtype's largest number, and clamped to it
    constant          written by the program (a mask) and not kept from the loss or the gradients
    outside           NaN or infinity, there before any op was seen: in the data, in a weight
    """
    step: int
    last_step: int
    """The last step in which the same op did it."""
    op: str
    """ATen's name; of an optimizer whose kernels are not PyTorch's, its class and `step`."""
    phase: str
    """forward (of the model), backward, optimizer, or other (loss, loss scale, clipping)."""
    module: str
    """The path of the module, empty outside of the model."""
    module_kind: str
    """Its class."""
    location: str | None
    """The line of Python that ran the op; of a backward op, the line of its forward op."""
    inputs: tuple[TensorStats, ...]
    outputs: tuple[TensorStats, ...]
    """Those that are not finite, or saturated."""
    in_float64: TensorStats | None = None
    """What the first of `outputs` would be, computed in float64; None where that cannot be done."""
    loss_scale: float | None = None
    """What the loss was multiplied by."""
    reached: tuple[str, ...] = ()
    """What it spoiled: the loss, gradients, parameters, buffers, optimizer state; the first 50."""
    reached_count: int = 0
    """How much that is in all."""
    before: tuple[PastOp, ...] = ()
    """The ops that ran before it, up to 20, the last one last."""
    count: int = 1
    """How often it did."""
    wrong: WrongResult | None = None
    """Of an overflow: a finite number that was made of it and is wrong, the first there was."""
    reason: str | None = None
    """Why, where more is known than the figures tell."""

    @property
    def key(self) -> tuple[str | None, ...]:
        """What makes it another one than the last."""
        return (self.verdict, self.kind, self.op, self.phase, self.module, self.location)

    @property
    def where(self) -> str:
        """Op, module, phase and line, in a few words."""
        kind = f" ({self.module_kind})" if self.module_kind else ""
        inside = f" in {self.module or 'the model'}{kind}" if kind else ""
        return f"{self.op}{inside}, {self.phase}" + (f", {self.location}" if self.location else "")

    def text(self) -> str:
        """The exception in a line."""
        parts = [f"{self.kind}: {self.where}", *self._figures()]
        if self.kind == "outside":
            parts = [f"outside: {self._bad_values()}, first read by {self.where}"]
        if self.reason:
            parts.append(self.reason)
        overflow = self.verdict == "finding" and self.kind == "overflow"
        if overflow and (self.wrong is not None or not self.reached):
            parts.append(self._consequence())
        if self.reached:
            rest = self.reached_count - 1
            parts.append(f"reached {self.reached[0]}" + (f" and {rest} more" if rest else ""))
        return "; ".join(parts)

    def _bad_values(self) -> str:
        """What was there before: how many infinities and NaN in which tensor."""
        bad = self.outputs[0]
        counts = [(bad.inf, "inf"), (bad.nan, "NaN")]
        return f"{bad.name} holds " + " and ".join(f"{n} {what}" for n, what in counts if n)

    def _consequence(self) -> str:
        """What became of an overflow that reached nothing."""
        if self.wrong is None:
            return "what was made of it is finite, and could not be compared with float64"
        at = f" in {self.wrong.module}" if self.wrong.module else ""
        return (
            f"what was made of it is finite, and wrong: {self.wrong.op}{at}, {self.wrong.phase}, "
            f"gives {self.wrong.value:.4g}, in float64 {self.wrong.exact:.4g}"
        )

    def _figures(self) -> Iterator[str]:
        """What went in and what should have come out."""
        largest = max((x for x in self.inputs if x.max_abs is not None), key=_size, default=None)
        if largest is not None:
            yield f"inputs up to {_size(largest):.4g} ({largest.dtype})"
        exact = self.in_float64
        if exact is not None and exact.max_abs is not None and not exact.nan and not exact.inf:
            made = self.outputs[0].dtype
            limit = f", {made} ends at {LARGEST[made]}" if made in LARGEST else ""
            yield f"the exact result is up to {exact.max_abs:.4g}{limit}"
            if self.loss_scale not in (None, 1.0) and self.phase == "backward":
                unscaled = exact.max_abs / (self.loss_scale or 1.0)
                yield f"{unscaled:.4g} without the loss scale of {self.loss_scale:g}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        row["reached"] = list(self.reached)
        for name in ("inputs", "outputs"):
            row[name] = [x.as_dict() for x in row[name]]
        row["in_float64"] = self.in_float64 and self.in_float64.as_dict()
        row["wrong"] = self.wrong and self.wrong._asdict()
        row["before"] = [{**x._asdict(), "shape": list(x.shape)} for x in self.before]
        return row


def _size(x: TensorStats) -> float:
    return x.max_abs or 0.0


def told(news: Sequence[FpException]) -> list[str]:
    """A step's new findings, a line each; beyond the first few, how many more."""
    lines = [f"step {e.step}: {e.text()}" for e in news[:TOLD]]
    rest = len(news) - TOLD
    return lines + ([f"step {news[0].step}: {rest} more, that may follow"] if rest > 0 else [])


def from_dict(row: dict[str, Any]) -> FpException:
    """What `as_dict` gave."""

    def stats(x: dict[str, Any]) -> TensorStats:
        kept = {name: x[name] for name in TensorStats._fields}
        return TensorStats(**{**kept, "shape": tuple(x["shape"])})

    made = dict(row)
    for name in ("inputs", "outputs"):
        made[name] = tuple(stats(x) for x in row[name])
    made["in_float64"] = row["in_float64"] and stats(row["in_float64"])
    made["before"] = tuple(PastOp(**{**x, "shape": tuple(x["shape"])}) for x in row["before"])
    made["reached"] = tuple(row["reached"])
    wrong = row.get("wrong")  # files of older versions have none
    made["wrong"] = wrong and WrongResult(**wrong)
    return FpException(**made)


class Found:
    """The exceptions so far: each distinct one with the details of its first time, and counts."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str | None, ...], FpException] = {}
        self.counts = dict.fromkeys(VERDICTS, 0)
        """How many of each verdict there were, repetitions included."""
        self.dropped_steps = 0
        """Steps that `skip` dropped."""
        self.left_out = 0
        """Exceptions whose details are not kept: there were too many distinct ones."""

    def take(self, exceptions: Iterable[FpException]) -> list[FpException]:
        """Keep those of a step; the findings among them that are new."""
        return [e for e in exceptions if self.add(e) and e.verdict == "finding"]

    def add(self, exception: FpException) -> bool:
        """Keep it; whether it is the first of its kind."""
        self.counts[exception.verdict] += 1
        before = self._kept.get(exception.key)
        if before is not None:
            kept = replace(before, count=before.count + 1, last_step=exception.step)
            self._kept[exception.key] = kept
            return False
        if len(self.of(exception.verdict)) >= KINDS_KEPT:
            self.left_out += 1
            return False
        self._kept[exception.key] = exception
        return True

    def of(self, verdict: str) -> list[FpException]:
        """The distinct exceptions of a verdict, the first one first."""
        return [e for e in self._kept.values() if e.verdict == verdict]

    @property
    def findings(self) -> list[FpException]:
        """Those that spoiled something."""
        return self.of("finding")

    @property
    def expected(self) -> list[FpException]:
        """Those of steps that dynamic loss scaling skipped."""
        return self.of("expected")

    @property
    def absorbed(self) -> list[FpException]:
        """Those that spoiled nothing."""
        return self.of("absorbed")

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from, as JSON has it."""
        return {
            "counts": dict(self.counts),
            "dropped_steps": self.dropped_steps,
            "left_out": self.left_out,
            "exceptions": [e.as_dict() for e in self._kept.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""
        self.counts = dict(state["counts"])
        self.dropped_steps, self.left_out = state["dropped_steps"], state["left_out"]
        kept = [from_dict(row) for row in state["exceptions"]]
        self._kept = {e.key: e for e in kept}
