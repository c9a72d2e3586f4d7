"""Casters: what decides an op's dtype while the model runs.

A caster gives a region. Inside it, ops cast their inputs by some rule; outside, they run in the
dtype of their inputs. The loss, the backward pass (which follows the dtypes of the forward one) and
the optimizer step are outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from mprun.precision.op_lists.lists import OpLists
from mprun.precision.op_lists.rules import Casts
from mprun.precision.op_lists.table import Table, Watcher, disable_casts, region
from mprun.precision.policy import Policy, dtype_name, torch_dtype

RegionFactory = Callable[[], AbstractContextManager[object]]
# A caster's regions for a dtype (`Caster.layer_region`)
LayerRegions = Callable[[torch.dtype], RegionFactory]


class Caster:
    """What every caster has; by itself it casts nothing."""

    columns: Mapping[str, object] = {"casting": "none"}
    """Columns of a policy that it decides, for the record."""

    def region(self) -> AbstractContextManager[object]:
        """A new region for a forward pass."""
        return nullcontext()

    def step_region(self) -> AbstractContextManager[object]:
        """Around all passes of a step: what they share is cast once."""
        return nullcontext()

    def backward(
        self, loss: Tensor, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Add the gradients of a scalar `loss`; forward code that is run again there is cast.

        `retain_graph` and `create_graph` are those of `Tensor.backward`.
        """
        loss.backward(retain_graph=retain_graph, create_graph=create_graph)

    def backward_region(self) -> AbstractContextManager[object]:
        """A new region for a backward pass: forward code that is run again there is cast."""
        return nullcontext()

    def layer_region(self, dtype: torch.dtype) -> RegionFactory:
        """Regions for a layer in a dtype of its own; float32: nothing is cast in it."""
        return nullcontext

    def end_step(self) -> None:
        """A training step's gradients are complete."""


class NoCaster(Caster):
    """Nothing is cast: ops run in the dtype of their inputs."""


class AutocastCaster(Caster):
    """PyTorch's autocast: its lists for the device decide (torch.amp, "Autocast Op Reference").

    Checkpointing enters autocast again by itself, so the backward pass needs no region. PyTorch
    forgets cast weights at the end of the outermost region: the forward pass, or, with `keep`, the
    step. Listed ops compute in `dtype`.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, keep: bool = False) -> None:
        self.columns = {"casting": "autocast", "compute_dtype": dtype_name(dtype)}
        self._device_type = device_type
        self._dtype = dtype
        self._keep = keep

    def region(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device_type, self._dtype)

    def step_region(self) -> AbstractContextManager[object]:
        if not self._keep:
            return nullcontext()
        # An outer region that casts nothing: the cache of cast weights lives until it ends
        return torch.autocast(self._device_type, enabled=False)

    def layer_region(self, dtype: torch.dtype) -> RegionFactory:
        if dtype == torch.float32:
            return disable_casts
        # Autocast's cache of weights is keyed by the weight alone: two dtypes would be mixed up.
        return partial(torch.autocast, self._device_type, dtype, cache_enabled=False)


class OpListRegion:
    """Makes regions in which op lists cast to one dtype; can be copied and pickled with a model.

    `table` is the caster's, whose cast weights the caster forgets; None for one of its own.
    """

    def __init__(
        self, lists: OpLists, dtype: torch.dtype, device_type: str, table: Table | None = None
    ) -> None:
        self._made_from = lists, dtype, device_type
        self._own = Casts() if table is None else None
        self._table = table or Table(lists, dtype, self._own, device_type)  # type: ignore[arg-type]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            with region(self._table):
                yield
        finally:
            if self._own is not None:
                self._own.forget()

    # It has nothing of the model: a copied model can share it
    def __deepcopy__(self, memo: object) -> OpListRegion:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._made_from


class OpListCaster(Caster):
    """Op lists decide, by the rules of `op_lists/rules.py`, the same on every device.

    Ops of the lower list compute in `dtype`. With `keep` cast weights are kept until `end_step`,
    for steps of several forward passes. The watcher is called for each op and each cast.
    """

    def __init__(
        self,
        lists: OpLists,
        dtype: torch.dtype,
        device_type: str = "cpu",
        keep: bool = False,
        watcher: Watcher | None = None,
    ) -> None:
        self.columns = {"casting": "op_lists", "compute_dtype": dtype_name(dtype)}
        self._casts = Casts()
        self._lists, self._device_type = lists, device_type
        self._keep = keep
        self._depth = 0
        self._make = partial(
            Table, lists, casts=self._casts, device_type=device_type, watcher=watcher
        )
        self._tables = {dtype: self._make(dtype=dtype)}
        self._table = self._tables[dtype]

    @contextmanager
    def region(self) -> Iterator[None]:
        """A new region; inside another one it holds instead of that one."""
        self._depth += 1
        try:
            with region(self._table):
                yield
        finally:
            self._depth -= 1
            # Without gradients no training step, and so no `end_step`, will drop the copies
            if not self._depth and not (self._keep and torch.is_grad_enabled()):
                self._casts.forget()

    def backward(
        self, loss: Tensor, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        gradient = torch.ones_like(loss, memory_format=torch.preserve_format)
        with self.backward_region():
            torch.autograd.backward(loss, gradient, retain_graph, create_graph)

    def backward_region(self) -> AbstractContextManager[object]:
        return self.region()

    def layer_region(self, dtype: torch.dtype) -> RegionFactory:
        if dtype == torch.float32:
            return disable_casts
        if dtype not in self._tables:
            self._tables[dtype] = self._make(dtype=dtype)
        return OpListRegion(self._lists, dtype, self._device_type, self._tables[dtype])

    def end_step(self) -> None:
        self._casts.forget()


def caster_of(
    policy: Policy,
    device_type: str,
    lists: OpLists | None = None,
    keep: bool = False,
    watcher: Watcher | None = None,
) -> Caster:
    """The caster that carries out `policy.casting`; op lists where `lists` are given.

    `keep`: cast weights are kept for all passes of a step.
    """
    dtype = torch_dtype(policy.compute_dtype)
    if lists is not None:
        return OpListCaster(lists, dtype, device_type, keep, watcher)
    if policy.casting == "autocast":
        return AutocastCaster(device_type, dtype, keep)
    return NoCaster()
