"""Does a mode train as float32 does: does its loss fall, and are its errors only roundings?

*Falls.* The same few batches are visited again and again: their mean loss at the first visit less
that at the last one is the fall. A mode's is compared with float32's from the same starts.

*Curve.* The mode and float32 take the same steps in pairs, from starts that are moved at random,
alike in both. This noise cancels within a pair, so the mean difference is what the mode changes.

*Modules.* Each module's own code is compared with float64 on the same inputs that the mode gave it.

*Compiled code*, where `speed.compile` asks for it, in the same way, beside eager code.

*The whole step.* Passes of the mode with stochastic roundings are compared with float32 passes of
moved weights: if the means of both differ, it is no rounding. The first passes give the direction
in which a gradient differs, further ones are compared along it, so one number is tested.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean, stdev

import torch
from torch import Tensor

from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.checked_mode import (
    LOSS,
    CheckedMode,
    Curve,
    Figures,
    StepPasses,
    is_finite,
)
from mprun.inspect.divergence import DifferenceRow
from mprun.inspect.divergence.boundaries import COPIES, OpError
from mprun.inspect.divergence.runs import capture_in_mode
from mprun.inspect.divergence.side_by_side import Captured, compare
from mprun.inspect.rounding_oracle import (
    ALIKE,
    FLOAT32_ERROR,
    KINKS,
    LEVEL,
    SPREADS,
    SUSPECT_CURVE,
    SUSPECT_STEP,
    TF32_ERROR,
    SideError,
    mean_bound,
    mean_ratio,
    relative_rms,
)
from mprun.precision.emulate import Emulated16
from mprun.precision.nested import to_dtype
from mprun.precision.policy import torch_dtype
from mprun.precision.rounding import sums_db
from mprun.study.planned_run import FLOAT32_MODE
from mprun.train.assemble.parts import compiled_model
from mprun.train.data.random_numbers import untouched
from mprun.watch.nonfinite import FpExceptionError, fp_exceptions
from mprun.watch.updates import LIMIT_DB, OWN_SEED, power

FEW, MANY = 3, 8  # Pairs of curves: at first, and where the mean of these is suspect
# How many times as many steps are taken before a loss counts as flat: a small learning rate or a
# warm-up is no fault
LONGER = 4
VISITS = 3  # Of each batch at least
# Share of float32's fall that a mode's is at least: no rounding takes three quarters of it
LEAST_FALL = 0.25
# Passes of each kind: for the direction, compared at first, and compared where they differ. A few
# passes give the distribution of one number along a direction, not that of a million numbers.
DIRECTION_PASSES, FIRST_PASSES, MOST_PASSES = 3, 4, 12
ROUNDED = 4  # The most rounded passes of each module; the largest of their errors counts
CAPTURE_S = "seconds of the longest capture"  # A key of what the modes of a check share
SCALE = 2.0**16  # The first loss scale of PyTorch's GradScaler


# ---- training ------------------------------------------------------------------------------------


def trains(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of `trains`, and the curve of `agrees`."""
    own, count = Curve(mode), len(mode.batches)
    timed = own, Curve(mode, exact=True, moves_inputs=False)
    pair_s = math.fsum(x.step_s for x in timed if x.until(2))  # the first step is slower
    # steps for which all pairs fit into half of the budget: half is for the checks that follow
    affordable = mode.left_s / 2 / (FEW * pair_s)
    most = VISITS * count if mode.settings.fast else mode.settings.steps
    steps = int(min(most, max(VISITS * count, affordable)))
    losses = own.until(steps)
    mode.checks.figures |= {"loss_first": losses[0], "loss_last": losses[-1], "steps": len(losses)}
    if not own.is_finite:
        yield _not_finite(mode, len(losses))
        return
    yield from _does_not_fall(mode, steps, own.step_s)
    if mode.plan is not mode.exact and not mode.settings.fast:  # float32 has no other curve
        yield from _other_curve(mode, steps, pair_s)


