"""Is a step's error that of its format's roundings, and in which module is it not?

*Modules.* Each module's own code is compared with float64 on the same inputs that the mode gave it
(`inspect/divergence`). A module whose error is beyond the bound must have such an error on another
batch too, and float32 must not have the same.

*The whole step.* Passes with stochastic roundings at the places where the mode rounds have an
unbiased error, and float32 passes with weights moved by up to half a unit have errors of the same
size. If the means of both differ by more than Student's t allows, it is no rounding. The first
passes give the direction in which a parameter's gradients differ, further ones are compared along
it, so that the test is one of a few numbers.

*Derivative.* In float64 the loss is moved along a random direction by small steps, and its slopes
are compared with the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, variance

import torch
from scipy.special import stdtrit
from torch import Tensor

from mprun.inspect.check.check_passes import LOSS, Figures, StepPasses, is_finite, line_of
from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.check_training import COARSEST, LEVEL
from mprun.inspect.check.checked_mode import CheckedMode
from mprun.inspect.divergence import DifferenceRow, Side
from mprun.inspect.divergence.boundaries import COPIES, relative_rms
from mprun.inspect.divergence.difference import OpError, SideError, error_ratio
from mprun.inspect.divergence.side_by_side import (
    MARGIN,
    MARGINS,
    Captured,
    SharedStep,
    capture,
    compare,
)
from mprun.precision.emulate import Emulated16
from mprun.precision.nested import to_dtype
from mprun.precision.policy import torch_dtype
from mprun.precision.rounding import sums_db
from mprun.study.planned_run import FLOAT32_MODE
from mprun.train.loss_terms import LossTerms
from mprun.watch.updates import LIMIT_DB, OWN_SEED, power

# Passes of each kind: for the direction, compared at first, and compared where they differ. A few
# passes give the distribution of one number along a direction, not that of a million numbers.
DIRECTION_PASSES, FIRST_PASSES, MOST_PASSES = 3, 4, 12
SUSPECT = 1e-3  # The chance of a difference below which more passes are taken
# The relative error that float32 itself may have: its sums may have another order
FLOAT32 = MARGINS[torch.float32] * torch.finfo(torch.float32).eps / 2
# The relative error that products of TF32 make in a float32 result; it has the digits of float16
TF32 = MARGIN * torch.finfo(torch.float16).eps / 2
# Noise changes the mean of what is not linear, most where a gradient jumps (ReLU, max-pooling). The
# mean of a jump at a random place, blurred by normal noise, is off by this many standard deviations
# of a pass (root mean square over places), however small the noise is. So that much is allowed.
KINKS = math.sqrt(math.sqrt(2) - 1)
ROUNDED = 4  # Rounded passes of each module; the largest of their errors counts
SCALE = 2.0**16  # The first loss scale of PyTorch's GradScaler
# Of the derivative, as shares of the weights: several, as kinks make slopes differ between steps
STEPS = (1e-5, 3e-6, 1e-6)


def agrees(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    passes = StepPasses(mode)
    named = list(_by_module(passes))
    if passes.is_16_bit:
        named += _no_gradient(passes)
        named += [] if named else _far(passes)  # a named module is the cause of a far step
    yield from named
    if passes.is_scaled:
        yield from _scale_changes(passes)
    if "derivative" not in mode.shared:  # that of float64 is the same in all modes
        mode.shared["derivative"] = True
        yield from _wrong_derivative(passes)


# ---- modules -------------------------------------------------------------------------------------


def _by_module(passes: StepPasses) -> Iterator[Finding]:
    """The first module, forward or backward, with an error beyond its bound."""
    mode, is_exact = passes.mode, passes.mode.plan.policy.name == FLOAT32_MODE
    least = TF32 if mode.plan.policy.tf32 else 0.0
    own = _captured(mode, 0, passes.scale)
    known = _suspects(own, least)
    if known and len(mode.batches) > 1:
        known &= _suspects(_captured(mode, 1, passes.scale), least)
    if not known:
        return
    exact = own if is_exact else _captured(mode, 0, 1.0, exact=True)
    for row in compare(own, exact).rows:
        # an ill-conditioned formula exceeds the bound in float32 too, and is no fault of the mode
        same = not is_exact and error_ratio(row.a) <= 2 * error_ratio(row.b)
        suspect = _is_suspect(row.a, least) and (row.phase, row.module) in known
        if suspect and not same and not _is_of_a_kernel(row, own.ops, is_exact):
            text = f"{row.phase}, {row.what}: its own error is {row.a.arising:.1e}; rounding to "
            text += f"{row.a.dtype} makes at most {row.a.explained:.1e}"
            line = line_of(passes.model, row.module)
            yield Finding("larger_error", row.module, text, row.op, line, error_ratio(row.a))
            return  # later modules inherit it


def _is_of_a_kernel(row: DifferenceRow, ops: Sequence[OpError], is_exact: bool) -> bool:
    """Whether one op of PyTorch makes the error: its kernel adds up in 16 bits.

    In float32, without other casts, only one that the code asks for is a finding.
    """
    own = [x for x in ops if (x.phase, x.module) == (row.phase, row.module)]
    kernel = max((x.error for x in own if x.op not in COPIES), default=0.0)
    cast = max((x.error for x in own if x.op in COPIES), default=0.0)
    return kernel >= row.a.arising / 2 or (is_exact and cast <= row.a.explained)


def _suspects(side: Captured, least: float) -> set[tuple[str, str]]:
    calls = [x for x in side.calls if any(_is_suspect(e, least) for e in x.errors.values())]
    return {(x.phase, x.module) for x in calls}


def _is_suspect(error: SideError, least: float) -> bool:
    # infinite where a number is not finite, which `trains` reports
    return least < error.arising < math.inf and not error.is_explained


def _captured(mode: CheckedMode, n: int, scale: float, exact: bool = False) -> Captured:
    """Each module's own errors in the mode, or in float32, on a batch of this number."""
    plan, parts = (mode.exact if exact else mode.plan), mode.trainer(exact).parts
    part = (mode.exact_batches if exact else mode.batches)[n].parts[0]
    policy, loss = plan.policy, LossTerms(plan.recipe)
    dtype = torch_dtype(policy.output_dtype)

    def scaled(output: object) -> Tensor:
        return loss(to_dtype(output, dtype), part.content) * scale

    low = torch_dtype(policy.compute_dtype) if policy.casts else None
    side = Side(parts.model, region=parts.precision.region, low=low)
    step = SharedStep(plan.recipe.forward, part.inputs, scaled)
    with parts.precision.arithmetic.region():  # of the backward pass too
        return capture(step, side, passes=ROUNDED)


