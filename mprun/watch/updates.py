"""What a step adds to the weights, what 16 bits lose of it, and which gradients mean nothing.

The difference of the weights before and after a step contains the update and the rounding of the
stored result. For float32 weights and SGD at 1e-3 the rounding can be most of it, for 16-bit
weights all of it. So the step is repeated on a copy of optimizer and weights in float64, and the
difference is taken there (`exact_updates`). From it follows, exactly and not by rounding and
comparing, which updates a format loses (`lost_updates`). `RoundingErrors` finds the gradients that
are nothing but rounding errors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.errors import first_line
from mprun.precision import devices
from mprun.precision.loss_scale import MasteredOptimizer, ScaledOptimizer
from mprun.precision.rounding import merge, merged, split, sums_db
from mprun.records.run_record import Float32Gradients, LostShares, Reference

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = {torch.float16: 0x7BFF, torch.bfloat16: 0x7F7F}  # The bits of the largest finite number
RULES = ("nearest", "stochastic", "kahan")


class ExactUpdate(NamedTuple):
    """One parameter's step."""

    before: Tensor  # The weights before the step, with the remainder where there is one; float64
    change: Tensor  # The change that the step adds; float64


def exact_updates(optimizer: Optimizer) -> dict[nn.Parameter, ExactUpdate]:
    """The exact update of each parameter that has a gradient by `optimizer.step()`, without a step.

    mprun's own optimizers compute in float32; so does their copy.

    Gradients that are still scaled (`optimizer.grad_scale`, as `torch.amp.GradScaler` and mprun set
    it) are divided; if `optimizer.found_inf` is set, the step is skipped and there is no update.

    Raises:
        TypeError: the step needs a closure, and so cannot be repeated.
    """
    skipped: Tensor | None = getattr(optimizer, "found_inf", None)
    if skipped is not None and skipped.item():
        return {}
    if isinstance(optimizer, MasteredOptimizer):
        with optimizer.masters_with_gradients() as parameters_of:
            exact = exact_updates(optimizer.inner)
            return {parameters_of[held]: update for held, update in exact.items()}
    ours = isinstance(optimizer, ScaledOptimizer)
    dtype = torch.float32 if ours else torch.float64
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moved = [p for p in parameters if p.grad is not None and p.is_floating_point()]
    twins = {p: _twin(p, optimizer, dtype) for p in moved}
    # A copy with the twins in place of the parameters. Parameters without a twin have no gradient,
    # so the copy does not step them.
    memo: dict[int, Any] = {id(p): twins.get(p, p) for p in parameters}
    shadow: Any = copy.deepcopy(optimizer, memo)
    if ours:
        shadow.engine = "eager"  # the same bits without compiling anything
    else:
        _widen(shadow)
    # Copies even of float64: the step changes the twins in place
    before = {p: twin.detach().to(torch.float64, copy=True) for p, twin in twins.items()}
    with own_random_numbers(parameters):
        shadow.step()
    return {
        p: ExactUpdate(before[p], twin.detach().double() - before[p]) for p, twin in twins.items()
    }


