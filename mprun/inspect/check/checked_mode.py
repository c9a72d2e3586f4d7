"""A mode that is checked: its plan, float32's, and the steps of both that all checks share.

*Passes*: forward and backward from the first weights, without dropout. The mode's may round
stochastically where it rounds, and float32's may have weights that are moved at random.

*Curves*: the losses of short trainings on a few batches again and again.

The batches are the first samples of the training data, in the stored order, the same in all modes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mprun.errors import definition
from mprun.inspect.check.check_result import CheckSettings, Finding, ModeChecks
from mprun.inspect.divergence.boundaries import exact_arithmetic
from mprun.inspect.passes import ready
from mprun.inspect.rounding_oracle import COARSEST, half_step
from mprun.precision import Arithmetic
from mprun.precision.nested import all_tensors, map_tensors
from mprun.precision.policy import torch_dtype
from mprun.study.planned_run import PlannedRun, PolicyProbe
from mprun.train.assemble import Plan, step_memory
from mprun.train.assemble.parts import build_batches, build_parts
from mprun.train.data import Batch, MicroBatch
from mprun.train.data.random_numbers import seed_all, untouched
from mprun.train.init_from import Weights
from mprun.train.loop import Trainer
from mprun.watch.memory_recorder import StepMemory
from mprun.watch.updates import OWN_SEED, move_weights, weights_moved

T = TypeVar("T")
# Different batches of the steps that are trained: few, so that each is visited several times and
# its losses can be compared
BATCHES = 4
FEW_SAMPLES = 16  # Of a batch on which each module runs eight times, mostly in float64
LOSS = ""  # In place of a parameter's name
LOWER = 16.0  # By which a loss scale that overflows is divided: four passes from 2^16 to 1
SKIPS = 40  # How often a step may be skipped: from 2^16 the loss scale falls to 2^-14 by 30 of them
Figures = Mapping[str, Tensor]  # Gradients by parameter, and the loss under `LOSS`; float64
# Made of the model that computes, with the first weights in it
Region = Callable[[nn.Module], AbstractContextManager[object]]


@dataclass
class CheckedMode:
    """One mode of a check; the functions of `check_*.py` look at it."""

    planned: PlannedRun
    exact: Plan  # The same recipe in float32
    settings: CheckSettings
    checks: ModeChecks
    shared: dict[Any, Any] = field(default_factory=dict)
    """What was computed once, for all modes with the same float32."""
    ends: float = math.inf  # When the mode's share of the budget is used up, by `time.monotonic`

    @property
    def left_s(self) -> float:
        """Seconds of its share that are left."""
        return self.ends - time.monotonic()

    @property
    def plan(self) -> Plan:
        """The mode's plan."""
        return self.planned.plan

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """What is the same for all modes with the same float32."""
        if name not in self.shared:
            self.shared[name] = compute()
        result: T = self.shared[name]
        return result

    @cached_property
    def batches(self) -> list[Batch]:
        """`BATCHES` batches, or as many as there are, in the mode's input dtype."""
        return batches_of(self.plan, self.settings.samples)

    @cached_property
    def exact_batches(self) -> list[Batch]:
        """The same in float32."""
        return batches_of(self.exact, self.settings.samples)

    @cached_property
    def few_samples(self) -> tuple[list[Batch], list[Batch]]:
        """Small batches in the mode's dtype and in float32: modules run on them many times."""
        own, exact = (batches_of(plan, FEW_SAMPLES) for plan in (self.plan, self.exact))
        return own, exact

    @cached_property
    def memory(self) -> StepMemory:
        """The memory of a step, counted on fake tensors where the model allows it."""
        with untouched():  # its model draws weights, which must not change those of the mode
            return step_memory(self.plan)

    def trainer(self, exact: bool = False) -> Trainer:
        """A new training of the mode, or of float32, at its start: take steps on `batches`."""
        plan = self.exact if exact else self.plan
        return Trainer(build_parts(plan), plan.limits)

    @property
    def float32_model(self) -> nn.Module:
        """The run's model in float32 with its first weights."""
        return self.once("model", lambda: self.trainer(exact=True).parts.model)

    @property
    def float32_probe(self) -> PolicyProbe:
        """Takes passes in float32."""
        return self.once("probe", lambda: PolicyProbe(self.exact, self.exact.policy))

    def float32_step(self, batch: Batch, *regions: Region) -> Figures:
        """The run's first step in float32, in these regions; dropout draws what the run draws."""
        return taken(self.float32_probe, self.float32_model, batch, *regions)

    @cached_property
    def passes(self) -> StepPasses:
        """Passes from the first weights of the mode."""
        return StepPasses(self)

    def losses(
        self, steps: int, number: int = 0, exact: bool = False, most: float = COARSEST
    ) -> list[float]:
        """The losses of a curve's first steps (see `Curve`); known ones are not computed again."""
        known: list[float] = self.shared.get(_curve_key(self, number, exact, most), [])
        is_enough = len(known) >= steps or not all(map(math.isfinite, known))
        return known[:steps] if is_enough else Curve(self, number, exact, most).until(steps)


