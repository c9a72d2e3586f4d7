"""Gradients of a backward pass: the largest, with the op that it belongs to, and rounding noise.

A loss scale must not be too large for *any* number of the backward pass. Many of these numbers are
the gradient of no module's output: those inside attention, or of weights before they are cast back
to float32. So autograd's graph is walked from the outputs of the model, and a hook on every node
measures the gradients that the node receives. Numbers inside a single kernel cannot be measured,
nor anything inside compiled code.

The noise that rounding to a format adds to a tensor is compared with the signal as a power ratio
(`tolerance.py`). float8 and float16 are also judged with *per-tensor scaling*, which is how float8
is used: values are multiplied by the power of two that brings the largest of them closest to the
format's largest number, from below, and divided by it afterwards. For bfloat16 and TF32, which have
float32's range, it changes nothing. Block formats have blocks along the last dimension, which a
linear layer sums over; of tensors with four dimensions or more, along the channels, as convolutions
do.

Noise is computed in float32 on the values divided by a power of two near the largest: the ratio is
the same, and the square of a gradient of 1e-25 does not vanish. Values more than 2^126 below the
largest are taken as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from mprun.inspect.histograms import BLOCK, Histogram
from mprun.precision._torch import node_number, outside_of_modes
from mprun.precision.formats import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    TF32,
    BlockFormat,
    Format,
    exponent,
    quantise,
)
from mprun.precision.sqnr import ratio_db
from mprun.watch.op_watcher import tensors_of
from mprun.watch.step_events import StepListener, StepTracker

ROOT = "(model)"  # The name of the model itself, whose path is empty

PARAMETER = "parameter"


class GradientSource(NamedTuple):
    """The tensor that a gradient belongs to."""

    module: str  # The path of the module, or the parameter's name
    op: str  # The op of the forward pass whose output it is the gradient of, or `PARAMETER`
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.module if self.op == PARAMETER else f"{self.op} in {self.module}"


class LargestGradients(StepListener):
    """Keeps the largest magnitude of each source; NaN and infinities as infinite.

    Args:
        unscaled: returns the divisor of magnitudes, the loss scale; called in the backward pass.
    """

    def __init__(self, unscaled: Callable[[], float] = lambda: 1.0) -> None:
        self.magnitudes: dict[GradientSource, float] = {}
        self.tracker = StepTracker()
        self._scale = unscaled
        self._active = False
        self._names: dict[int, str] = {}

    def worst(self) -> tuple[float, GradientSource | None]:
        """The largest that float16 has to represent: of those in float16, or of all if none is."""
        low = {p: v for p, v in self.magnitudes.items() if p.dtype == torch.float16}
        low = low or self.magnitudes  # of a float32 run, all would be in float16
        source = max(low, key=lambda p: low[p], default=None)
        return (0.0, None) if source is None else (low[source], source)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Measure what `model` computes while this is entered, backward passes included."""
        with self.tracker.following(model, listeners=[self]), self.parameter_hooks(model):
            yield

    @contextmanager
    def parameter_hooks(self, model: nn.Module) -> Iterator[None]:
        """Measure the parameters' gradients; for callers whose tracker notifies this already."""
        self._names = {id(p): name for name, p in model.named_parameters()}
        with ExitStack() as stack:
            for name, p in model.named_parameters():
                if p.requires_grad:
                    measure = self._measure(name, PARAMETER)
                    hook = p.register_hook(lambda g, measure=measure: measure((g,)))
                    stack.callback(hook.remove)
            try:
                yield
            finally:
                self._active = False

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        self._active = True
        self.tracker.forget_graph()

    def on_forward_end(self, path: str, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self.follow(outputs)

    def follow(self, outputs: Any) -> None:
        """Hook the nodes that led to `outputs` since the model was last called."""
        todo = [x.grad_fn for x in tensors_of(outputs) if x.grad_fn is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            number = node_number(node)
            if number is None or number < self.tracker.first_node:
                continue  # a parameter's, or made before: of another call
            where = _parameter_behind(node, self._names) or (self._module(number), _op(node))
            node.register_prehook(self._measure(*where))  # dies with the node
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)

    def _module(self, number: int) -> str:
        module = self.tracker.module_of(number, own_thread=True)
        return "the loss" if module is None else module or ROOT

    def _measure(self, module: str, op: str) -> Callable[[tuple[Tensor | None, ...]], None]:
        def measure(gradients: tuple[Tensor | None, ...]) -> None:
            if not self._active:
                return
            for gradient in gradients:
                if gradient is not None and gradient.numel() and gradient.is_floating_point():
                    self._add(GradientSource(module, op, gradient.dtype), gradient)

        return measure

    def _add(self, source: GradientSource, gradient: Tensor) -> None:
        with outside_of_modes():
            size = float(torch.linalg.vector_norm(gradient, math.inf)) / self._scale()
        size = size if math.isfinite(size) else math.inf
        self.magnitudes[source] = max(self.magnitudes.get(source, 0.0), size)


def _op(node: Node) -> str:
    return node.name().rpartition("Backward")[0] or node.name()


def _parameter_behind(node: Node, names: Mapping[int, str]) -> tuple[str, str] | None:
    """The parameter whose gradient a node passes on: unchanged, cast or transposed."""
    following: Node | None = node
    while following is not None and following.name() in _PASSES_ON:
        following = following.next_functions[0][0]
    name = names.get(id(getattr(following, "variable", None)))
    return None if name is None else (name, PARAMETER)


# Autograd's names of nodes whose gradient is the parameter's: of x.t(), x.to(dtype), x.transpose()
_PASSES_ON = ("TBackward0", "ToCopyBackward0", "TransposeBackward0")


FORMATS = (FP16, BF16, TF32, E4M3, E5M2)
SCALED = (FP16, E4M3, E5M2)  # Formats whose rounding errors depend on per-tensor scaling


@dataclass
class Noise:
    """The power of some values, and of what rounding to each format adds to them."""

    signal: float = 0.0  # Sum of squares of the finite values
    noise: dict[str, float] = field(default_factory=dict)
    """Format to the sum of squared rounding errors; names with a scale end in `_scaled`, but for
    those of further formats, which all have one."""
    above: dict[str, int] = field(default_factory=dict)
    """Format to how many finite values round to more than its largest number."""

    def db(self, name: str) -> float:
        """The signal-to-noise ratio in a format; see `ratio_db`."""
        return ratio_db(self.signal, self.noise.get(name, 0.0))

    def __iadd__(self, other: Noise) -> Noise:
        self.signal += other.signal
        for mine, others in ((self.noise, other.noise), (self.above, other.above)):
            for name, value in others.items():
                mine[name] = mine.get(name, 0) + value  # type: ignore[assignment]
        return self


def noise_of(x: Tensor, seen: Histogram, further: Sequence[Format | BlockFormat] = ()) -> Noise:
    """The noise of rounding a tensor's values to each of `FORMATS`.

    Args:
        x: any shape, floating; infinities and NaN are left out.
        seen: its histogram.
        further: more formats; those without blocks are measured with per-tensor scaling.
    """
    if not seen.nonzero:
        return Noise()
    top = exponent(seen.largest)
    mantissa = seen.largest / 2.0**top  # 1 to 2; all blocks are divided by 2^top
    shifts = [(f, f.name, top) for f in FORMATS]
    shifts += [(f, f"{f.name}_scaled", exponent(f.largest / mantissa)) for f in SCALED]
    exceeded = [f for f in FORMATS if seen.largest >= f.limit]  # others need no check for overflow
    # summed on the device, and read once: each .item() waits for it
    powers = torch.zeros(1 + len(shifts), dtype=torch.float64, device=x.device)
    above = torch.zeros(len(exceeded), dtype=torch.int64, device=x.device)
    for block in _blocks(x.detach(), top, finite=not (seen.infinite or seen.nan)):
        powers[0] += torch.dot(block, block)
        for n, (to, name, shift) in enumerate(shifts, start=1):
            overflows = to in exceeded and name == to.name
            error = quantise(block, to, shift, None if overflows else "none").sub_(block)
            powers[n] += torch.dot(error, error)
        for n, to in enumerate(exceeded):
            above[n] += to.too_large(block, 2.0**-top).sum()
    # two factors: 4^top alone may not be a float64
    signal, *noise = (p * 2.0**top * 2.0**top for p in powers.tolist())
    by_name = {name: p for (_, name, _), p in zip(shifts, noise, strict=True)}
    if further:
        (whole,) = _blocks(x.detach(), top, not (seen.infinite or seen.nan), size=x.numel())
        for more in further:
            power = _further_noise(whole.view(x.shape), more, mantissa)
            by_name[more.name] = power * 2.0**top * 2.0**top
    counts = {f.name: n for f, n in zip(exceeded, above.tolist(), strict=True)}
    return Noise(signal, by_name, counts)


def _further_noise(x: Tensor, to: Format | BlockFormat, largest: float) -> float:
    """The sum of squared rounding errors of `x` (float32), which is at most `largest`."""
    if isinstance(to, Format):
        error = quantise(x, to, exponent(to.largest / largest), "none").sub_(x)
    else:
        rows = x.movedim(1, -1) if x.dim() > 3 else x  # the channels of a convolution
        error = quantise(rows, to).sub_(rows)
    return float(error.double().square().sum())


def _blocks(x: Tensor, top: int, finite: bool, size: int = BLOCK) -> Iterator[Tensor]:
    """The values over 2^top, in float32; infinities and NaN as 0."""
    flat = x.reshape(-1)
    for block in flat.split(size if x.device.type == "cpu" else len(flat)):
        wide = block.float() if block.dtype.itemsize < 4 else block
        wide = wide if finite else torch.nan_to_num(wide, 0.0, 0.0, 0.0)
        if abs(top) > 100:  # 2^top, or its reciprocal, may not be a float32
            wide = wide.double()
        half = -top // 2  # in two factors: one alone may not be a float64
        yield (wide * 2.0**half * 2.0 ** (-top - half)).float()


def expected_db(seen: Histogram, signal: float, to: Format, scale: float = 1.0) -> float:
    """The signal-to-noise ratio, in dB, of values of a histogram times `scale` rounded to `to`.

    The error of rounding is taken as spread evenly over a unit, whose square over 12 is its mean
    (Bennett, 1948). Values up to half of the smallest number become 0: all of them is error. They
    are taken as spread evenly between powers of two, where the mean of the squares is 7/3 4^e.

    Args:
        seen: the histogram.
        signal: the sum of squares of its finite values.
        to: float16, bfloat16 or TF32.
        scale: a positive number; if it is no power of two, the power below it is used.

    Returns:
        -inf where a value becomes infinite; inf where all values are zero.
    """
    if seen.infinite or seen.nan or seen.largest * scale >= to.limit:
        return -math.inf
    by, noise = exponent(scale), 0.0
    top = max(seen.exponents, default=0)  # errors over 4^top: none overflows
    for e, count in seen.exponents.items():
        error = 7 / 3 * 4.0 ** (e - top)
        if e + by >= to.smallest - 1:
            error = 4.0 ** (max(e + by, to.smallest_normal) - to.mantissa_bits - by - top) / 12
        noise += count * error
    # No error is larger than its value.
    return max(0.0, ratio_db(signal / 2.0**top / 2.0**top, noise))