# ---- gradients that are absent -------------------------------------------------------------------


def _no_gradient(passes: StepPasses) -> Iterator[Finding]:
    """The last module of which a parameter has a gradient in float32 alone, in every batch.

    In one batch a mixture of experts may send no token to an expert.
    """
    absent: list[str] | None = None
    for n in range(len(passes.mode.batches)):
        low, exact = passes.low(n, passes.scale), passes.exact(n)
        names = exact if absent is None else absent
        # zeros count as absent: a gradient of 16 bits may have become 0
        absent = [x for x in names if exact[x].any() and not (x in low and low[x].any())]
        if not absent:
            return
    exact, float64 = passes.exact(), passes.in_float64()
    known = [x for x in absent or () if x in float64 and _is_determined(exact[x], float64[x])]
    if known:
        more = f", and {len(known) - 1} more" if len(known) > 1 else ""
        text = f"{known[-1]}{more}: no gradient, or zeros, in {len(passes.mode.batches)} batches"
        yield passes.finding("no_gradient", known[-1], text, at=len(known))


def _is_determined(exact: Tensor, float64: Tensor) -> bool:
    """Whether float32's gradient is more than rounding errors around 0 (a bias before a norm)."""
    return sums_db(power(float64), power(exact - float64)) >= LIMIT_DB


# ---- the whole step ------------------------------------------------------------------------------


def _far(passes: StepPasses) -> Iterator[Finding]:
    """The parameter whose gradient is furthest from float32's, or the loss."""
    ratios = _far_ratios(passes)
    if ratios:
        # a loss that is far has gradients that are far
        name = LOSS if LOSS in ratios else max(ratios, key=lambda x: ratios[x])
        text = "the loss" if name == LOSS else f"the gradient of {name}"
        text += f" is {ratios[name]:.1f} times as far from float32's as roundings move it"
        yield passes.finding("far_from_float32", name, text, at=ratios[name])


