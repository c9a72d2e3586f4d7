"""The optimizer step with parameters and moments in 16 bits.

Rounding to nearest drops an update that is below half the distance to the parameter's neighbour, so
a 16-bit parameter with small updates never changes. Here a step is computed in float32 from the
stored values. Its result is rounded once, when it is written, by one of four rules:

    stochastic  to either neighbour, so that the mean is exact: small updates survive on average
    kahan       to the nearest, with the remainder in 16 more bits (SGD's steps are then bit for bit
                those of float32 parameters; 4 bytes a parameter, as many as a float32 one)
    split       to the nearest, with the remainder in 8 more bits: together a master of 24 bits,
                which is rounded stochastically (3 bytes a parameter)
    nearest     to the nearest

Gradients may be scaled: `step` divides them by `grad_scale`, in float32 and in the same pass, as
PyTorch's fused optimizers do. So `torch.amp.GradScaler` works with float16 parameters too, except
for its `unscale_`. `scaled_step` also checks them for infinities and clips them.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

from mprun.optim import engines, formulas
from mprun.optim.engines import ENGINES, Operands, Row, Step, TensorList
from mprun.optim.formulas import HYPERS, Storage
from mprun.optim.state import (
    DTYPES,
    check_operands,
    check_saved,
    clipping_scale,
    complete_state,
    loaded_entries,
    not_finite,
    scale_name,
    second_name,
)
from mprun.precision import devices
from mprun.precision._torch import (
    EagerOptimizer,
    is_fake,
    load_hooks_run,
    write_count,
    zero_grad,
)
from mprun.precision.loss_scale import ALONE, Combine, ScaledOptimizer, device_of_gradients
from mprun.precision.random_bits import NAME, START, shared, tensor_number
from mprun.precision.rounding import OVERFLOWS
from mprun.records.policy_columns import COMPENSATED, ROUNDINGS

MOMENT_DTYPES = (*DTYPES, formulas.DTYPE)


class StorageOptions(TypedDict, total=False):
    """How an optimizer stores parameters and state: the options that all of them share."""

    rounding: str  # stochastic (the default), kahan, split or nearest; of parameters in 16 bits
    momentum_dtype: torch.dtype
    """Of the stored first moment; float32 unless given.

    In float16 AdamW's is stored times 64, so it is at most 1023.5: see `formulas.SCALE`. uint8
    stores codes of 8 bits and a scale for 256 numbers: see `formulas`. Tensors of fewer than 4096
    numbers then keep float32.
    """
    variance_dtype: torch.dtype
    """Of the stored second moment; float32 unless given.

    In 16 or 8 bits its square root is stored, in float16 64 times the root. Roots below 2^-30
    (9e-10) are then mostly 0, and the update is divided by eps alone. With gradients of 1e-10
    AdamW's updates are 30 to 34 times too large for eps=1e-15, up to 46 times for eps=0, and right
    for eps=1e-8.
    """
    overflow: str  # infinity (the default), or saturate at the largest finite number
    seed: int
    """Of the random bits; 0 unless given.

    The bits also depend on a parameter's name: the one that `mprun.optim.name_parameters` gave
    (`Precision.prepare` calls it), else the one in `params` if that is `model.named_parameters()`.
    Local shards (FSDP2) get theirs, and their place in the whole, from `mprun.optim.mark_shard`.
    Without names they depend on the position among the optimizer's parameters: give two such
    optimizers two seeds.
    """
    engine: str | None
    """c, triton or eager; None (the default) for the fastest one.

    A named engine has no substitute: with c and no kernels the step fails.
    """


class _Update(NamedTuple):
    """The update of one parameter."""

    p: Tensor
    group: int
    number: int  # Of its random bits
    start: int  # The index of its first element, of a shard in the whole
    state: dict[str, Tensor]
    storage: Storage
    engine: str
    entries: Sequence[str | None]  # Of `state`, in the order of `Operands`

    @property
    def tensors(self) -> list[Tensor | None]:
        """Those of `Operands`."""
        return [self.p.detach(), *(None if x is None else self.state[x] for x in self.entries)]

    def row(self, place: int, flat: Sequence[Tensor | None]) -> Row:
        """Of a list, with `tensors` in one piece each."""
        return Row(place, Operands(*flat), self.number, self.start)  # type: ignore[arg-type]


@dataclass
class _Part:
    """The parameters on one device that have a gradient, and how a step updates them."""

    updates: list[_Update]
    on_host: bool  # Whether numbers can be read at once
    steps: Tensor  # [updates]; `step` in the state of each is a view of it
    lists: list[TensorList]
    groups: dict[int, slice]  # The updates of each
    strided: list[int]  # Updates with a tensor that is not in one piece: they are copied at a step
    version: int = -1  # Of `steps` when `taken` was true; -1: it is not known
    taken: list[tuple[int, float]] = field(default_factory=list)  # Groups, and attempts taken
    index: Tensor = field(default_factory=lambda: torch.empty(0))  # Of `taken`, for each update

    def read(self) -> None:
        """Read the attempts that were taken, where another has written them since."""
        if write_count(self.steps) != self.version:
            own = [(u.group, x) for u, x in zip(self.updates, self.steps.tolist(), strict=True)]
            self.taken = list(dict.fromkeys(own))
            self.index = torch.tensor([self.taken.index(x) for x in own])

    def count(self) -> None:
        """Count one more."""
        self.steps.add_(1)
        self.taken = [(group, taken + 1) for group, taken in self.taken]
        self.version = write_count(self.steps)


MOST_PLANS = 16  # Sets of parameters that have gradients, such as those of parts of a backward pass


@dataclass(frozen=True)
class _StepPlan:
    """What the steps have in common while nothing changes but gradients and constants."""

    seen: list[Any]
    parts: list[_Part]


class GradScaledOptimizer(EagerOptimizer, ScaledOptimizer):
    """An optimizer whose step takes the gradients of a scaled loss, as PyTorch's fused ones do."""

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to `step`

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """The gradients of the step, without empty ones."""

    @abstractmethod
    def _step(self, scale: Tensor | None, skip: Tensor | None) -> None:
        """One step on gradients times `scale`, unless `skip` is 1."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as `torch.amp.GradScaler` calls it.

        Gradients are divided by `self.grad_scale`, a scalar tensor, if it is set. If
        `self.found_inf` is set and not 0, the step is skipped.

        Args:
            closure: computes the loss anew.

        Returns:
            The result of `closure`.

        Raises:
            RuntimeError: a sparse gradient.
            TypeError: a dtype or a kind of tensor that is not taken.
            ValueError: gradient or state differ from the parameter in shape, or engine c was named
                and the parameter is not on the CPU.
            NoKernelsError: engine c was named and there are no compiled kernels.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return loss

    @torch.no_grad()
    def scaled_step(
        self,
        scale: Tensor | None,
        max_norm: float | None = None,
        overflow: Tensor | None = None,
        combine: Combine = ALONE,
    ) -> Tensor | None:
        """A step on gradients of a scaled loss: unscale, check, clip, update, all in float32.

        Args:
            scale: what the loss was multiplied by, a float32 scalar on the device; None for 1, and
                for steps that are always taken.
            max_norm: clip the unscaled gradients' global L2 norm to this.
            overflow: 1 skips the step, 0 takes it. None: the gradients are checked here, unless
                `scale` is None.
            combine: what processes with shards agree on norm and overflows by.

        Returns:
            1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar;
            None where `scale` and `overflow` are None.
        """
        is_checked = overflow is None and scale is not None
        gradients = self._gradients() if is_checked or max_norm is not None else []
        if is_checked:
            assert scale is not None
            overflow = not_finite(gradients, scale.device, combine)
        self.grad_scale, self.found_inf = scale, overflow
        if max_norm is not None:
            device = device_of_gradients(self)
            self.grad_scale = clipping_scale(gradients, scale, max_norm, device, combine)
        try:
            self.step()
        finally:
            del self.grad_scale, self.found_inf
        return overflow


class LowPrecisionOptimizer(GradScaledOptimizer):
    """The base: `class Lion(LowPrecisionOptimizer)` gives its formula, moments and constants.

    Args:
        params: as for any optimizer, in float32, float16 or bfloat16; each stays in its dtype.
        defaults: the subclass's options.
        rounding, momentum_dtype, variance_dtype, overflow, seed, engine: see `StorageOptions`.

    Raises:
        ValueError: an option that is none of those.
    """

    first: ClassVar[str]
    """The name of the first moment in `state`."""
    second: ClassVar[str | None] = None
    """The name of the second moment; None without one."""
    engine: str | None = None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        rounding: str = "stochastic",
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.float32,
        overflow: str = "infinity",
        seed: int = 0,
        engine: str | None = None,
    ) -> None:
        check_option("engine", engine, (None, *ENGINES))
        defaults |= {
            "rounding": rounding,
            "momentum_dtype": momentum_dtype,
            "variance_dtype": variance_dtype,
            "overflow": overflow,
            "seed": seed,
            "attempts": 0,
        }
        self.engine = engine
        self._plans: dict[tuple[bool, ...], _StepPlan] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `param_group`, parameters with options; raises `ValueError` as the constructor."""
        # First, because PyTorch fills in the options that the group lacks
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_options(self, group: dict[str, Any]) -> None:
        check_option("rounding", group["rounding"], ROUNDINGS)
        check_option("momentum_dtype", group["momentum_dtype"], MOMENT_DTYPES)
        check_option("variance_dtype", group["variance_dtype"], MOMENT_DTYPES)
        check_option("overflow", group["overflow"], OVERFLOWS)
        if self.second is None and group["variance_dtype"] != torch.float32:
            raise ValueError(f"variance_dtype: {type(self).__name__} keeps no second moment")
        if group["rounding"] in COMPENSATED and group["overflow"] == "saturate":
            given = f"overflow='saturate' with rounding={group['rounding']!r}"
            raise ValueError(f"{given}; legal is 'infinity'")
        for name, value in group.items():
            if isinstance(value, float | int) and value < 0:
                raise ValueError(f"{name}={value}; legal is 0 or more")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "engine": self.engine, "_plans": {}}

    @abstractmethod
    def formula_of(self, group: dict[str, Any]) -> str:
        """The formula of a group, a key of `FORMULAS`."""

    @abstractmethod
    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        """The constants of the formula of `group` but the first; `step` counts from 1."""

    def keeps_first(self, group: dict[str, Any]) -> bool:
        """Whether the first moment of `group` is stored between steps."""
        return bool(group.get("momentum", True))

    zero_grad = zero_grad

    def _gradients(self) -> list[Tensor]:
        gradients = []
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                check_operands(p, p.grad, type(self).__name__)
                gradients.append(p.grad)
        return [g for g in gradients if g.numel()]

    def _step(self, scale: Tensor | None, skip: Tensor | None) -> None:
        given = tuple([p.grad is None for group in self.param_groups for p in group["params"]])
        plan = self._plans.get(given)
        if plan is None or plan.seen != self._seen():
            parts = self._parts()
            is_real = not any(is_fake(u.p) for part in parts for u in part.updates)
            plan = _StepPlan(self._seen() if is_real else [], parts)
            if len(self._plans) == MOST_PLANS:
                self._plans.clear()
            self._plans[given] = plan
        for group in self.param_groups:
            # Skipped steps count too: it numbers random bits alone, and no device has to be asked
            group["attempts"] += 1
        for part in plan.parts:
            if not part.on_host:
                self._run(part, scale, skip)
            elif skip is None or not skip.item():
                self._run(part, scale, None)

    def _seen(self) -> list[Any]:
        """All that a plan depends on: some calls of C for each parameter, and none of Python."""
        groups = self.param_groups
        params = [p for group in groups for p in group["params"]]
        gradients = [p.grad for p in params]
        held = [x for state in self.state.values() for x in state.values()]
        entries = [x for x in held if isinstance(x, Tensor)]
        if params and is_fake(params[0]):
            return [object()]
        return [
            self.engine,
            [
                (*_options(group), self.formula_of(group), self.keeps_first(group))
                for group in groups
            ],
            [len(group["params"]) for group in groups],
            [(id(p), p.data_ptr(), p.numel(), p.dtype, p.is_contiguous()) for p in params],
            [(getattr(p, NAME, None), getattr(p, START, 0)) for p in params],
            [
                g is None
                or (g.layout, g.layout == torch.strided and (g.numel(), g.dtype, g.is_contiguous()))
                for g in gradients
            ],
            [(id(x), x.data_ptr()) for x in entries],
        ]

    def _parts(self) -> list[_Part]:
        """What a step updates; all of it is checked before any of it changes."""
        updates, position = [], 0
        for number, group in enumerate(self.param_groups):
            for p, given in zip(group["params"], _given_names(group), strict=True):
                if p.grad is not None:
                    updates.append(self._update(p, number, given, position))
                position += 1
        devices_of = dict.fromkeys(u.p.device for u in updates)
        return [_part([u for u in updates if u.p.device == device]) for device in devices_of]

    def _update(self, p: Tensor, number: int, given: str | None, position: int) -> _Update:
        group, state = self.param_groups[number], self.state[p]
        name, start = getattr(p, NAME, given), getattr(p, START, 0)
        storage = self._storage(p, group)
        if start and storage.coded:
            raise ValueError(NO_SHARDS)
        complete_state(state, p, storage, self.first, self.second)
        first, second = self.first, second_name(self.second, storage)
        coded = formulas.DTYPE
        entries = [
            first if storage.first else None,
            second if storage.second else None,
            "remainder" if storage.remainder else None,
            scale_name(first) if storage.first == coded else None,
            scale_name(second) if storage.second == coded else None,
        ]
        bits = position if name is None else tensor_number(name)
        return _Update(p, number, bits, start, state, storage, self._engine(p, storage), entries)

    def _storage(self, p: Tensor, group: dict[str, Any]) -> Storage:
        assert p.grad is not None
        check_operands(p, p.grad, type(self).__name__)
        return _storage(
            self.formula_of(group),
            p.dtype,
            p.grad.dtype,
            kept_in(group["momentum_dtype"], p) if self.keeps_first(group) else None,
            None if self.second is None else kept_in(group["variance_dtype"], p),
            group["rounding"],
            group["overflow"] == "saturate",
        )

    def _run(self, part: _Part, scale: Tensor | None, skip: Tensor | None) -> None:
        """Update the parameters of a part and their state."""
        updates, is_real = part.updates, not is_fake(part.steps)
        factor = None if scale is None else scale.reciprocal().float()
        if part.on_host or (is_real and scale is None and skip is None):
            part.read()
            part.count()
            hypers = self._on_host(part, factor)
        else:
            part.steps.add_(1.0 if skip is None else 1 - skip)
            hypers = self._on_device(part, factor)
        states = [shared(group["seed"], group["attempts"]) for group in self.param_groups]
        gradients: list[Any] = [u.p.grad for u in updates]
        pieces = {}
        for i in part.strided:
            gradients[i] = gradients[i].contiguous()
            pieces[i] = [x if x is None else x.contiguous() for x in updates[i].tensors]
        step = Step(gradients, hypers, [states[u.group] for u in updates], skip)
        for tensors in [*part.lists, *_lists(updates, pieces)]:
            if is_real or tensors.engine == "eager":  # nothing else allocates
                engines.run(tensors, step)
        if is_real:  # written to behind autograd's back
            torch.autograd.graph.increment_version([u.p for u in updates if u.engine != "eager"])
        for i, whole in pieces.items():
            for tensor, updated in zip(updates[i].tensors, whole, strict=True):
                if tensor is not None and updated is not None and not tensor.is_contiguous():
                    tensor.copy_(updated)

    def _engine(self, p: Tensor, storage: Storage) -> str:
        legal, other = ("'c', 'eager'", "triton") if p.is_cpu else ("'triton', 'eager'", "c")
        is_interpreted = other == "triton" and os.environ.get("TRITON_INTERPRET")
        if self.engine == other and not is_interpreted:
            raise ValueError(
                f"engine={other!r} for a parameter on {p.device}; legal there: None, {legal}"
            )
        return self.engine or engines.fastest(p.device, storage.formula)

    def _on_host(self, part: _Part, factor: Tensor | None) -> Tensor:
        """The formula's constants of each update, computed in float64; float32 [.., HYPERS]."""
        first, rows = 1.0 if factor is None else factor.item(), []
        for group, taken in part.taken:
            values = [first, *self.hyper(self.param_groups[group], taken)]
            rows.append([*values, *[0.0] * (HYPERS - len(values))])
        hypers = torch.tensor(rows, dtype=torch.float32).index_select(0, part.index)
        return engines.sent(hypers, part.steps.device)

    def _on_device(self, part: _Part, factor: Tensor | None) -> Tensor:
        """The same without waiting for the device.

        The steps of a group's parameters are one vector: the number of kernels does not grow with
        that of the parameters. Python's numbers travel in kernels' arguments, where a copy of them
        to the device would wait.
        """
        # In float64 where there is one: in float32 `1 - beta2**step` has few digits at first
        steps = devices.wide(part.steps)
        hypers = steps.new_zeros(len(steps), HYPERS)
        for group, own in part.groups.items():
            values = self.hyper(self.param_groups[group], steps[own])
            constants = [1.0 if factor is None else factor, *values]
            for column, x in zip(hypers[own].unbind(1), constants, strict=False):
                column.copy_(x) if isinstance(x, Tensor) else column.fill_(x)
        return hypers.float()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict`, this optimizer's or that of its namesake in `torch.optim`.

        Moments have their saved dtype until the next step, which converts them to that of the
        options (PyTorch's own method would cast them to the parameter's). Options that `state_dict`
        does not have are not changed.

        Raises:
            ValueError: groups or parameters are not as many, or an option of `torch.optim` changes
                the formula.
        """
        self._plans.clear()  # they would keep the state of before
        with load_hooks_run(self, state_dict) as state_dict:
            check_saved(state_dict)
            before = [dict(group) for group in self.param_groups]
            # A hook, and the first one, so that the other hooks get the whole state.
            whole = self.register_load_state_dict_post_hook(
                lambda _: self._make_whole(state_dict, before), prepend=True
            )
            try:
                super().load_state_dict(state_dict)
            finally:
                whole.remove()

    def _make_whole(self, state_dict: dict[str, Any], before: list[dict[str, Any]]) -> None:
        """Restore missing options from the groups `before`, and moments in their saved dtype."""
        groups = zip(state_dict["param_groups"], self.param_groups, before, strict=True)
        for saved, group, old in groups:
            for name, value in old.items():
                group.setdefault(name, value)
            for index, p in zip(saved["params"], group["params"], strict=True):
                if index in state_dict["state"]:
                    entries = state_dict["state"][index]
                    self.state[p] = loaded_entries(entries, p.device, ours="attempts" in saved)


def is_on_host(p: Tensor) -> bool:
    """Whether numbers beside `p` can be read without waiting for a device."""
    return p.is_cpu and not is_fake(p)


def _part(updates: list[_Update]) -> _Part:
    """The updates of one device, in the order of their groups."""
    steps = torch.stack([u.state["step"] for u in updates])
    for update, own in zip(updates, steps.unbind(), strict=True):
        update.state["step"] = own
    tensors = [[u.p.grad, *u.tensors] for u in updates]
    in_one = [all(x is None or x.is_contiguous() for x in own) for own in tensors]
    pieces = {i: u.tensors for i, u in enumerate(updates) if in_one[i]}
    strided = [i for i, is_one in enumerate(in_one) if not is_one]
    of = [u.group for u in updates]
    groups = {n: slice(of.index(n), of.index(n) + of.count(n)) for n in dict.fromkeys(of)}
    on_host = is_on_host(updates[0].p)
    return _Part(updates, on_host, steps, _lists(updates, pieces), groups, strided)


def _lists(
    updates: Sequence[_Update], pieces: Mapping[int, Sequence[Tensor | None]]
) -> list[TensorList]:
    """Those of the updates that have `pieces`, their tensors in one piece each."""
    rows: dict[tuple[str, Storage], list[Row]] = {}
    for i, tensors in pieces.items():
        own, flat = updates[i], [x if x is None else x.view(-1) for x in tensors]
        rows.setdefault((own.engine, own.storage), []).append(own.row(i, flat))
    return [TensorList(*kind, own) for kind, own in rows.items()]


def _options(group: dict[str, Any]) -> tuple[Any, ...]:
    """What decides how the parameters of a group are stored."""
    names = ("rounding", "momentum_dtype", "variance_dtype", "overflow")
    return tuple([group[name] for name in names])


NO_SHARDS = (
    "moments in uint8 of a part of a parameter: their blocks of 256 numbers are counted in the "
    "whole; legal: torch.float16, torch.bfloat16, torch.float32"
)


def kept_in(dtype: torch.dtype, p: Tensor) -> torch.dtype:
    """The dtype of a moment of `p` where the option is `dtype`: see `formulas.SMALL`."""
    is_small = dtype == formulas.DTYPE and p.numel() < formulas.SMALL
    return torch.float32 if is_small else dtype


_storage = lru_cache(Storage)  # One object for all tensors that are stored in the same way


def _given_names(group: dict[str, Any]) -> list[str] | list[None]:
    """The names of a group that was made of `model.named_parameters()`."""
    given = group.get("param_names") or []
    # A shard's group has the names of the whole model.
    return given if len(given) == len(group["params"]) else [None] * len(group["params"])


def check_option(name: str, value: object, legal: Collection[object]) -> None:
    if value not in legal:
        raise ValueError(f"{name}={value!r}; legal: {', '.join(repr(x) for x in legal)}")
