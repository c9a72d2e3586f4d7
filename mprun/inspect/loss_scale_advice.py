"""Which loss scale to use, from unscaled gradients.

Scaling the loss by S multiplies every gradient by S. In float16 that costs nothing until the
largest of them overflows (from 65520 on), and every doubling brings one more power of two of small
ones above 2^-24, where the numbers end, and 2^-14, below which bits are lost. So the scale to use
is the largest power of two at which the largest gradient, times some headroom for steps that were
not measured, is 65504 or below:

    S = 2^floor(log2(65504 / (headroom * largest)))

Being a power of two it changes exponents only: gradients that neither overflow nor fall below 2^-14
have the same bits as without it. "Largest" is over every gradient that is computed in float16,
activations' and weights' (`collect.py`).

A scale in use is

    too high   where S times the largest gradient overflows: such steps are skipped
    too low    where some layer's gradients, rounded to float16 times S, have less signal over noise
               than is needed, and more at the recommended scale
    fine       else
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mprun.inspect.histograms import Histogram, Noise, expected_db, pooled
from mprun.inspect.numerics import ScaleVerdict
from mprun.inspect.tolerance import NEEDED_DB
from mprun.precision.formats import FP16

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

    def _share(self, count: Any, scale: float) -> float | None:
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
        text = (
            f"{in_words(scale)}: the largest gradient, {seen.largest:.3g} ({seen.where}), becomes "
        )
        text += f"{seen.largest * scale:,.0f} of float16's 65,504"
        without, with_it = seen.becoming_zero(1.0), seen.becoming_zero(scale)
        if without is not None and with_it is not None:
            text += (
                f"; of the non-zero gradients {without:.3%} would become 0 without a loss scale, "
                f"{with_it:.3%} with it"
            )
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
    seen = advice.gradients
    # Too high comes first: an overflow loses the whole step, an underflow some numbers of it
    word, reason = "fine", _why_fine(scale, advice, needed_db)
    if seen.largest * scale >= FP16.limit:
        word = "too high"
        reason = f"the largest gradient, {seen.largest:.3g} ({seen.where}), overflows"
    elif (worst := _worst(scale, advice, needed_db)) is not None:
        name, have, could = worst
        word = "too low"
        reason = f"{name} keep {have:.1f} dB of signal over noise, {could:.1f} dB at "
        reason += in_words(advice.scale)
    losses = seen.becoming_zero(scale), seen.losing_bits(scale)
    return ScaleVerdict(label, scale, word, reason, *losses)


def need(advice: ScaleAdvice, needed_db: float = NEEDED_DB) -> tuple[bool, str]:
    """Whether a loss scale is needed in float16, and why; the gain of the recommended one."""
    without = judge(1.0, advice, needed_db)
    if without.word != "fine":
        return True, f"one is needed: without it {without.reason}"
    seen, scale = advice.gradients, advice.scale
    text = f"none is needed: without one {without.reason}"
    name, have, could = min(_layers(1.0, advice), key=lambda x: x[1], default=("", 0.0, 0.0))
    lost, lost_with = seen.becoming_zero(1.0), seen.becoming_zero(scale)
    if lost is not None and lost_with is not None:
        text += (
            f"; of the non-zero gradients {lost:.2%} become 0, all so small that they do not count."
            f" At {in_words(scale)} {lost_with:.2%} would, and {name} keep {could:.1f} instead of "
            f"{have:.1f} dB"
        )
    return False, text


def _why_fine(scale: float, advice: ScaleAdvice, needed_db: float) -> str:
    have, name = min(((have, n) for n, have, _ in _layers(scale, advice)), default=(math.inf, ""))
    if not name:
        return "there is no gradient that could be lost"
    text = f"none overflows, all keep {have:.1f} dB of signal over noise or more ({name})"
    if have >= needed_db:
        return f"{text}, {needed_db:g} are needed"
    return f"{text}, no less than at {in_words(advice.scale)}"


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


def _worst(scale: float, advice: ScaleAdvice, needed_db: float) -> tuple[str, float, float] | None:
    """The layer whose gradients suffer most from a scale below the recommended one."""
    # A layer with as little signal at the recommended scale would gain nothing by another one
    low = [x for x in _layers(scale, advice) if x[1] < min(needed_db, x[2])]
    return min(low, key=lambda x: x[1], default=None)


ALIKE_DB = 3.0  # Signal-to-noise ratios no further apart, half a bit, count as the same


def best_tried(tried: Mapping[float, float]) -> float | None:
    """The best of some loss scales that were tried: the largest of those as good as the best.

    Between underflow and overflow there is a plateau on which scales differ by chance (by up to 1.6
    dB in the cases tried); the largest there leaves the most room below.

    Args:
        tried: loss scale to the signal-to-noise ratio of the gradients, in dB.

    Returns:
        None where no scale gave finite gradients.
    """
    top = max(tried.values(), default=-math.inf)
    if top == -math.inf:
        return None
    return max(scale for scale, db in tried.items() if db >= top - ALIKE_DB)
