"""The optimizer step with parameters and moments in 16 bits.

A 16-bit parameter that moves by small steps stands still: the update is below half the distance to
its neighbour, and rounding to nearest drops it every time. Here a step is computed in float32 from
the stored values and rounded once, where it is written, by one of three rules:

    stochastic  to either neighbour, so that the mean is exact: small updates survive on average
    kahan       to the nearest, with the remainder in 16 more bits (SGD's steps are then bit for bit
                those of float32 parameters; 4 bytes a parameter, as many as a float32 one)
    nearest     to the nearest

Gradients may be scaled: `step` divides them by `grad_scale`, in float32 and in the same pass, as
PyTorch's fused optimizers do. So `torch.amp.GradScaler` works with float16 parameters too, except
for its `unscale_`. `scaled_step` also checks them for infinities and clips them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun._torch import is_fake, load_hooks_run
from mprun.optim import engines
from mprun.optim.engines import ENGINES, Operands
from mprun.optim.formulas import HYPERS, Storage, root, scale
from mprun.precision.random_bits import NAME, key, tensor_number
from mprun.precision.rounding import OVERFLOWS, round_nearest

ROUNDINGS = ("stochastic", "kahan", "nearest")
MOMENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SITES = 3
"""Results of a parameter's step that are rounded: the parameter and two moments."""


class StorageOptions(TypedDict, total=False):
    """How an optimizer stores parameters and state: the options that all of them share."""

    rounding: str
    """stochastic (the default), kahan or nearest; of parameters in 16 bits."""
    momentum_dtype: torch.dtype
    """What the first moment is stored in; float32 unless given.

    In float16 AdamW's is stored times 64, and so up to 1023.5: see `formulas.SCALE`.
    """
    variance_dtype: torch.dtype
    """What the second moment is stored in; float32 unless given.

    In 16 bits its square root is stored, in float16 64 times the root. Roots below 2^-30 (9e-10)
    are then mostly 0, and the update is divided by eps alone. With an eps far below that and
    gradients of 1e-10, AdamW's updates are 30 to 34 times too large (eps=1e-15; with eps=0 up to 46
    times). With eps=1e-8 they are right.
    """
    overflow: str
    """infinity (the default), or saturate at the largest finite number."""
    seed: int
    """Of the random bits; 0 unless given.

    They also depend on a parameter's name: that of `mprun.optim.name_parameters` (which
    `Precision.prepare` calls), else that in `model.named_parameters()` given as `params`. Without
    names they depend on the position among the optimizer's parameters: give two such optimizers
    two seeds.
    """
    engine: str | None
    """c, inductor or eager; None (the default) for the fastest there is.

    An engine that is named is used or fails: c without a compiler is an error of the step.
    """


