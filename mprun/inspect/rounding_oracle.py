"""Is an error only rounding? `check`, `diff`, the baseline and `assert_explained` ask this module.

*The mean of repeated passes.* Passes with stochastic roundings have errors of mean 0. Student's t
bounds the mean of n differences, t(n - 1) s / sqrt(n), and of draws around a known value the
difference of two more draws, t(n) s sqrt(2), at a chance of a false alarm that is named below.

*A boundary of a step.* What a module computes is compared with float64 on the same inputs. The
bound is the largest error of passes with rounded results there, times a margin of the format.

*An element of a tensor.* See `element_bounds`.

Errors that are more than rounding are tolerated up to a share of loss and gradients:
`tolerance.py`. The size of an error is its SQNR (`precision/rounding.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from scipy.special import stdtrit
from torch import Tensor

from mprun.precision.formats import BlockFormat
from mprun.precision.policy import dtype_name

# ---- chances of a false alarm --------------------------------------------------------------------

LEVEL = 1e-4  # Of a test of a mode: its curve, and all gradients of its step together
BASELINE_LEVEL = 1e-5  # Of one figure of a baseline: each module and parameter has one
KERNEL_LEVEL = 1e-6  # Of a tensor of `assert_explained`: a suite has thousands
# A difference with a smaller chance is looked at by more passes, which a curve needs more of
SUSPECT_STEP, SUSPECT_CURVE = 1e-3, 0.05


def mean_bound(differences: Sequence[float], level: float) -> float:
    """The most by which chance moves the mean of independent differences from 0, at this level."""
    quantile = float(stdtrit(len(differences) - 1, 1 - level / 2))
    return quantile * stdev(differences) / math.sqrt(len(differences))


def mean_ratio(differences: Sequence[float], level: float) -> float:
    """The mean of independent differences over `mean_bound`."""
    bound = mean_bound(differences, level)
    return fmean(differences) / bound if bound else math.inf


def spread_bound(draws: Sequence[float], middle: float) -> float:
    """The bound for the difference of two draws, from draws around `middle`, which is known.

    The two are that of a baseline's file, and that of the machine where it is read.
    """
    # `middle` is no mean of the draws: as many degrees of freedom as there are draws
    spread = math.sqrt(math.fsum((x - middle) ** 2 for x in draws) / len(draws))
    return float(stdtrit(len(draws), 1 - BASELINE_LEVEL / 2)) * spread * math.sqrt(2)


# ---- margins -------------------------------------------------------------------------------------

# By how much the error at a boundary may exceed the largest of the rounded passes. The sums inside
# a kernel of float32 are not rounded there: up to sqrt(K) units for K terms (Higham, Accuracy and
# Stability of Numerical Algorithms, chapter 4), and 64 are enough for 4096 terms.
WIDE_MARGIN = 64.0
LOW_MARGIN = 4.0  # Of 16-bit dtypes, whose kernels add up in float32
BLOCK_MARGIN = 2.0  # Of formats of 8 bits or fewer: four times their steps would allow anything
# Errors over their bounds that differ by less are alike: an ill-conditioned formula exceeds its
# bound on both sides. So are two passes of which a kernel adds up in no fixed order.
ALIKE = 2.0
# The relative error that float32 itself may have: its sums may have another order
FLOAT32_ERROR = WIDE_MARGIN * torch.finfo(torch.float32).eps / 2
# The relative error that products of TF32 make in a float32 result; it has the digits of float16
TF32_ERROR = LOW_MARGIN * torch.finfo(torch.float16).eps / 2
# Half a unit of bfloat16, the 16-bit format with the fewest digits: no mode moves a weight further
COARSEST = torch.finfo(torch.bfloat16).eps / 2
# Noise changes the mean of what is not linear, most where a gradient jumps (ReLU, max-pooling). The
# mean of a jump at a random place, blurred by normal noise, is off by this many standard deviations
# of a pass (root mean square over places), however small the noise is. So that much is allowed.
KINKS = math.sqrt(math.sqrt(2) - 1)
# Standard deviations of float32's starts that a mode's curve must exceed: over pairs of curves even
# a rounding of no consequence is significant
SPREADS = 3


# ---- a boundary of a step ------------------------------------------------------------------------


@dataclass(frozen=True)
class SideError:
    """One side's error in a module's own code."""

    dtype: str
    arising: float  # Relative rms; infinite where a number is not finite
    inherited: float
    bias: float  # Mean of the own error, over the rms of the exact numbers
    explained: float  # The largest own error that rounding to the dtype makes

    @property
    def is_explained(self) -> bool:
        """Whether the own error is within its bound."""
        return self.arising <= self.explained

    @property
    def ratio(self) -> float:
        """The own error over its bound."""
        if self.arising == 0:  # an exact module may have a bound of 0
            return 0.0
        return self.arising / self.explained if self.explained else math.inf

    def exceeds(self, other: SideError) -> bool:
        """Whether it is larger than another side's, each over its bound, and not alike."""
        return self.ratio > ALIKE * other.ratio

    @property
    def sentence(self) -> str:
        """The error and its bound."""
        text = f"its own error is {self.arising:.1e}; rounding to {self.dtype} makes at most"
        return f"{text} {self.explained:.1e}"