def _far_ratios(passes: StepPasses) -> dict[str, float]:
    """Parameters, or `LOSS`, to their distance from float32 over the bound; those above 1."""
    drawn = [_difference(passes, n) for n in range(DIRECTION_PASSES)]
    if not all(map(is_finite, drawn)):
        return {}
    along, noise = dict[str, Tensor](), dict[str, float]()
    for x in drawn[0]:
        total = torch.stack([difference[x] for difference in drawn]).sum(0)
        if size := math.sqrt(power(total)):
            along[x] = total / size
            scatter = [power(difference[x] - total / len(drawn)) for difference in drawn]
            noise[x] = math.sqrt(math.fsum(scatter) / (len(drawn) - 1))  # the mean is estimated
    series: dict[str, list[float]] = {x: [] for x in along}
    for n in range(MOST_PASSES):
        if n == FIRST_PASSES and all(_t(v, SUSPECT) <= 1 for v in series.values()):
            return {}
        # other seeds than those that gave the direction, else it would fit their noise
        difference = _difference(passes, DIRECTION_PASSES + n)
        for x, values in series.items():
            values.append(float((difference[x] * along[x]).sum()))
    level = LEVEL / max(1, len(series))  # Bonferroni: one chance for all parameters
    ratios = {x: _t(v, level) for x, v in series.items() if fmean(v) > KINKS * noise[x]}
    return {x: ratio for x, ratio in ratios.items() if ratio > 1}


def _difference(passes: StepPasses, n: int) -> Figures:
    """The mode's loss and gradients less float32's, each with roundings of this number.

    Seeds of float32's moves are others than the mode's, so that the two noises are independent.
    """
    low = passes.low(0, passes.scale, Emulated16("stochastic", "infinity", "float32", n), seed=n)
    exact = passes.exact(0, passes.moved(OWN_SEED - n), rounded=True, seed=OWN_SEED - n)
    return {x: low[x] - exact[x] for x in exact if x in low}


def _t(differences: Sequence[float], level: float) -> float:
    """The mean of independent differences, over the most that chance makes it at a level."""
    error = math.sqrt(variance(differences) / len(differences))
    most = float(stdtrit(len(differences) - 1, 1 - level / 2)) * error
    return fmean(differences) / most if most else math.inf


# ---- float32 and float64 alone -------------------------------------------------------------------


def _scale_changes(passes: StepPasses) -> Iterator[Finding]:
    """The parameter that a loss scale changes most in float32.

    A power of two changes no bit of an unscaled gradient.
    """
    plain, again, scaled = (passes.exact(scale=scale) for scale in (1.0, 1.0, SCALE))
    if not is_finite(scaled):
        return
    changes = {x: relative_rms(scaled[x], y) for x, y in plain.items()}
    # `again`: two equal passes differ where a kernel adds up in no fixed order
    known = [x for x, y in plain.items() if changes[x] > FLOAT32 + 2 * relative_rms(again[x], y)]
    if known:
        worst = max(known, key=lambda x: changes[x])
        text = f"in float32 a loss scale of {SCALE:g} changes the gradient of {worst} by "
        text += f"{changes[worst]:.1e} of itself"
        yield passes.finding("scale_changes_gradient", worst, text)


def _wrong_derivative(passes: StepPasses) -> Iterator[Finding]:
    """The last part of the model in which the gradient is not the derivative."""
    try:
        gradients = passes.in_float64()
        if _slope(passes, gradients, "") is None:  # one direction through all: most models end here
            return
        parts = [f"{name}." for name, _ in passes.model.named_children()]
        gaps = {x: gap for x in parts if (gap := _slope(passes, gradients, x)) is not None}
    except Exception:  # a model's own code may fail in float64 in any way
        return
    if gaps:
        part, (slope, derivative) = [*gaps.items()][-1]
        text = f"along a random direction the loss changes by {slope:.5g}, by the gradient "
        yield passes.finding("wrong_derivative", part, f"{text}{derivative:.5g}")


def _slope(passes: StepPasses, gradients: Figures, part: str) -> tuple[float, float] | None:
    """Slope and derivative along a direction of the parameters of a part, if they disagree."""
    generator = torch.Generator().manual_seed(OWN_SEED)
    move, products = {}, []
    for name, p in passes.model.named_parameters():
        if name.startswith(part) and name in gradients:
            size = math.sqrt(power(p) / max(p.numel(), 1)) or 1.0  # 1: biases begin at 0
            random = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            move[name] = random.to(p.device) * size
            products.append(float((move[name] * gradients[name]).sum()))
    slopes = []
    for h in STEPS:
        ends = [passes.in_float64({k: v * x for k, v in move.items()})[LOSS] for x in (h, -h)]
        slopes.append(float(ends[0] - ends[1]) / (2 * h))
    # products of random signs cancel: `scale` is the size that their sum has by chance
    derivative, scale = math.fsum(products), math.hypot(*products)
    gap = min(abs(slope - derivative) for slope in slopes)
    rounding = float(gradients[LOSS].abs()) * torch.finfo(torch.float64).eps / STEPS[-1]
    # slopes must agree with each other before they contradict the gradient: kinks make them differ
    error = 10 * (max(slopes) - min(slopes)) + 100 * rounding + COARSEST * scale
    return (slopes[-1], derivative) if gap > error else None