class LowPrecisionOptimizer(Optimizer):
    """What all optimizers share; a subclass names its formula, its moments and its constants.

    Args:
        params: as for any optimizer; float32, float16 and bfloat16; each stays in its dtype.
        defaults: the subclass's options.
        rounding, momentum_dtype, variance_dtype, overflow, seed, engine: see `StorageOptions`.

    Raises:
        ValueError: an option that is none of those.
    """

    first: ClassVar[str]
    """What `state` calls the first moment."""
    second: ClassVar[str | None] = None
    """What it calls the second one, where there is one."""
    engine: str | None = None

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to `step`

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
        _check("engine", engine, (None, *ENGINES))
        defaults |= {
            "rounding": rounding,
            "momentum_dtype": momentum_dtype,
            "variance_dtype": variance_dtype,
            "overflow": overflow,
            "seed": seed,
            "attempts": 0,
        }
        self.engine = engine
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; raises `ValueError` as the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_options(self, group: dict[str, Any]) -> None:
        _check("rounding", group["rounding"], ROUNDINGS)
        _check("momentum_dtype", group["momentum_dtype"], MOMENT_DTYPES)
        _check("variance_dtype", group["variance_dtype"], MOMENT_DTYPES)
        _check("overflow", group["overflow"], OVERFLOWS)
        if self.second is None and group["variance_dtype"] != torch.float32:
            raise ValueError(f"variance_dtype: {type(self).__name__} keeps no second moment")
        if group["rounding"] == "kahan" and group["overflow"] == "saturate":
            raise ValueError("overflow='saturate' with rounding='kahan'; legal is 'infinity'")
        for name, value in group.items():
            if isinstance(value, float | int) and value < 0:
                raise ValueError(f"{name}={value}; legal is 0 or more")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "engine": self.engine}

    @abstractmethod
    def formula_of(self, group: dict[str, Any]) -> str:
        """The formula of a group, a key of `FORMULAS`."""

    @abstractmethod
    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        """The formula's constants but the first; `step` counts from 1, a float or a tensor."""

    def keeps_first(self, group: dict[str, Any]) -> bool:
        """Whether the first moment is stored between steps."""
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; gradients are divided by `self.grad_scale` (a scalar tensor) where it is set,
        and nothing is done where `self.found_inf` is set and not 0.

        Returns:
            What `closure`, which computes the loss anew, returned.

        Raises:
            TypeError: a dtype or a kind of tensor that is not taken.
            ValueError: gradient or state have not the parameter's shape, or engine c was named and
                the parameter is not on the CPU.
            NoCompilerError: engine c was named and cannot be compiled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._step(None if scale is None else scale.double().reciprocal().float(), skip)
        return loss

    @torch.no_grad()
    def scaled_step(
        self,
        scale: Tensor | None,
        max_norm: float | None = None,
        overflow: Tensor | None = None,
    ) -> Tensor | None:
        """A step on gradients of a scaled loss: unscale, check, clip, update, all in float32.

        Args:
            scale: what the loss was multiplied by, a float32 scalar on the device; None for 1, and
                for steps that are always taken.
            max_norm: clip the unscaled gradients' global L2 norm to this.
            overflow: 1 or 0, what a check of the gradients gave, 1 to skip the step; they are
                checked here where it is None and `scale` is not.

        Returns:
            1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar;
            None where `scale` and `overflow` are None.
        """
        updated = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in updated:
            _check_operands(p, p.grad, type(self).__name__)
        gradients = [p.grad for p in updated if p.grad.numel()]
        if overflow is None and scale is not None:
            overflow = not_finite(gradients, scale.device)
        self.grad_scale, self.found_inf = scale, overflow
        if max_norm is not None and gradients:
            self.grad_scale = clipping_scale(gradients, scale, max_norm)
        try:
            self.step()
        finally:
            del self.grad_scale, self.found_inf
        return overflow

    def _step(self, factor: Tensor | None, skip: Tensor | None) -> None:
        position = 0
        for group in self.param_groups:
            group["attempts"] += 1
            for name, p in zip(_names(group), group["params"], strict=True):
                if p.grad is not None:
                    number = position if name is None else tensor_number(name)
                    self._update(p, group, number, factor, skip)
                position += 1

    def _complete_state(self, p: Tensor, group: dict[str, Any], storage: Storage) -> None:
        """Make the state that a step needs: all of it at first, some after a change of options.

        Raises:
            ValueError: an entry has not the parameter's shape; the engines would read beyond it.
        """
        state, second = self.state[p], self._second_name(group)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        elif state["step"].device != p.device:
            state["step"] = state["step"].to(p.device)
        if storage.second and second not in state:
            self._carry_second(state, second)
        wanted = {
            self.first: storage.first,
            second: storage.second,
            "remainder": torch.int16 if storage.compensated else None,
        }
        for name, dtype in wanted.items():
            if dtype is None:
                continue
            entry = state.get(name)
            if entry is None:
                state[name] = torch.zeros(p.shape, dtype=dtype, device=p.device)
            elif entry.shape != p.shape:
                raise ValueError(
                    f"{name} of shape {tuple(entry.shape)} for a parameter of {tuple(p.shape)}; "
                    "legal is the same: load a state of this model, or clear the optimizer's state"
                )
            elif entry.dtype != dtype or entry.device != p.device:
                state[name] = self._converted(name, entry, dtype, storage).to(p.device)

    def _carry_second(self, state: dict[str, Any], name: str) -> None:
        """The second moment as its root, or squared, after `variance_dtype` has changed."""
        plain = f"{self.second}"
        if name != plain and plain in state:
            state[name] = root(state.pop(plain).float())
        elif name == plain and f"{plain}_root" in state:
            old = state.pop(f"{plain}_root")
            state[name] = (old.float() / scale(old.dtype)) ** 2

    def _converted(self, name: str, entry: Tensor, dtype: torch.dtype, storage: Storage) -> Tensor:
        """An entry of the state in another dtype, rounded to nearest."""
        if dtype == torch.int16:
            return entry.to(dtype)
        scaled = name != self.first or storage.formula == "adamw"
        x = entry.float() * (scale(dtype) / scale(entry.dtype)) if scaled else entry.float()
        return x if dtype == torch.float32 else round_nearest(x, dtype, "saturate")

    def _second_name(self, group: dict[str, Any]) -> str:
        low = group["variance_dtype"] != torch.float32
        return f"{self.second}_root" if low else f"{self.second}"

    def _storage(self, p: Tensor, group: dict[str, Any]) -> Storage:
        assert p.grad is not None
        _check_operands(p, p.grad, type(self).__name__)
        return Storage(
            formula=self.formula_of(group),
            param=p.dtype,
            grad=p.grad.dtype,
            first=group["momentum_dtype"] if self.keeps_first(group) else None,
            second=None if self.second is None else group["variance_dtype"],
            rounding=group["rounding"],
            saturate=group["overflow"] == "saturate",
        )

    def _update(
        self,
        p: Tensor,
        group: dict[str, Any],
        number: int,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        state, storage = self.state[p], self._storage(p, group)
        self._complete_state(p, group, storage)
        engine = self._engine(p, storage)
        on_host = p.device.type == "cpu" and not is_fake(p)
        if on_host and skip is not None:
            if skip.item():
                return
            skip = None
        if is_fake(p) and engine != "eager":
            return  # the compiled ones allocate nothing
        taken = 1 if skip is None else 1 - skip
        state["step"] += taken
        assert p.grad is not None
        tensors = [
            p.detach(),
            p.grad,
            state[self.first] if storage.first else None,
            state[self._second_name(group)] if storage.second else None,
            state["remainder"] if storage.compensated else None,
        ]
        flat = [None if x is None else x.contiguous().view(-1) for x in tensors]
        keys = [key(group["seed"], group["attempts"], number, site) for site in range(SITES)]
        hyper = self._hyper(group, state["step"], factor, on_host)
        engines.run(engine, storage, Operands(*flat), hyper, tuple(keys), skip)  # type: ignore[arg-type]
        if engine == "c":  # written to behind autograd's back
            torch.autograd.graph.increment_version(p)
        for tensor, updated in zip(tensors, flat, strict=True):
            if tensor is not None and tensor is not p.grad and not tensor.is_contiguous():
                assert updated is not None
                tensor.copy_(updated.view(tensor.shape))

    def _engine(self, p: Tensor, storage: Storage) -> str:
        if self.engine == "c" and p.device.type != "cpu":
            raise ValueError(
                f"engine='c' for a parameter on {p.device}; legal there: None, 'inductor', 'eager'"
            )
        return self.engine or engines.fastest(p.device, storage)

    def _hyper(
        self, group: dict[str, Any], step: Tensor, factor: Tensor | None, on_host: bool
    ) -> Tensor:
        """The formula's constants, computed in float64, as float32 [HYPERS] on the device."""
        if on_host:
            values = [1.0 if factor is None else factor.item(), *self.hyper(group, step.item())]
            return torch.tensor([*values, *[0.0] * (HYPERS - len(values))], dtype=torch.float32)
        wide = [1.0 if factor is None else factor, *self.hyper(group, step.double())]
        wide += [0.0] * (HYPERS - len(wide))
        scalars = [torch.as_tensor(x, dtype=torch.float64, device=step.device) for x in wide]
        return torch.stack([x.reshape(()) for x in scalars]).float()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict`, this optimizer's or that of its namesake in `torch.optim`.

        Moments keep the dtype they were saved in (PyTorch's own method would cast them to the
        parameter's) until the step, which takes them to that of the options. Options that
        `state_dict` does not have stay as they are.

        Raises:
            ValueError: groups or parameters are not as many, or an option of `torch.optim` changes
                the formula.
        """
        with load_hooks_run(self, state_dict) as state_dict:
            _check_saved(state_dict)
            before = [dict(group) for group in self.param_groups]
            # A hook, and the first one, so that the others find the state whole.
            whole = self.register_load_state_dict_post_hook(
                lambda _: self._make_whole(state_dict, before), prepend=True
            )
            try:
                super().load_state_dict(state_dict)
            finally:
                whole.remove()

    def _make_whole(self, state_dict: dict[str, Any], before: list[dict[str, Any]]) -> None:
        """The loaded state, with the options of the groups `before` and moments as saved."""
        groups = zip(state_dict["param_groups"], self.param_groups, before, strict=True)
        for saved, group, old in groups:
            for name, value in old.items():
                group.setdefault(name, value)
            for index, p in zip(saved["params"], group["params"], strict=True):
                if index in state_dict["state"]:
                    entries = state_dict["state"][index]
                    self.state[p] = _entries(entries, p.device, ours="attempts" in saved)


def _entries(saved: dict[str, Any], device: torch.device, ours: bool) -> dict[str, Tensor]:
    """Copies of the saved entries of one parameter, on `device`; `torch.optim`'s in float32."""
    state = {k: torch.as_tensor(v).to(device, copy=True) for k, v in saved.items() if v is not None}
    if ours:
        return state
    state = {k: v.float() for k, v in state.items()}  # their 16 bits are neither scaled nor a root
    if state:  # torch.optim.SGD counts no steps; it was not the first
        state.setdefault("step", torch.ones((), device=device))
    return state


def _check_saved(state_dict: dict[str, Any]) -> None:
    """Raises `ValueError` for an option of `torch.optim` that is none here and changes steps."""
    for group in state_dict["param_groups"]:
        for name in ("amsgrad", "centered", "maximize"):
            if group.get(name):
                raise ValueError(f"{name}={group[name]} in the state; legal is False")


def _names(group: dict[str, Any]) -> list[str | None]:
    """The names of a group's parameters, None where they have none.

    That of `name_parameters`, else that in the group: `model.named_parameters()` was given.
    """
    given = group.get("param_names") or []
    if len(given) != len(group["params"]):  # a shard's group has the names of the whole
        given = [None] * len(group["params"])
    return [getattr(p, NAME, name) for p, name in zip(group["params"], given, strict=True)]


def not_finite(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """1 where a gradient holds an infinity or NaN, else 0: a float32 scalar on `device`."""
    largest = [torch.linalg.vector_norm(g, float("inf")).float() for g in gradients]
    if not largest:
        return torch.zeros((), device=device)
    return (~torch.isfinite(torch.stack(largest)).all()).float().to(device)


def clipping_scale(gradients: Iterable[Tensor], scale: Tensor | None, max_norm: float) -> Tensor:
    """What to divide the gradients by for a norm of at most `max_norm`; `scale` or more (float64).

    Norms are summed in float32: in float16 the squares of a few hundred overflow.
    """
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    total = torch.linalg.vector_norm(torch.stack(norms)).double()
    divisor = torch.ones_like(total) if scale is None else scale.double()
    wide: Tensor = divisor * ((total / divisor + 1e-6) / max_norm).clamp(min=1.0)
    return wide


def _check_operands(p: Tensor, gradient: Tensor, kind: str) -> None:
    """Raises for what the optimizer `kind` has no step for."""
    if gradient.is_sparse:
        raise RuntimeError(
            f"mprun.optim.{kind} does not take sparse gradients (nn.Embedding(sparse=True) makes "
            "them); legal: dense ones (sparse=False), or an optimizer of torch.optim that takes "
            "them, with float32 parameters"
        )
    if hasattr(p, "to_local"):
        raise TypeError(
            f"{kind} does not take sharded parameters (DTensor); legal: whole ones, on one "
            "device or replicated (DistributedDataParallel)"
        )
    for name, dtype in (("parameter", p.dtype), ("gradient", gradient.dtype)):
        if dtype not in MOMENT_DTYPES:
            legal = ", ".join(str(d) for d in MOMENT_DTYPES)
            raise TypeError(f"a {name} of {dtype}; legal: {legal}")
    # PyTorch sees to that where a gradient is assigned, but not where `p.data` is.
    if gradient.shape != p.shape or gradient.device != p.device:
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} on {gradient.device} for a parameter of "
            f"{tuple(p.shape)} on {p.device}; legal is the same: zero_grad() after such a change"
        )


def _check(name: str, value: object, legal: tuple[object, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name}={value!r}; legal: {', '.join(repr(x) for x in legal)}")