def batches_of(plan: Plan, at_most: int) -> list[Batch]:
    """The first batches of the training data, in the stored order."""
    size = min(plan.batch.micro, at_most)
    batches, order = build_batches(plan, plan.splits.train, size, size, shuffle=False)
    with closing(iter(batches.epoch(order.draw()))) as stream:  # ends loader processes at once
        return list(islice(stream, BATCHES))


# ---- passes --------------------------------------------------------------------------------------


class StepPasses:
    """Passes from the first weights of a mode."""

    def __init__(self, mode: CheckedMode) -> None:
        parts = mode.trainer().parts
        self.mode, self.model, policy = mode, parts.model, mode.plan.policy
        self.dtype = torch_dtype(policy.compute_dtype)
        low = self.dtype in (torch.float16, torch.bfloat16)
        self.is_16_bit = low and policy.gemms == "none"
        self._first_scale = parts.precision.loss_scale.tensor
        # other modes are judged by their modules alone
        self._low = PolicyProbe(mode.plan, policy) if self.is_16_bit else mode.float32_probe

    @property
    def is_scaled(self) -> bool:
        """Whether the mode has a loss scale."""
        return self._first_scale is not None

    @cached_property
    def scale(self) -> float:
        """The mode's loss scale, or the next one below that does not overflow; 1 without one."""
        scale = 1.0 if self._first_scale is None else float(self._first_scale)
        while scale > 1 and not is_finite(self.low(scale=scale)):
            scale /= LOWER
        return max(scale, 1.0)

    def low(
        self, n: int = 0, scale: float = 1.0, arithmetic: Arithmetic | None = None, seed: int = 0
    ) -> Figures:
        """A pass in the mode, on batch `n`; `arithmetic`: in place of the mode's own."""
        regions: list[Region] = [partial(ready, seed=seed)]
        if arithmetic is not None:
            arithmetic.begin_step(1)  # the step is a part of the seed of its roundings
            regions.append(lambda _: arithmetic.region())
        return taken(self._low, self.model, self.mode.batches[n], *regions, scale=scale)

    def exact(
        self, n: int = 0, *regions: Region, scale: float = 1.0, seed: int = 0, rounded: bool = False
    ) -> Figures:
        """A pass in float32, in these regions; `rounded`: with the mode's inputs."""
        batch = (self.mode.batches if rounded else self.mode.exact_batches)[n]
        regions = (partial(ready, seed=seed), *regions)
        return taken(self.mode.float32_probe, self.model, batch, *regions, scale=scale)

    def moved(self, seed: int) -> Region:
        """A region with weights that are moved by up to half a unit of the mode."""
        most = half_step(self.dtype)
        return lambda model: weights_moved(list(model.parameters()), most, seed)

    def in_float64(self, scale: float = 1.0) -> Figures:
        """A pass without the casts that the code asks for."""
        return self.exact(0, exact_arithmetic, scale=scale)

    def finding(self, kind: str, name: str, text: str, at: float = 0.0) -> Finding:
        """A finding about a parameter, or about `LOSS`."""
        module = name.rpartition(".")[0]
        return Finding(kind, module, text, line=self.line_of(module), at=at)

    def line_of(self, module: str) -> str:
        """Where the forward of a module begins, or of the next one around it that is the user's."""
        place = definition(type(self.model.get_submodule(module)).forward)
        if place is not None or not module:
            return "" if place is None else str(place)
        return self.line_of(module.rpartition(".")[0])


