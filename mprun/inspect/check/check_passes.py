"""Passes of a mode, of float32 and of float64 from the same weights, for the checks of a step.

A pass is a forward and a backward pass without dropout. It gives the loss and the unscaled
gradients. The mode's passes may round stochastically at the places where it rounds, and float32's
may have weights that are moved at random, so that repeated passes show what roundings do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from mprun.errors import definition
from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.checked_mode import CheckedMode
from mprun.inspect.divergence.boundaries import exact_arithmetic
from mprun.inspect.passes import ready
from mprun.precision import Arithmetic
from mprun.precision.policy import torch_dtype
from mprun.study.planned_run import PolicyProbe
from mprun.train.data import Batch
from mprun.watch.updates import weights_moved

LOSS = ""  # In place of a parameter's name
LOWER = 16.0  # By which a loss scale that overflows is divided: four passes from 2^16 to 1
Figures = Mapping[str, Tensor]  # Gradients by parameter, and the loss under `LOSS`; float64
# Made of the model that computes, with the first weights in it
Region = Callable[[nn.Module], AbstractContextManager[object]]


class StepPasses:
    """Passes from the first weights of a mode."""

    def __init__(self, mode: CheckedMode) -> None:
        parts = mode.trainer().parts
        self.mode, self.model, policy = mode, parts.model, mode.plan.policy
        self.dtype = torch_dtype(policy.compute_dtype)
        low = self.dtype in (torch.float16, torch.bfloat16)
        self.is_16_bit = low and policy.gemms == "none"
        self._first_scale = parts.precision.loss_scale.tensor
        self._exact = mode.probe(exact=True)
        # other modes are judged by their modules alone
        self._low = mode.probe() if self.is_16_bit else self._exact

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
        """A pass in the mode.

        Args:
            n: the number of the batch.
            scale: the loss scale.
            arithmetic: computes the ops; None: the mode's own.
            seed: of the random numbers that the model draws.
        """
        regions = list[Region]()
        if arithmetic is not None:
            arithmetic.begin_step(1)  # the step is a part of the seed of its roundings
            regions.append(partial(_region, arithmetic))
        return self._pass(self._low, self.mode.batches[n], *regions, scale=scale, seed=seed)

    def exact(
        self, n: int = 0, *regions: Region, scale: float = 1.0, seed: int = 0, rounded: bool = False
    ) -> Figures:
        """A pass in float32, in these regions; `rounded`: with the mode's inputs."""
        batch = (self.mode.batches if rounded else self.mode.exact_batches)[n]
        return self._pass(self._exact, batch, *regions, scale=scale, seed=seed)

    def moved(self, seed: int) -> Region:
        """A region with weights that are moved at random by up to half a unit of the mode."""
        most = torch.finfo(self.dtype).eps / 2  # by which rounding moves a number at most
        return lambda model: weights_moved(list(model.parameters()), most, seed)

    def in_float64(self, move: Figures | None = None) -> Figures:
        """A pass on the first batch, without the casts that the code asks for.

        Args:
            move: is added to the weights, by name.
        """

        @contextmanager
        def moved(model: nn.Module) -> Iterator[None]:
            named = dict(model.named_parameters())
            for name, change in (move or {}).items():
                named[name].data += change  # those of `exact_arithmetic`, which it discards
            yield

        return self.exact(0, exact_arithmetic, moved)

    def _pass(
        self, probe: PolicyProbe, batch: Batch, *regions: Region, scale: float, seed: int
    ) -> Figures:
        ready_region: Region = partial(ready, seed=seed)

        @contextmanager
        def inside(model: nn.Module) -> Iterator[None]:
            with ExitStack() as stack:
                for region in (ready_region, *regions):
                    stack.enter_context(region(model))
                yield

        gradients = probe.gradients(self.model, batch, scale, inside=inside)
        return {LOSS: torch.tensor(probe.loss, dtype=torch.float64), **gradients}

    def finding(self, kind: str, name: str, text: str, at: float = 0.0) -> Finding:
        """A finding about a parameter, or about `LOSS`."""
        module = name.rpartition(".")[0]
        return Finding(kind, module, text, line=line_of(self.model, module), at=at)


def _region(arithmetic: Arithmetic, _: nn.Module) -> AbstractContextManager[object]:
    return arithmetic.region()


def is_finite(figures: Figures) -> bool:
    """Whether all numbers are."""
    return all(bool(x.isfinite().all()) for x in figures.values())


def line_of(model: nn.Module, module: str) -> str:
    """Where the forward of a module begins, or of the next one around it that is the user's."""
    path = module
    while True:
        place = definition(type(model.get_submodule(path)).forward)
        if place is not None or not path:
            return "" if place is None else str(place)
        path = path.rpartition(".")[0]
