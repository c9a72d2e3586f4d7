"""Is a step's error what the roundings of its format explain, and where is it not?

*Modules.* Each module's own code is held against float64 on the very inputs that the mode gave it
(`numerics.divergence`). A module whose error is not explained is looked at again: by more rounded
passes, on another batch, and beside float32, which must not have the same error.

*Parameters without a gradient* in the mode must have one in float32 in every batch: a mixture of
experts may send no token to one of them in one batch.

*The whole step.* Passes with stochastic roundings at the places where the mode rounds have an
unbiased error, and float32 passes with weights moved by up to half a unit have errors of the same
size. If the means of both differ by more than Student's t allows, it is no rounding. The first
passes give the direction in which a parameter's gradients differ, further ones are compared along
it, so that the test is one of a few numbers. A bias of the second order, as large as the square of
the relative spread, is allowed as well: noise changes the mean of what is not linear.

*Loss scale.* In float32 a scale that is a power of two changes no bit of an unscaled gradient.

*Derivative.* In float64 the loss is moved along a random direction by two small steps. The slopes
are compared with the gradient, and must agree with each other before they contradict it: kinks
make them differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from itertools import count, islice
from statistics import fmean, variance

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from mprun.data import Batch
from mprun.errors import definition
from mprun.experiments.planned_run import EXACT, PolicyProbe
from mprun.inspect.check_training import COARSEST, LEVEL
from mprun.inspect.checked_mode import CheckedMode
from mprun.nested import to_dtype
from mprun.numerics.divergence import DifferenceRow, Side
from mprun.numerics.divergence.boundaries import COPIES, exact_arithmetic, relative_rms
from mprun.numerics.divergence.pieces import excess
from mprun.numerics.divergence.side_by_side import MARGINS, Captured, SharedStep, capture, together
from mprun.numerics.passes import ready
from mprun.numerics.tolerance import sums_db
from mprun.numerics.updates import LIMIT_DB, OWN_SEED, power, weights_moved
from mprun.precision.emulate import Emulated16
from mprun.precision.policy import torch_dtype
from mprun.results.check_result import Finding
from mprun.results.diff_result import CapturedCall, OpError
from mprun.train.loss_terms import LossTerms

DIRECTION_PASSES, FIRST_PASSES, MOST_PASSES = 3, 4, 12
"""Passes of either kind: for the direction, compared at first, and compared where they differ."""
SUSPECT = 1e-3
"""The chance of a difference below which more passes are taken."""
ROUNDED = 4
"""Rounded passes of a module that is suspected."""
LOWER = 16.0
SCALE = 2.0**16
STEPS = (1e-5, 3e-6, 1e-6)
"""Of the derivative, as shares of the weights."""
LOSS = ""
"""In place of a parameter's name."""
Gradients = Mapping[str, Tensor]
Region = Callable[[nn.Module], AbstractContextManager[object]]