def boundary_error(
    numbers: Tensor,
    exact: Tensor,
    rounded: Sequence[Tensor],
    true: Tensor | None,
    rounding: torch.dtype | BlockFormat,
) -> SideError:
    """The error of what a module's own code computes, with its bound.

    Args:
        numbers: what a side computed, any shape.
        exact: float64's, from the same inputs.
        rounded: float64's with results rounded, one or more passes.
        true: float64's from the batch on; None where it has none.
        rounding: the dtype of the call, or the format of its products.
    """
    theirs, exact, *draws = (x.double().cpu() for x in (numbers, exact, *rounded))
    scale, inherited = rms(exact), 0.0
    if true is not None and true.shape == exact.shape:
        inherited = relative_rms(exact, true.double().cpu())
    # half a unit at least: a rounded pass may be exact by chance
    largest = max(half_step(rounding), *(relative_rms(x, exact) for x in draws))
    return SideError(
        dtype=rounding.name if isinstance(rounding, BlockFormat) else dtype_name(rounding),
        arising=relative_rms(theirs, exact),
        inherited=inherited,
        bias=float((theirs - exact).detach().mean()) / scale if scale and theirs.numel() else 0.0,
        explained=margin_of(rounding) * largest,
    )


def margin_of(rounding: torch.dtype | BlockFormat) -> float:
    """How many times the largest error of rounded passes is explained."""
    if isinstance(rounding, BlockFormat):
        return BLOCK_MARGIN
    return WIDE_MARGIN if rounding in (torch.float32, torch.float64) else LOW_MARGIN


def half_step(rounding: torch.dtype | BlockFormat) -> float:
    """By which share of itself rounding moves a number at most."""
    if isinstance(rounding, BlockFormat):
        return rounding.half_step
    return torch.finfo(rounding).eps / 2


def rms(x: Tensor) -> float:
    """The root of the mean square; 0 of no numbers."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0


def relative_rms(x: Tensor, exact: Tensor) -> float:
    """The rms of the error over that of the exact numbers; infinite if only the latter is 0."""
    error, scale = rms(x.double() - exact.double()), rms(exact)
    return 0.0 if error == 0 else error / scale if scale else math.inf


# ---- an element of a tensor ----------------------------------------------------------------------

GROUP = 64  # Elements of like magnitude that share a spread: with 17 passes it is then known to 2 %


def element_bounds(errors: Tensor, sizes: Tensor) -> Tensor:
    """The largest error of each element that roundings make.

    The passes are few, so an element shares its spread with `GROUP` elements of like magnitude, as
    far as they are alike: with the group's mean square V, and S the sum of squares of the element's
    P errors,

        sigma^2 = (d V + S) / (d + P),   d = 4 + 2 / c^2

    the mean under an inverse gamma distribution of d degrees of freedom (Smyth, "Linear models and
    empirical Bayes methods", 2004). c^2 is the relative variance of the true squares in a group.

    The bound is `limit * sigma`. Each pass has a largest ratio M of |e| / sigma, with a sigma from
    the other passes. Elements may be rounded together (the root of a row's mean square): M has this
    effect, sigma does not. The limit is the largest M, and at least the prediction limit of one
    more pass, by Student's t,

        (mean(M) + t(P - 1; KERNEL_LEVEL) sqrt(1 + 1 / P) std(M)) / sqrt(2)

    for a kernel that rounds to nearest where the reference rounds. So a sound tensor fails with a
    chance of about `KERNEL_LEVEL`, and one that rounds in fewer places, as kernels do that add up
    in float32, with less. More passes make the limit tighter, most of all for few elements.

    Args:
        errors: [P, *shape], of passes with stochastic roundings; the last one rounds to nearest.
        sizes: of that shape; elements of like size share their spread.

    Returns:
        That shape; infinite where no pass is finite.
    """
    count, elements = len(errors), sizes.numel()
    finite = errors.isfinite().reshape(count, -1)
    squares = torch.where(finite, errors.reshape(count, -1), 0).square()
    known, total = finite.sum(0), squares.sum(0)
    group = sizes.flatten().argsort().argsort() * max(1, elements // GROUP) // elements

    def shared(x: Tensor) -> Tensor:
        return torch.zeros_like(total).index_add_(0, group, x.double())[group]

    mean = shared(total) / shared(known).clamp_min(1)
    # of two halves of the passes: chance cannot make their squares alike, spreads that differ can
    halves = [(squares[i : count - 1 : 2].mean(0) / mean)[mean > 0] for i in (0, 1)]
    alike = float((halves[0] * halves[1]).mean() / (halves[0].mean() * halves[1].mean()) - 1)
    prior = 4 + 2 / max(1e-6, alike)  # NaN where a half has no error: not alike
    spread = ((prior * mean + total) / (prior + known)).sqrt()
    others = ((prior * mean + total - squares) / (prior + known - 1)).sqrt()
    largest = torch.where(others > 0, squares.sqrt() / others, 0).amax(1)
    quantile = -float(stdtrit(count - 1, KERNEL_LEVEL))
    rare = quantile * math.sqrt(1 + 1 / count) * float(largest.std())
    # sqrt(2): errors of rounding to nearest have half the variance of stochastic ones, on average
    # (a step^2 / 12 and / 6)
    limit = max(float(largest.max()), (float(largest.mean()) + rare) / math.sqrt(2))
    return torch.where(known > 0, limit * spread, math.inf).reshape(sizes.shape)
