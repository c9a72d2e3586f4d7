"""How values spread over the powers of two, the noise of rounding, and the loss scale to use.

A float is +-m 2^e with 1 <= m < 2; its exponent e alone decides whether a format's range includes
it. (`frexp` has m in 0.5..1, and so e + 1.) Exponents are read from the bit patterns, which is
exact for subnormal numbers too. Zeros, infinities and NaN have none and are counted apart.

A format's limits are powers of two, so the histogram gives the shares below them. Multiplying by a
power of two only shifts the histogram. Some limits belong to the side above, some to the side below
(2^-25 becomes 0 in float16, 2^-24 does not), so exact powers of two are also counted separately.

The noise that rounding to a format adds to a tensor is compared with the signal as a power ratio
(`tolerance.py`). float8 and float16 are also judged with *per-tensor scaling*, which is how float8
is used: values are multiplied by the power of two that brings the largest of them closest to the
format's largest number, from below, and divided by it afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mprun.inspect.numerics import Histogram, ScaleVerdict
from mprun.inspect.tolerance import NEEDED_DB
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
from mprun.precision.rounding import ratio_db
from mprun.records.console.formatting import share_text

BLOCK = 2**16  # Elements counted together on a CPU: so many stay in a core's cache

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
_MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}
_BIAS = {torch.float32: 127, torch.float64: 1023}  # IEEE 754: the field of exponent 0


def pooled(histograms: Iterable[Histogram]) -> Histogram:
    """The histogram of several tensors' values together."""
    return sum(histograms, Histogram())


def histogram(x: Tensor) -> Histogram:
    """The histogram of a tensor's values.

    Args:
        x: any shape; float64, float32, or narrower, float8 included.

    Raises:
        TypeError: its values are not real floating-point numbers.
    """
    if not x.is_floating_point():
        raise TypeError(f"a histogram of {x.dtype}; legal: floating-point dtypes")
    if not x.numel():
        return Histogram()
    x = x.detach()
    x = x if x.dtype in _INTEGER else x.float()  # exact
    bits = _MANTISSA_BITS[x.dtype]
    patterns = x.reshape(-1).view(_INTEGER[x.dtype])
    fields = 2 * (_BIAS[x.dtype] + 1)  # how many values the exponent's field has
    infinity = (fields - 1) << bits  # the last field without mantissa; with one it is NaN
    counts = torch.zeros(2 * fields, dtype=torch.int64, device=x.device)
    largest, small = patterns.new_zeros(1), []
    # On a GPU all at once: each block would start some kernels
    for block in patterns.split(BLOCK if x.device.type == "cpu" else len(patterns)):
        magnitude = block & ((1 << (8 * x.element_size() - 1)) - 1)  # without the sign's bit
        # Even: values of an exponent's field; odd: those of them without mantissa.
        index = (magnitude >> bits) * 2 + ((magnitude & ((1 << bits) - 1)) == 0)
        counts += torch.bincount(index, minlength=2 * fields)
        # Bit patterns of positive floats are ordered as the numbers are
        finite = torch.where(magnitude < infinity, magnitude, 0)
        largest = torch.maximum(largest, finite.max())
        small.append(magnitude[index == 0])  # subnormals: their exponent is not in the field
    exponents, powers = _normal(counts.tolist(), _BIAS[x.dtype])
    for e, n, exact in _subnormal(torch.cat(small), 1 - _BIAS[x.dtype] - bits):
        exponents[e] += n
        powers[e] += exact
    return Histogram(
        dict(sorted(exponents.items())),
        {e: n for e, n in sorted(powers.items()) if n},
        zero=int(counts[1]),  # field 0 without mantissa
        infinite=int(counts[-1]),
        nan=int(counts[-2]),
        largest=float(largest.view(x.dtype).item()),
    )