def _does_not_fall(mode: CheckedMode, steps: int, step_s: float) -> Iterator[Finding]:
    """Whether the loss falls where float32's does; float32's alone is no finding."""
    own, exact = _falls(mode, steps)
    floor = mode.once("floor", lambda: _moved_by_roundings(mode))
    if exact <= floor and mode.left_s > LONGER * steps * step_s:
        steps *= LONGER
        own, exact = _falls(mode, steps)
    if exact <= floor:
        text = f"float32's loss falls by {exact:.1e} in {steps} steps, and roundings move it by "
        text += f"{floor:.1e}: it is not judged, and needs more steps (check.steps)"
        mode.checks.not_done["trains"] = text
    elif own < LEAST_FALL * exact:
        others = [_falls(mode, steps, number) for number in range(1, FEW)]
        if all(floor < theirs and low < LEAST_FALL * theirs for low, theirs in others):
            moves = f"rises by {-own:.1e}" if own < 0 else f"falls by only {own:.1e}"
            text = f"it {moves} in {steps} steps, float32's falls by {exact:.1e}"
            yield Finding("loss_does_not_fall", "", text, at=exact - own)


def _falls(mode: CheckedMode, steps: int, number: int = 0) -> tuple[float, float]:
    """How much the mode's and float32's loss of the same batches falls from one start."""
    count = len(mode.batches)
    ends = max(count, steps // count * count)  # else there are more batches than steps
    both = (mode.losses(steps, number, exact=x) for x in (False, True))
    own, exact = (fmean(x[:count]) - fmean(x[ends - count : ends] or x[-1:]) for x in both)
    return own, exact


def _moved_by_roundings(mode: CheckedMode) -> float:
    """How much float32's first loss moves with the weights, by up to half a unit of bfloat16.

    A smaller fall is none in any format.
    """
    (own,) = mode.losses(1, exact=True)
    others = (Curve(mode, n, exact=True, moves_inputs=False).until(1)[0] for n in range(1, FEW))
    return math.sqrt(fmean((x - own) ** 2 for x in others))


def _not_finite(mode: CheckedMode, steps: int) -> Finding:
    """The op that first made a number that is not finite, in the step that shows it."""
    curve = Curve(mode)  # again up to this step: watching every op of all steps would be slow
    curve.until(steps - 1)
    parts = curve.trainer.parts
    text = f"the loss or a gradient of step {steps} is not finite, at any loss scale"
    try:
        with untouched(), fp_exceptions(parts.model, parts.optimizer, "halt", halt_after=1):
            curve.step()
    except FpExceptionError as error:
        report = error.report
        all_of_step = [*report.findings, *report.expected, *report.of("absorbed")]
        first = next((x for x in all_of_step if x.phase == "forward"), error.exception)
        if first is not None:
            return Finding("not_finite", first.module, text, first.op, first.location or "")
    return Finding("not_finite", "", text)


def _other_curve(mode: CheckedMode, steps: int, pair_s: float) -> Iterator[Finding]:
    """Whether the mean loss differs from float32's by more than roundings move it."""
    differences, exact = list[float](), list[float]()
    for number in range(MANY):
        if number == FEW and abs(fmean(differences)) <= mean_bound(differences, SUSPECT_CURVE):
            return
        if mode.left_s / 2 < steps * pair_s:
            text = f"no time for more than {number} of {MANY} starts of {steps} steps"
            mode.checks.not_done["curve"] = text
            break
        own, of_float32 = (mode.losses(steps, number, exact=x) for x in (False, True))
        if not (math.isfinite(own[-1]) and math.isfinite(of_float32[-1])):
            return
        exact.append(fmean(of_float32))
        differences.append(fmean(own) - exact[-1])
    if len(exact) < FEW:  # too few for a standard deviation
        return
    # lower losses count too: they may be a regularization that is lost
    distance = abs(fmean(differences))
    bound = max(mean_bound(differences, LEVEL), SPREADS * stdev(exact))
    mode.checks.figures |= {"curve_distance": distance, "curve_bound": bound}
    if distance > bound:
        reference = fmean(exact)
        text = f"its mean loss of {steps} steps is {reference + fmean(differences):.5g}, float32's "
        text += f"{reference:.5g} from the same {len(exact)} starts; roundings move it by at most "
        text += f"{bound:.1e}"
        yield Finding("other_curve", "", text, at=distance / bound if bound else 1.0)


# ---- agreement -----------------------------------------------------------------------------------


def agrees(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of `agrees`, without the curve."""
    passes = mode.passes
    named = [*_by_module(passes), *_compiled(passes)]
    if passes.is_16_bit and _has_time(mode):
        named += _no_gradient(passes)
        if not named and _has_time(mode):  # a named module is the cause of a far step
            named += _far(passes)
    yield from named
    if passes.is_scaled and _has_time(mode):
        yield from _scale_changes(passes)


def _has_time(mode: CheckedMode, needed_s: float = 0.0) -> bool:
    """Whether a further part of `agrees` fits into the budget; else the check is not done."""
    fits = mode.left_s > needed_s
    if not fits:
        mode.checks.not_done["agrees"] = "no time for all of its passes"
    return fits


def _by_module(passes: StepPasses) -> Iterator[Finding]:
    """The first module, forward or backward, with an error beyond its bound."""
    mode, is_exact = passes.mode, passes.mode.plan.policy.name == FLOAT32_MODE
    least = TF32_ERROR if mode.plan.policy.tf32 else 0.0
    if not _has_time(mode, mode.shared.get(CAPTURE_S, 0.0)):
        return
    own = _captured(mode, 0, passes.scale)
    known, needed_s = _suspects(own, least), mode.shared[CAPTURE_S]
    if known and len(mode.batches) > 1 and _has_time(mode, needed_s):
        known &= _suspects(_captured(mode, 1, passes.scale), least)
    if not known or not _has_time(mode, needed_s):
        return
    exact = own if is_exact else _captured(mode, 0, 1.0, exact=True)
    for row in compare(own, exact).rows:
        # an ill-conditioned formula exceeds the bound in float32 too, and is no fault of the mode
        is_worse = is_exact or row.a.exceeds(row.b)
        suspect = _is_suspect(row.a, least) and (row.phase, row.module) in known
        if suspect and is_worse and not _is_of_a_kernel(row, own.ops, is_exact):
            text = f"{row.phase}, {row.what}: {row.a.sentence}"
            line = row.line or passes.line_of(row.module)
            yield Finding("larger_error", row.module, text, row.op, line, row.a.ratio)
            return  # later modules inherit it


def _compiled(passes: StepPasses) -> Iterator[Finding]:
    """The first module whose compiled code has a larger error than its eager code has."""
    known: dict[tuple[str, str], DifferenceRow] = {}
    for n in range(min(2, len(passes.mode.batches))):
        if not (passes.mode.plan.speed.compile and _has_time(passes.mode)):
            return
        found = {(x.phase, x.module): x for x in _worse_compiled(passes, n)}
        known = {place: x for place, x in found.items() if not n or place in known}
        if not known:
            return
    row = next(iter(known.values()))  # later modules inherit it
    text = f"{row.phase}, {row.what}: {row.b.sentence}"
    line = row.line or passes.line_of(row.module)
    yield Finding("compiled_differs", row.module, text, row.op, line, row.b.ratio)


def _worse_compiled(passes: StepPasses, n: int) -> list[DifferenceRow]:
    """The rows of a batch with this number in which compiled code alone is beyond its bound."""
    a, b = (_captured(passes.mode, n, passes.scale, compiled=x) for x in (False, True))
    rows = compare(a, b).rows
    return [x for x in rows if not x.b.is_explained and x.b.exceeds(x.a) and x.b.arising < math.inf]


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


def _captured(
    mode: CheckedMode, n: int, scale: float, exact: bool = False, compiled: bool = False
) -> Captured:
    """Each module's own errors in the mode, or in float32, on a batch of this number."""
    plan = mode.exact if exact else mode.plan

    def capture() -> Captured:
        parts, began = mode.trainer(exact).parts, time.monotonic()
        part = mode.few_samples[exact][n].parts[0]
        handed_on = partial(to_dtype, dtype=torch_dtype(plan.policy.output_dtype))
        model = compiled_model(parts.model) if compiled else parts.model
        with parts.precision.arithmetic.region():  # of the backward pass too
            captured = capture_in_mode(
                plan, model, parts.precision, part, handed_on, scale, passes=ROUNDED
            )
        mode.shared[CAPTURE_S] = max(mode.shared.get(CAPTURE_S, 0.0), time.monotonic() - began)
        return captured

    # float32's is the same for all modes
    return mode.once(f"captured {n}", capture) if plan is mode.exact else capture()


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
    # in float32 more than rounding errors around 0, as the gradient of a bias before a norm has
    known = [
        x
        for x in absent or ()
        if x in float64 and sums_db(power(float64[x]), power(exact[x] - float64[x])) >= LIMIT_DB
    ]
    if known:
        more = f", and {len(known) - 1} more" if len(known) > 1 else ""
        count = len(passes.mode.batches)
        batches = "the batch" if count == 1 else f"{count} batches"
        text = f"{known[-1]}{more}: no gradient, or zeros, in {batches}"
        yield passes.finding("no_gradient", known[-1], text, at=len(known))


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
        if n == FIRST_PASSES and all(mean_ratio(v, SUSPECT_STEP) <= 1 for v in series.values()):
            return {}
        # other seeds than those that gave the direction, else it would fit their noise
        difference = _difference(passes, DIRECTION_PASSES + n)
        if not is_finite(difference):  # a rounding up to infinity, by chance
            return {}
        for x, values in series.items():
            values.append(float((difference[x] * along[x]).sum()))
    level = LEVEL / max(1, len(series))  # Bonferroni: one chance for all parameters
    ratios = {x: mean_ratio(v, level) for x, v in series.items() if fmean(v) > KINKS * noise[x]}
    return {x: ratio for x, ratio in ratios.items() if ratio > 1}


def _difference(passes: StepPasses, n: int) -> Figures:
    """The mode's loss and gradients less float32's, each with roundings of this number.

    Seeds of float32's moves are others than the mode's, so that the two noises are independent.
    """
    low = passes.low(0, passes.scale, Emulated16("stochastic", "infinity", "float32", n), seed=n)
    exact = passes.exact(0, passes.moved(OWN_SEED - n), rounded=True, seed=OWN_SEED - n)
    return {x: low[x] - exact[x] for x in exact if x in low}


# ---- float32 alone -------------------------------------------------------------------------------


def _scale_changes(passes: StepPasses) -> Iterator[Finding]:
    """The last parameter whose gradient a loss scale changes: the backward pass reaches it first.

    A power of two changes no bit of an unscaled gradient. Casts of the code, which `dtypes` names,
    are no part of it.
    """
    plain, again, scaled = (passes.exact(scale=scale) for scale in (1.0, 1.0, SCALE))
    if not is_finite(scaled):
        return
    # two equal passes differ where a kernel adds up in no fixed order
    most = {x: FLOAT32_ERROR + ALIKE * relative_rms(again[x], y) for x, y in plain.items()}
    known = [x for x, y in plain.items() if relative_rms(scaled[x], y) > most[x]]
    if not known:
        return
    plain, scaled = passes.in_float64(), passes.in_float64(SCALE)
    changes = {x: relative_rms(scaled[x], plain[x]) for x in known if x in plain}
    changed = [x for x in known if changes.get(x, 1.0) > FLOAT32_ERROR]
    if changed:
        text = f"in float32 a loss scale of {SCALE:g} changes the gradient of {changed[-1]} by "
        text += f"{relative_rms(scaled[changed[-1]], plain[changed[-1]]):.1e} of itself"
        yield passes.finding("scale_changes_gradient", changed[-1], text)
