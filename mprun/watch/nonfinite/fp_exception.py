"""Floating-point exceptions as plain data, without torch.

An exception is an op that made a NaN or an infinity out of finite numbers. The verdict depends on
what happened to that number afterwards:

    finding    it reached the loss, a gradient, a weight, a buffer or the optimizer's state; or it
               is an overflow, and a later op divides by it: x / inf is 0, a finite wrong number
    expected   an overflow of the scaled loss or of its backward pass, in a step that dynamic loss
               scaling skipped because of it
    absorbed   neither: an infinity that served as a mask or a limit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

UNSEEN = "an unseen kernel"  # The op of numbers that no op of PyTorch wrote
VERDICTS = ("finding", "expected", "absorbed")
LARGEST = {"float16": "65504", "bfloat16": "3.39e+38", "float32": "3.4e+38"}
LINES_PER_STEP = 5  # Findings of one step that are reported one by one; the first ones matter most
DETAILED = 100  # Distinct exceptions of each verdict whose details are stored; the rest is counted


@dataclass(frozen=True)
class TensorStats:
    """A tensor that an op read or made; without data only its dtype and shape are known."""

    name: str  # Its name in the op's schema
    dtype: str
    shape: tuple[int, ...]
    low: float | None = None  # The least finite value
    high: float | None = None  # The largest finite value
    nan: int | None = None  # Number of NaN
    inf: int | None = None  # Number of infinities, of both signs

    @property
    def max_abs(self) -> float | None:
        """The largest finite magnitude."""
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class FpException:
    """One floating-point exception: `with fp_exceptions(model) as report: report.findings`."""

    verdict: str
    """One of `VERDICTS`."""
    kind: str
    """What happened.

    overflow          too large for the dtype, finite in float64
    invalid           NaN, in float64 too: 0/0, inf - inf, the root of a negative number
    infinite          an infinity in float64 too: 1/0, log(0), exp(1000)
    constant          written by the program (a mask), and it reached the loss or a gradient
    outside           NaN or infinity that existed before the first op: in the data, in a weight
    """
    step: int
    """The first step in which the op did it."""
    last_step: int
    """The last step in which the same op did it."""
    op: str
    """ATen's name; for an optimizer with kernels of its own, its class and `step`."""
    phase: str
    """forward (of the model), backward, optimizer, or other (loss, loss scale, clipping)."""
    module: str
    """The path of the module, empty outside of the model."""
    module_kind: str
    """Its class."""
    location: str | None
    """The line of Python that ran the op; for a backward op, the line of its forward op."""
    inputs: tuple[TensorStats, ...]
    """The tensors that the op read."""
    outputs: tuple[TensorStats, ...]
    """Those that are not finite."""
    in_float64: TensorStats | None = None
    """The first of `outputs`, computed in float64; None where that is not possible."""
    loss_scale: float | None = None
    """The factor of the loss."""
    reached: tuple[str, ...] = ()
    """The first 50 values it spoiled: the loss, gradients, parameters, buffers, optimizer state."""
    reached_count: int = 0
    """The number of all these."""
    count: int = 1
    """How often it happened."""
    divided_by: str | None = None
    """For an overflow: the first op that divides by it; its result is 0 in place of a number."""
    reason: str | None = None
    """The cause, if more is known than the figures show."""
    process: int | None = None
    """The number of the process in which it occurred; None for one process."""

    @property
    def key(self) -> tuple[str | None, ...]:
        """Equal for repetitions of one exception."""
        return (self.verdict, self.kind, self.op, self.phase, self.module, self.location)

    @property
    def has_op(self) -> bool:
        """Whether the op that made it was seen."""
        return self.kind != "outside" and (self.location is not None or self.op != UNSEEN)

    @property
    def where(self) -> str:
        """Op, module, phase and line."""
        kind = f" ({self.module_kind})" if self.module_kind else ""
        inside = f" in {self.module or 'the model'}{kind}" if kind else ""
        place = f", {self.location}" if self.location else ""
        process = "" if self.process is None else f", process {self.process}"
        return f"{self.op}{inside}, {self.phase}{place}{process}"

    def text(self) -> str:
        """The exception in one line."""
        parts = [f"{self.kind}: {self.where}", *self._figures()]
        if self.kind == "outside":  # the op only read it
            bad = self.outputs[0]
            counts = ((bad.inf, "inf"), (bad.nan, "NaN"))
            numbers = " and ".join(f"{n} {what}" for n, what in counts if n)
            parts = [f"outside: {bad.name} holds {numbers}, first read by {self.where}"]
        if self.reason:
            parts.append(self.reason)
        if self.divided_by:
            parts.append(f"{self.divided_by}, divides by it, which gives 0")
        if self.reached:
            rest = self.reached_count - 1
            parts.append(f"reached {self.reached[0]}" + (f" and {rest} more" if rest else ""))
        return "; ".join(parts)

    def _figures(self) -> Iterator[str]:
        """The size of the inputs and of the exact result."""
        largest = max((x for x in self.inputs if x.max_abs is not None), key=_size, default=None)
        if largest is not None:
            yield f"inputs up to {_size(largest):.4g} ({largest.dtype})"
        exact = self.in_float64
        if exact is not None and exact.max_abs is not None and not exact.nan and not exact.inf:
            dtype = self.outputs[0].dtype
            limit = f", the limit of {dtype} is {LARGEST[dtype]}" if dtype in LARGEST else ""
            yield f"the exact result is up to {exact.max_abs:.4g}{limit}"
            if self.loss_scale not in (None, 1.0) and self.phase == "backward":
                unscaled = exact.max_abs / (self.loss_scale or 1.0)
                yield f"{unscaled:.4g} without the loss scale of {self.loss_scale:g}"

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them, with the largest magnitude of each tensor."""
        row: dict[str, Any] = msgspec.to_builtins(self)
        for tensor in filter(None, (*row["inputs"], *row["outputs"], row["in_float64"])):
            tensor["max_abs"] = TensorStats(**tensor).max_abs
        return row


def _size(x: TensorStats) -> float:
    return x.max_abs or 0.0


def finding_lines(new: Sequence[FpException]) -> list[str]:
    """A step's new findings, a line each; of very many, how many more there are."""
    lines = [f"step {e.step}: {e.text()}" for e in new[:LINES_PER_STEP]]
    rest = len(new) - LINES_PER_STEP
    return lines + ([f"step {new[0].step}: {rest} more, maybe consequences"] if rest > 0 else [])