def agrees(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    passes = _StepPasses(mode)
    named = list(_by_module(passes))
    if passes.is_16_bit:
        named += _no_gradient(passes)
        named += [] if named else _far(passes)
    yield from named
    if "loss scale" in passes.kinds:
        yield from _scale_changes(passes)
    if "derivative" not in mode.shared:  # that of float64 is the same in all modes
        mode.shared["derivative"] = True
        yield from _wrong_derivative(passes)


class _StepPasses:
    """Passes of a mode and of float32 from the first weights."""

    def __init__(self, mode: CheckedMode) -> None:
        parts = mode.trainer().parts
        self.mode, self.run, self.policy = mode, parts.model, mode.plan.policy
        self.dtype = torch_dtype(self.policy.compute_dtype)
        low = self.dtype in (torch.float16, torch.bfloat16)
        self.is_16_bit = low and self.policy.gemms == "none"
        tensor = parts.precision.loss_scale.tensor
        self.kinds = {"loss scale"} if tensor is not None else set()
        self._first_scale = 1.0 if tensor is None else float(tensor)
        self.exact_probe = mode.probe(exact=True)
        self.low_probe = mode.probe() if self.is_16_bit else self.exact_probe

    @cached_property
    def scale(self) -> float:
        """The mode's loss scale, or the next one below that does not overflow."""
        scale = self._first_scale
        while scale > 1 and not _finite(self.low(self.mode.batches[0], scale)):
            scale /= LOWER
        return max(scale, 1.0)

    def low(self, batch: Batch, scale: float, emulated: int | None = None) -> Gradients:
        """Gradients in the mode, or with stochastic roundings of this number."""
        seed, regions = 0, list[Region]()
        if emulated is not None:
            arithmetic = Emulated16("stochastic", "infinity", "float32", seed=emulated)
            arithmetic.begin_step(1)
            seed, regions = emulated, [lambda _: arithmetic.region()]
        return self._gradients(self.low_probe, batch, scale, seed, regions)

    def exact(self, batch: Batch, scale: float = 1.0, moved: int | None = None) -> Gradients:
        """Gradients in float32, from weights that are moved by random numbers of this seed."""
        seed, regions = 0, list[Region]()
        if moved is not None:
            most = torch.finfo(self.dtype).eps / 2
            seed = OWN_SEED - moved
            regions = [lambda model: weights_moved(list(model.parameters()), most, seed)]
        return self._gradients(self.exact_probe, batch, scale, seed, regions)

    def in_float64(self) -> Gradients:
        """Those of the first batch, without the casts that the code asks for."""
        batch = self.mode.exact_batches[0]
        return self._gradients(self.exact_probe, batch, 1.0, 0, [exact_arithmetic])

    def loss_in_float64(self, move: Mapping[str, Tensor]) -> float:
        """The loss of the first batch, if this is added to the weights."""

        @contextmanager
        def moved(model: nn.Module) -> Iterator[None]:
            named = dict(model.named_parameters())
            for name, change in move.items():
                named[name].data += change  # those of `exact_arithmetic`, which it discards
            yield

        def stop(loss: Tensor) -> None:
            raise _LossKnownError(float(loss.detach()))

        regions: list[Region] = [exact_arithmetic, moved]
        batch = self.mode.exact_batches[0]
        try:
            self._gradients(self.exact_probe, batch, 1.0, 0, regions, stop)
        except _LossKnownError as known:
            return known.loss
        raise AssertionError("a pass without a loss")

    def _gradients(
        self,
        probe: PolicyProbe,
        batch: Batch,
        scale: float,
        seed: int,
        regions: Sequence[Region],
        before_backward: Callable[[Tensor], None] | None = None,
    ) -> Gradients:
        @contextmanager
        def inside(model: nn.Module) -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(ready(model, seed))
                for region in regions:
                    stack.enter_context(region(model))
                yield

        return probe.gradients(self.run, batch, scale, before_backward, inside)

    def line(self, module: str) -> str:
        """Where the forward of a module begins, or of the next one around it that is the user's."""
        path = module
        while True:
            place = definition(type(self.run.get_submodule(path)).forward)
            if place is not None or not path:
                return "" if place is None else str(place)
            path = path.rpartition(".")[0]


class _LossKnownError(Exception):
    def __init__(self, loss: float) -> None:
        super().__init__()
        self.loss = loss


def _finite(gradients: Gradients) -> bool:
    return all(bool(x.isfinite().all()) for x in gradients.values())


# ---- modules -------------------------------------------------------------------------------------


def _by_module(passes: _StepPasses) -> Iterator[Finding]:
    """The first module, forward or backward, with an error that is not explained."""
    mode, scale = passes.mode, passes.scale
    first = _captured(mode, 0, scale, ops=False)
    if not any(map(_is_suspect, first.calls)):
        return
    known: set[tuple[str, str]] | None = None
    for n in range(1, len(mode.batches))[:1]:
        calls = _captured(mode, n, scale, ops=False, passes=ROUNDED).calls
        known = {(x.phase, x.module) for x in calls if _is_suspect(x)}
    if known == set():
        return
    own = _captured(mode, 0, scale, passes=ROUNDED)
    is_exact = mode.plan.policy.name == EXACT
    exact = own if is_exact else _captured(mode, 0, 1.0, exact=True)
    for row in together(own, exact).rows:
        arises = math.isfinite(row.a.arising) and not row.a.is_explained
        same = not is_exact and excess(row.a) <= 2 * excess(row.b)
        again = known is None or (row.phase, row.module) in known
        if arises and again and not same and not _is_of_a_kernel(row, own.ops, is_exact):
            text = f"{row.phase}, {row.what}: an error of {row.a.arising:.1e} arises; "
            text += f"{row.a.dtype} explains {row.a.explained:.1e}"
            at = excess(row.a)
            yield Finding("larger_error", row.module, text, row.op, passes.line(row.module), at)
            return


def _is_of_a_kernel(row: DifferenceRow, ops: Sequence[OpError], is_exact: bool) -> bool:
    """Whether one op of PyTorch makes the error: its kernel adds up in 16 bits.

    In float32, without other casts, only one that the code asks for is a finding.
    """
    own = [x for x in ops if (x.phase, x.module) == (row.phase, row.module)]
    kernel = max((x.error for x in own if x.op not in COPIES), default=0.0)
    cast = max((x.error for x in own if x.op in COPIES), default=0.0)
    return kernel >= row.a.arising / 2 or (is_exact and cast <= row.a.explained)


def _is_suspect(call: CapturedCall) -> bool:
    errors = call.errors.values()
    return any(math.isfinite(x.arising) and not x.is_explained for x in errors)


def _captured(
    mode: CheckedMode, n: int, scale: float, exact: bool = False, passes: int = 1, ops: bool = True
) -> Captured:
    """The errors that arise in the mode, or in float32, on a batch of this number."""
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
        return capture(step, side, passes=passes, ops=ops)


# ---- gradients that are absent -------------------------------------------------------------------


def _no_gradient(passes: _StepPasses) -> Iterator[Finding]:
    """The last module of which a parameter has a gradient in float32 alone."""
    mode, absent = passes.mode, list[str]()
    for n, batch in enumerate(mode.batches):
        low, exact = passes.low(batch, passes.scale), passes.exact(mode.exact_batches[n])
        names = exact if n == 0 else absent
        absent = [x for x in names if exact[x].any() and not (x in low and low[x].any())]
        if not absent:
            return
    absent = [x for x in absent if not _underflows(passes, x)]
    float64 = passes.in_float64() if absent else {}
    exact = passes.exact(mode.exact_batches[0])
    known = [x for x in absent if x in float64 and _is_determined(exact[x], float64[x])]
    if known:
        module = known[-1].rpartition(".")[0]
        more = f", and {len(known) - 1} more" if len(known) > 1 else ""
        text = f"{known[-1]}{more}: no gradient, or zeros, in {len(mode.batches)} batches"
        yield Finding("no_gradient", module, text, line=passes.line(module), at=len(known))


def _underflows(passes: _StepPasses, name: str) -> bool:
    """Whether a larger loss scale gives a gradient."""
    batch, scale = passes.mode.batches[0], passes.scale
    while "loss scale" in passes.kinds and scale < 2.0**40:
        scale *= LOWER
        low = passes.low(batch, scale)
        if not _finite(low):
            break
        if name in low and low[name].any():
            return True
    return False


def _is_determined(exact: Tensor, float64: Tensor) -> bool:
    return sums_db(power(float64), power(exact - float64)) >= LIMIT_DB


# ---- the whole step ------------------------------------------------------------------------------


def _far(passes: _StepPasses) -> Iterator[Finding]:
    """The parameter whose gradient is furthest from float32's, or the loss."""
    ratios = _excesses(passes)
    if ratios:  # a gradient that is zero but for roundings (a bias before a BatchNorm) is none
        exact, float64 = passes.exact(passes.mode.exact_batches[0]), passes.in_float64()
        ratios = {
            x: ratio
            for x, ratio in ratios.items()
            if x == LOSS or (x in float64 and _is_determined(exact[x], float64[x]))
        }
    if not ratios:
        return
    name = LOSS if LOSS in ratios else max(ratios, key=lambda x: ratios[x])
    module = name.rpartition(".")[0]
    text = "the loss" if name == LOSS else f"the gradient of {name}"
    text += f" is {ratios[name]:.1f} times as far from float32's as roundings explain"
    yield Finding("far_from_float32", module, text, line=passes.line(module), at=ratios[name])


def _excesses(passes: _StepPasses) -> dict[str, float]:
    """Parameters, or `LOSS`, to how many times as far from float32 as explained; those above 1."""
    pairs = _pairs(passes)
    drawn = list(islice(pairs, DIRECTION_PASSES))
    if not all(_finite(low) for low, _ in drawn):
        return {}
    names = [x for x in drawn[0][1] if x in drawn[0][0]]
    along: Gradients = {x: torch.stack([a[x] - b[x] for a, b in drawn]).sum(0) for x in names}
    allowed = {}
    for x in names:
        size = math.sqrt(power(drawn[0][1][x]))
        spread = max(power(a[x] - b[x]) for a, b in drawn)
        allowed[x] = spread / size if size else math.inf
    values: dict[str, list[float]] = {x: [] for x in names if along[x].any()}
    for n, (low, exact) in enumerate(islice(pairs, MOST_PASSES)):
        if n == FIRST_PASSES and all(_t(x, SUSPECT) <= 1 for x in values.values()):
            return {}
        for x, series in values.items():
            direction = along[x] / math.sqrt(power(along[x]))
            series.append(float(((low[x] - exact[x]) * direction).sum()))
    level = LEVEL / max(1, len(values))
    ratios = {x: _t(v, level) for x, v in values.items() if abs(fmean(v)) > allowed[x]}
    return {x: ratio for x, ratio in ratios.items() if ratio > 1}


def _pairs(passes: _StepPasses) -> Iterator[tuple[Gradients, Gradients]]:
    """Gradients and loss with stochastic roundings, and of float32 with moved weights."""
    batch = passes.mode.batches[0]  # for both: the rounding of inputs is no part of the step
    for n in count():
        low = passes.low(batch, passes.scale, emulated=n)
        first = torch.tensor([passes.low_probe.loss], dtype=torch.float64)
        exact = passes.exact(batch, moved=n)
        second = torch.tensor([passes.exact_probe.loss], dtype=torch.float64)
        yield {**low, LOSS: first}, {**exact, LOSS: second}


def _t(differences: Sequence[float], level: float) -> float:
    """The mean of independent differences, by the most that chance explains at a level."""
    freedom = len(differences) - 1
    error = math.sqrt(variance(differences) / len(differences))
    size = abs(fmean(differences))
    return size / (float(stdtrit(freedom, 1 - level / 2)) * error) if error else math.inf * size


# ---- float32 and float64 alone -------------------------------------------------------------------


def _scale_changes(passes: _StepPasses) -> Iterator[Finding]:
    """The parameter that a loss scale changes most in float32."""
    batch = passes.mode.exact_batches[0]
    plain, again, scaled = (passes.exact(batch, scale) for scale in (1.0, 1.0, SCALE))
    if not _finite(scaled):
        return
    bound = MARGINS[torch.float32] * torch.finfo(torch.float32).eps / 2
    changes = {
        name: change
        for name, x in plain.items()
        if (change := relative_rms(scaled[name], x)) > bound + 2 * relative_rms(again[name], x)
    }
    if changes:
        worst = max(changes, key=lambda x: changes[x])
        module = worst.rpartition(".")[0]
        text = f"in float32 a loss scale of {SCALE:g} changes the gradient of {worst} by "
        text += f"{changes[worst]:.1e} of itself"
        yield Finding("scale_changes_gradient", module, text, line=passes.line(module))


def _wrong_derivative(passes: _StepPasses) -> Iterator[Finding]:
    """The last part of the model in which the gradient is not the derivative."""
    try:
        gradients = passes.in_float64()
        if not gradients or _slope(passes, gradients, "") is None:
            return
        parts = [f"{name}." for name, _ in passes.run.named_children()]
        gaps = {x: gap for x in parts if (gap := _slope(passes, gradients, x)) is not None}
    except Exception:  # a model's own code may fail in float64 in any way
        return
    if gaps:
        part, (slope, derivative) = [*gaps.items()][-1]
        module = part[:-1]
        text = f"along a random direction the loss changes by {slope:.5g}, by the gradient "
        yield Finding(
            "wrong_derivative", module, f"{text}{derivative:.5g}", line=passes.line(module)
        )


def _slope(passes: _StepPasses, gradients: Gradients, part: str) -> tuple[float, float] | None:
    """Slope and derivative along a direction of the parameters of a part, if they disagree."""
    generator = torch.Generator().manual_seed(OWN_SEED)
    weights = dict(passes.run.named_parameters())
    typical = math.sqrt(fmean([power(p) / p.numel() for p in weights.values() if p.numel()]))
    move, products = {}, []
    for name, g in gradients.items():
        if name.startswith(part) and g.any():
            size = math.sqrt(power(weights[name]) / g.numel()) or typical
            random = torch.randn(g.shape, generator=generator, dtype=torch.float64)
            move[name] = random.to(g.device) * size
            products.append(float((move[name] * g).sum()))
    if not move:
        return None
    slopes, loss = [], 0.0
    for h in STEPS:
        ends = [passes.loss_in_float64({k: v * x for k, v in move.items()}) for x in (h, -h)]
        loss = max(map(abs, ends))
        slopes.append((ends[0] - ends[1]) / (2 * h))
    derivative, scale = math.fsum(products), math.hypot(*products)
    gap = min(abs(slope - derivative) for slope in slopes)
    rounding = loss * torch.finfo(torch.float64).eps / STEPS[-1]
    error = 10 * (max(slopes) - min(slopes)) + 100 * rounding + COARSEST * scale
    return (slopes[-1], derivative) if gap > error else None