def taken(
    probe: PolicyProbe, model: nn.Module, batch: Batch, *regions: Region, scale: float = 1.0
) -> Figures:
    """A pass of a probe from the weights of `model`, in these regions."""

    @contextmanager
    def inside(own: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for region in regions:
                stack.enter_context(region(own))
            yield

    gradients = probe.gradients(model, batch, scale, inside=inside)
    return {LOSS: torch.tensor(probe.loss, dtype=torch.float64), **gradients}


def is_finite(figures: Figures) -> bool:
    """Whether all numbers are."""
    return all(bool(x.isfinite().all()) for x in figures.values())


# ---- curves --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MovedWeights(Weights):
    """First weights that are moved at random by up to a share of themselves."""

    inner: Weights
    most: float
    seed: int

    def load_into(self, model: nn.Module) -> None:
        self.inner.load_into(model)
        move_weights([*model.parameters()], self.most, self.seed)


@torch.no_grad()  # a model may ask for gradients of its inputs: moved ones must have no graph
def with_moved_inputs(
    batches: Sequence[Batch], exact: Sequence[Batch], most: float, seed: int
) -> list[Batch]:
    """The batches with inputs that are moved at random by up to a share of themselves.

    They are made of those in float32. A number stays between the whole numbers around it: labels,
    masks and probabilities stay what they are.
    """
    generator = torch.Generator().manual_seed(seed)

    def moved(own: MicroBatch, wide: MicroBatch) -> MicroBatch:
        given = iter(all_tensors(wide.inputs))

        def one(x: Tensor) -> Tensor:
            value = next(given)
            if not value.is_floating_point() or value.layout != torch.strided:
                return x
            share = (torch.rand(value.shape, generator=generator) * 2 - 1) * most
            near = value * (1 + share.to(value.device))
            return torch.empty_like(x).copy_(near.clamp(value.floor(), value.ceil()))

        return own._replace(inputs=map_tensors(one, own.inputs))

    return [
        own._replace(parts=tuple(map(moved, own.parts, wide.parts)))
        for own, wide in zip(batches, exact, strict=True)
    ]


def _curve_key(mode: CheckedMode, number: int, exact: bool, most: float) -> tuple[object, ...]:
    return id(mode.exact if exact else mode.plan), number, number and most


class Curve:
    """The losses of a training that can go on; it ends at one that is not finite.

    Start 0 is the run's own. Others have other random numbers, and first weights and inputs that
    are moved by up to the share `most`.
    """

    def __init__(
        self,
        mode: CheckedMode,
        number: int = 0,
        exact: bool = False,
        most: float = COARSEST,
        moves_inputs: bool = True,
    ) -> None:
        plan = mode.exact if exact else mode.plan
        self._batches = mode.exact_batches if exact else mode.batches
        if number:
            seed = OWN_SEED - number  # other random numbers than the run's own seeds draw
            moved = MovedWeights({}, (), frozenset(), plan.weights, most, seed)
            plan = replace(plan, weights=moved)
            # the same inputs in all pairs would be rounded alike: their few samples move the mean
            if moves_inputs:
                self._batches = with_moved_inputs(self._batches, mode.exact_batches, most, seed)
        self._plan, self._seed = plan, plan.config.seed + number * 2**16  # a seed a step
        with untouched():
            self.trainer = Trainer(build_parts(plan), plan.limits)
        self.losses: list[float] = []
        self.step_s = 0.0
        """Seconds of the last step."""
        if moves_inputs:
            mode.shared[_curve_key(mode, number, exact, most)] = self.losses

    @property
    def is_finite(self) -> bool:
        """Whether it can go on."""
        return all(map(math.isfinite, self.losses))

    def until(self, steps: int) -> list[float]:
        """The losses of the first steps, or up to one that is not finite."""
        with untouched(), self._plan.backend_flags():
            while len(self.losses) < steps and self.is_finite:
                began = time.monotonic()
                self.losses.append(self.step())
                self.step_s = time.monotonic() - began
        return self.losses[:steps]

    def step(self) -> float:
        """Take the next step; if it is skipped, the loss scale falls: again, as float32 skips none.

        The loss is NaN where no loss scale gives finite gradients.
        """
        trainer, number = self.trainer, len(self.losses)
        batch = self._batches[number % len(self._batches)].trained
        trainer.parts.model.train()
        for _ in range(SKIPS):
            seed_all(self._seed + number)
            result = trainer.optimizer_step(batch)
            trainer.step += 1
            loss = float(result.loss)
            if not (result.skipped is not None and bool(result.skipped) and math.isfinite(loss)):
                return loss
        return math.nan