def _normal(counts: list[int], bias: int) -> tuple[Counter[int], Counter[int]]:
    """Counts by exponent, and those of exact powers, from counts by field and mantissa."""
    exponents, powers = Counter[int](), Counter[int]()
    for number in range(1, len(counts) // 2 - 1):  # the first is of subnormals, the last of none
        rest, exact = counts[2 * number : 2 * number + 2]
        if rest + exact:
            exponents[number - bias] = rest + exact
            powers[number - bias] = exact
    return exponents, powers


def _subnormal(patterns: Tensor, unit: int) -> Iterator[tuple[int, int, int]]:
    """Exponent, count, and count of exact powers, of numbers that are pattern times 2^unit."""
    if not len(patterns):
        return
    mantissas, exponents = torch.frexp(patterns.double())  # exact: at most 52 bits
    counts = torch.bincount(exponents).tolist()
    # `frexp` has mantissas from 0.5 to 1, so 0.5 is a power of two, and exponents are one too large
    exact = torch.bincount(exponents[mantissas == 0.5], minlength=len(counts)).tolist()
    for e, n in enumerate(counts):
        if n:
            yield e - 1 + unit, n, exact[e]


# ---- the noise of rounding -----------------------------------------------------------------------

FORMATS = (FP16, BF16, TF32, E4M3, E5M2)
# Formats whose rounding errors depend on per-tensor scaling: bfloat16 and TF32 have float32's range
SCALED = (FP16, E4M3, E5M2)


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
    # Computed in float32 on values divided by a power of two near the largest: the ratio is the
    # same, and the square of a gradient of 1e-25 does not vanish. Values more than 2^126 below the
    # largest are taken as 0
    top = exponent(seen.largest)
    mantissa = seen.largest / 2.0**top  # 1 to 2; all blocks are divided by 2^top
    shifts = [(f, f.name, top) for f in FORMATS]
    shifts += [(f, f"{f.name}_scaled", exponent(f.largest / mantissa)) for f in SCALED]
    exceeded = [f for f in FORMATS if seen.largest >= f.limit]
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
        # Blocks lie along the dimension that products sum over: the channels of a convolution
        rows = x.movedim(1, -1) if x.dim() > 3 else x
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
        error = 7 / 3 * 4.0 ** (e - top)  # the number itself: it becomes 0
        if e + by >= to.smallest - 1:
            error = 4.0 ** (max(e + by, to.smallest_normal) - to.mantissa_bits - by - top) / 12
        noise += count * error
    # No error is larger than its value.
    return max(0.0, ratio_db(signal / 2.0**top / 2.0**top, noise))


# ---- the loss scale ------------------------------------------------------------------------------
# The largest power of two at which the largest gradient, times some headroom for steps that were
# not measured, is at most 65504: S = 2^floor(log2(65504 / (headroom * largest))). A power of two
# changes exponents only: gradients that neither overflow nor fall below 2^-14 keep their bits.
# Every doubling saves one more power of two of small ones. "Largest" is over every gradient that
# is computed in float16 (`collect.py`). A scale is
#
#     too high   where S times the largest gradient overflows: such steps are skipped
#     too low    where some layer's gradients, rounded to float16 times S, have less signal over
#                noise than is needed, and more at the recommended scale
#     fine       else

# No scale is recommended beyond these: the loss times it has to be a float32
BOUNDS = (2.0**-100, 2.0**100)
PUBLISHED = 1024.0  # The static scale of Graphcore's half-precision tutorial


@dataclass(frozen=True)
class LayerGradients:
    """Unscaled gradients of some steps, reduced to what a loss scale depends on."""

    largest: float  # The largest magnitude that float16 has to represent
    where: str  # Where it occurred
    layers: Mapping[str, tuple[Histogram, Noise]]
    """A layer's name to the histogram and power of its gradients."""

    def becoming_zero(self, scale: float) -> float | None:
        """The share of non-zero gradients that float16 flushes to 0 at a loss scale.

        The scale is taken as the power of two at or below it; None where there is no gradient.
        """
        return self._share(lambda h, by: h.up_to(FP16.smallest - 1 - by), scale)

    def losing_bits(self, scale: float) -> float | None:
        """The share below float16's smallest normal number, those that become 0 included."""
        return self._share(lambda h, by: h.below(FP16.smallest_normal - by), scale)

    def _share(self, count: Callable[[Histogram, int], int], scale: float) -> float | None:
        whole = pooled(h for h, _ in self.layers.values())
        by = math.frexp(scale)[1] - 1  # a histogram is shifted by a whole power of two
        return count(whole, by) / whole.nonzero if whole.nonzero else None


@dataclass(frozen=True)
class ScaleAdvice:
    """A recommended loss scale; as text, with its reason."""

    scale: float
    gradients: LayerGradients
    headroom: float

    def __str__(self) -> str:
        seen, scale = self.gradients, self.scale
        text = f"{in_words(scale)}: gradients reach {seen.largest * scale:,.0f} ({seen.where}) of "
        text += "float16's 65,504"
        if (without := seen.becoming_zero(1.0)) is not None:
            text += f"; without a loss scale {share_text(without)} become 0, with it "
            text += share_text(seen.becoming_zero(scale))
        return text


def in_words(scale: float) -> str:
    """`2^16 = 65,536`, or the number alone where it is no power of two."""
    mantissa, exponent = math.frexp(scale)
    number = f"{scale:,.0f}" if 1 <= scale < 1e12 else f"{scale:g}"
    return f"2^{exponent - 1} = {number}" if mantissa == 0.5 else f"{scale:g}"


def largest_power(limit: float) -> float:
    """The largest power of two at or below `limit`, within `BOUNDS`."""
    low, high = BOUNDS
    # frexp, not log2, which rounds: it would give 2^16 for the float below
    return min(max(2.0 ** (math.frexp(limit)[1] - 1), low), high)


def recommend(gradients: LayerGradients, headroom: float = 2.0) -> ScaleAdvice | None:
    """The loss scale to use in float16.

    Args:
        gradients: the measured ones.
        headroom: how many times larger gradients may become before one overflows; 1 or more.

    Returns:
        The advice; None where every gradient is 0, or the largest is not finite.
    """
    if not 0 < gradients.largest < math.inf:
        return None
    limit = FP16.largest / headroom / gradients.largest
    return ScaleAdvice(largest_power(limit), gradients, headroom)


def judge(
    scale: float, advice: ScaleAdvice, needed_db: float = NEEDED_DB, label: str = ""
) -> ScaleVerdict:
    """Whether a loss scale (1 for none) is too low, too high or fine.

    Gradients should have a signal-to-noise ratio of `needed_db`, or what they have at the
    recommended scale.
    """
    seen, layers = advice.gradients, _layers(scale, advice)
    # A layer with as little signal at the recommended scale would gain nothing by another one
    low = [x for x in layers if x[1] < min(needed_db, x[2])]
    word, reason = "fine", "there is no gradient that could be lost"
    # Too high comes first: an overflow loses the whole step, an underflow some numbers of it
    if seen.largest * scale >= FP16.limit:
        word = "too high"
        reason = f"the largest gradient, {seen.largest:.3g} ({seen.where}), overflows"
    elif low:
        name, have, could = min(low, key=lambda x: x[1])
        word = "too low"
        reason = f"{name} keep {have:.1f} dB, {could:.1f} dB at {in_words(advice.scale)}"
    elif layers:
        have, name = min((have, name) for name, have, _ in layers)
        where = name.replace("_gradients", "")
        reason = f"gradients keep {have:.1f} dB or more ({where})"
        if have < needed_db:
            reason += f", no less than at {in_words(advice.scale)}"
    losses = seen.becoming_zero(scale), seen.losing_bits(scale)
    return ScaleVerdict(label, scale, word, reason, *losses)


def need(advice: ScaleAdvice, needed_db: float = NEEDED_DB) -> tuple[bool, str]:
    """Whether a loss scale is needed in float16, and why; the gain of the recommended one."""
    without = judge(1.0, advice, needed_db)
    is_needed, reason = without.word != "fine", f"without a loss scale {without.reason}"
    return is_needed, f"{'one' if is_needed else 'none'} is needed: {reason}"


def _layers(scale: float, advice: ScaleAdvice) -> list[tuple[str, float, float]]:
    """Name and signal-to-noise ratio of each layer's gradients: at a scale, and recommended."""
    return [
        (
            name,
            expected_db(histogram, noise.signal, FP16, scale),
            expected_db(histogram, noise.signal, FP16, advice.scale),
        )
        for name, (histogram, noise) in advice.gradients.layers.items()
        if histogram.nonzero
    ]