class NonfiniteReport:
    """The exceptions so far: `with fp_exceptions(model) as report: print(report.findings)`.

    Each distinct one has the details of its first time, and counts.
    """

    def __init__(self) -> None:
        self._distinct: dict[tuple[str | None, ...], FpException] = {}
        self.counts = dict.fromkeys(VERDICTS, 0)
        """The number of exceptions of each verdict, repetitions included."""
        self.dropped_steps = 0
        """Steps that `skip` dropped."""
        self.left_out = 0
        """Exceptions without details: there were too many distinct ones."""

    def add_step(self, exceptions: Iterable[FpException]) -> tuple[FpException, ...]:
        """Add the `exceptions` of a step; return the findings among them that are new."""
        return tuple(e for e in exceptions if self.add(e) and e.verdict == "finding")

    def add(self, exception: FpException) -> bool:
        """Add an exception; return whether it is the first of its kind."""
        self.counts[exception.verdict] += 1
        first = self._distinct.get(exception.key)
        if first is not None:
            again = replace(first, count=first.count + 1, last_step=exception.step)
            self._distinct[exception.key] = again
            return False
        if len(self.of(exception.verdict)) >= DETAILED:
            self.left_out += 1
            return False
        self._distinct[exception.key] = exception
        return True

    def of(self, verdict: str) -> list[FpException]:
        """The distinct exceptions of a verdict, the first one first."""
        return [e for e in self._distinct.values() if e.verdict == verdict]

    @property
    def findings(self) -> list[FpException]:
        """Those that reached a result, or made a later one wrong."""
        return self.of("finding")

    @property
    def expected(self) -> list[FpException]:
        """Those of steps that dynamic loss scaling skipped."""
        return self.of("expected")

    @property
    def absorbed(self) -> list[FpException]:
        """Those that reached nothing that outlasts the step."""
        return self.of("absorbed")

    def state_dict(self) -> dict[str, Any]:
        """The plain values for `load_state_dict`, as JSON has them."""
        return {
            "counts": dict(self.counts),
            "dropped_steps": self.dropped_steps,
            "left_out": self.left_out,
            "exceptions": [e.as_dict() for e in self._distinct.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state` of a `state_dict`."""
        self.counts = dict(state["counts"])
        self.dropped_steps, self.left_out = state["dropped_steps"], state["left_out"]
        loaded = msgspec.convert(state["exceptions"], list[FpException])
        self._distinct = {e.key: e for e in loaded}