def own_random_numbers(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Random numbers drawn inside do not change the sequence outside."""
    return devices.random_numbers_kept({x.device for x in tensors if x.device.type != "meta"})


def exact_weights(p: Tensor, optimizer: Optimizer) -> Tensor:
    """The weights as an optimizer stores them, in float64: with the remainder where it has one.

    Where it has a float32 master, these are the master.
    """
    if isinstance(master := optimizer.state.get(p, {}).get("master"), Tensor):
        return master.double()
    remainder = optimizer.state.get(p, {}).get("remainder")
    wide = p.detach() if remainder is None else merged(p.detach(), remainder)
    return wide.double()


def _twin(p: nn.Parameter, optimizer: Optimizer, dtype: torch.dtype) -> nn.Parameter:
    assert p.grad is not None
    twin = nn.Parameter(exact_weights(p, optimizer).to(dtype))
    gradient = p.grad.detach().double()
    scale = getattr(optimizer, "grad_scale", None)
    twin.grad = (gradient if scale is None else gradient / scale.double()).to(dtype)
    return twin


def _widen(optimizer: Optimizer) -> None:
    """Moments in float64."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            # `step` is a count; a parameter that is a scalar has its shape
            moment = isinstance(value, Tensor) and value.shape == p.shape and name != "step"
            if moment and value.is_floating_point():
                state[name] = value.double()


@dataclass
class LostUpdates:
    """Counts over weights; sums over steps where several are added."""

    updated: int = 0
    """Weights whose update is finite and not 0, and which are finite in both formats."""
    unchanged: dict[str, float] = field(default_factory=dict)
    """`fp16.nearest` and so on to how many stay; expected numbers for stochastic rounding."""
    lost_in_run: int = 0  # How many weights the real step left unchanged, in the dtype they have

    def __add__(self, other: LostUpdates) -> LostUpdates:
        mine, others = self.unchanged, other.unchanged
        unchanged = {name: mine.get(name, 0.0) + others.get(name, 0.0) for name in mine | others}
        lost = self.lost_in_run + other.lost_in_run
        return LostUpdates(self.updated + other.updated, unchanged, lost)

    def share(self, dtype: str, rule: str) -> float | None:
        """The share of updates lost; None where there was none."""
        return self.unchanged[f"{dtype}.{rule}"] / self.updated if self.updated else None

    def shares(self) -> LostShares:
        """All shares; None where there was no update."""
        by_rule = {d: {rule: self.share(d, rule) for rule in RULES} for d in DTYPES}
        lost = self.lost_in_run / self.updated if self.updated else None
        return LostShares(self.updated, lost, **by_rule)


def lost_updates(weights: Tensor, updates: Tensor, after: Tensor | None = None) -> LostUpdates:
    """How many of `updates` each format and rule would lose.

    A 16-bit weight has neighbours at a distance, the gap (2^-10 of its size in float16, 2^-7 in
    bfloat16, both to within a factor of two). A step that moves it by u leaves it unchanged

        nearest     where |u| is below half the gap, or equal to it and the last bit is 0 (ties to
                    even); and so at every later step
        stochastic  with probability 1 - |u| / gap, between 0 and 1: what one step loses, another
                    gains. The expected number is the sum of these (to 2^-13 and 2^-16: mprun's
                    rounding has 13 and 16 random bits)
        kahan       where the weight with its remainder, together a float32 number, does not move

    An update of exactly 0 loses nothing and is not counted.

    Args:
        weights: before the step; float16, bfloat16 or float32, or float64 of such values.
        updates: the exact change by the step, of the same shape.
        after: the weights after the real step, in their own dtype; None if unknown.
    """
    weights, updates = weights.detach().double(), updates.detach().double()
    rounded = {name: weights.to(torch.float32).to(dtype) for name, dtype in DTYPES.items()}
    moves = (updates != 0) & torch.isfinite(updates)
    for w16 in rounded.values():
        moves &= torch.isfinite(w16)
    lost = LostUpdates(updated=int(moves.sum()))
    for name, w16 in rounded.items():
        half = _gap(w16, updates > 0) / 2
        size = updates.abs()
        even = _magnitude(w16) & 1 == 0
        stays = {
            "nearest": (size < half) | ((size == half) & even),
            "stochastic": (1 - size / (2 * half)).clamp(min=0),
            "kahan": _compensated_stays(weights.float(), updates, w16.dtype),
        }
        for rule, probability in stays.items():
            lost.unchanged[f"{name}.{rule}"] = float(probability.double()[moves].sum())
    if after is not None:
        lost.lost_in_run = int((after.detach().double() == weights)[moves].sum())
    return lost


def _magnitude(w16: Tensor) -> Tensor:
    """The bits without the sign, as int32."""
    return w16.view(torch.int16).int() & 0x7FFF


def _gap(w16: Tensor, upwards: Tensor) -> Tensor:
    """The distance of each number to its neighbour above or below, float64.

    The largest number's neighbour is as far as the one below it: rounding takes place as if there
    were no largest number, and what rounds beyond it overflows.
    """
    magnitude = _magnitude(w16)
    outwards = (w16 > 0) == upwards
    outwards &= magnitude < LARGEST[w16.dtype]
    step = torch.where(outwards | (magnitude == 0), 1, -1)
    neighbour = (magnitude + step).to(torch.int16).view(w16.dtype)
    return (neighbour.double() - w16.double().abs()).abs()


def _compensated_stays(weights: Tensor, updates: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a rounded weight and its remainder are those of before."""
    rounded, remainder = split(weights, dtype)
    before = merge(rounded, remainder)
    after = split((before.double() + updates).float(), dtype)
    return (after[0] == rounded) & (after[1] == remainder)


# Signal over error below which float32 does not determine a gradient: far from both kinds
LIMIT_DB = 20.0
MOVES = 3  # How often weights are moved where a model cannot be computed in float64
MOVE = 2.0**-20  # The largest change of a weight, as a share of it
# Relative difference of the losses above which the float64 pass computed something else: a model
# whose code branches on dtypes, or draws random numbers in a way that is not followed
SAME_LOSS = 1e-3
# The seed of random changes: with that of the initial weights, both would be correlated
OWN_SEED = 2**31 - 1

MOVED = "float32 with weights moved by 2^-20"
FLOAT64 = Reference("float64")

Gradients = Mapping[str, Tensor]  # Parameter name to gradient


class RoundingErrors:
    """Signal and error of float32 gradients, summed over batches or steps.

    The bias of a layer before a normalisation changes nothing: its gradient is 0, and float32 gives
    the rounding errors of sums that cancel. No format can be compared with such numbers. The
    float64 gradient of the same weights, samples and random numbers shows them:

        zero           every float32 gradient is exactly 0: a branch that is switched off
        undetermined   it is not 0, and its error is more than a tenth of the true gradient

    A meaningful gradient has about 100 dB in float32, one that cancels about -150 dB. If a model
    cannot be computed in float64, its weights are moved by about one part in a million instead:
    meaningful float32 gradients change by as little.
    """

    def __init__(self) -> None:
        self.reference = FLOAT64
        """The gradients that float32's are compared with."""
        self._signal: dict[str, float] = {}
        self._error: dict[str, float] = {}
        self._float32: dict[str, float] = {}

    def compare(
        self,
        float32: Gradients,
        loss: float,
        in_float64: Callable[[], tuple[float, Gradients]],
        moved: Callable[[float, int], Gradients],
        is_same: Callable[[float], bool] = lambda loss: False,
    ) -> None:
        """Compare the gradients of one batch with float64's, or with those of moved weights.

        Args:
            float32: the gradients.
            loss: the float32 loss.
            in_float64: computes loss and gradients in float64. After its first failure, or another
                loss than float32's, it is not called again, and `reference` says why.
            moved: computes float32 gradients of weights moved by a share, drawn from a seed.
            is_same: whether a float64 loss that is not float32's is of the same computation, so
                that float32 itself is inexact.
        """
        if self.reference is FLOAT64:
            try:
                float64, exact = in_float64()
                largest = max(abs(loss), abs(float64))
                alike = math.isfinite(largest) and abs(loss - float64) <= SAME_LOSS * largest
                differs = f"its loss is {float64:g} there and {loss:g} in float32"
                reason = "" if alike or is_same(float64) else differs
            except Exception as error:  # a model's own code may fail in float64 in any way
                reason = first_line(error)
            if not reason:
                self._add(float32, exact)
                return
            self.reference = Reference(MOVED, reason)
        # The largest error of several moves: a single one may leave a gradient as it was by chance
        self._add(float32, float32, [moved(MOVE, OWN_SEED + n) for n in range(MOVES)])

    def _add(self, float32: Gradients, exact: Gradients, others: Sequence[Gradients] = ()) -> None:
        """Add a batch; `others` would equal `exact` if nothing were rounded."""
        for name, gradient in float32.items():
            true = exact[name].double()
            errors = [power(x.double() - true) for x in (gradient, *(o[name] for o in others))]
            for sums, value in (
                (self._signal, power(true)),
                (self._error, max(errors)),
                (self._float32, power(gradient.double())),
            ):
                sums[name] = sums.get(name, 0.0) + value

    @property
    def of_float32(self) -> Float32Gradients | None:
        """How inexact all gradients of float32 are together, where that is more than `LIMIT_DB`."""
        db = sums_db(sum(self._signal.values()), sum(self._error.values()))
        if self.reference is not FLOAT64 or not db < LIMIT_DB:
            return None
        return Float32Gradients(db, max(self._error, key=self._error.__getitem__))

    @property
    def zero(self) -> tuple[str, ...]:
        """Parameters whose float32 gradient is exactly 0."""
        return tuple(name for name, energy in self._float32.items() if energy == 0)

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Parameters whose float32 gradient is rounding errors."""
        return tuple(
            name
            for name, energy in self._float32.items()
            if energy and not sums_db(self._signal[name], self._error[name]) >= LIMIT_DB
        )


def power(x: Tensor) -> float:
    """The sum of squares; infinite where a number is not finite."""
    # In float64: squares of float32 numbers beyond 1e19 or below 1e-23 leave float32's range
    norm = float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64))
    return norm * norm if math.isfinite(norm) else math.inf


def is_rounding(float32: float, exact: float) -> bool:
    """The rule for numbers of which only the powers are known, in float32 and float64.

    Rounding errors are independent of the signal, so their power is the difference.
    """
    return float32 > 0 and not sums_db(exact, abs(float32 - exact)) >= LIMIT_DB


def move_weights(parameters: Iterable[Tensor], most: float, seed: int) -> None:
    """Move each weight by a random share of itself of at most `most`."""
    # Of the CPU, so that a seed moves weights alike on every device
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            share = (torch.rand(p.shape, generator=generator) * 2 - 1) * most
            p.mul_(1 + share.to(p.device))


@contextmanager
def weights_moved(
    parameters: Sequence[Tensor], most: float, seed: int = OWN_SEED
) -> Iterator[None]:
    """Each weight is moved by a random share of itself of at most `most`, and put back after."""
    before = [p.detach().clone() for p in parameters]
    move_weights(parameters, most, seed)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
