"""The ops of one training step, each with what shows a fault of low precision.

A dispatch mode sees ops below autocast, where a cast by autocast and one by the model's own code
look the same; a function mode knows which function was called, and whose code called it.

Beside each op of the forward pass and the loss the same op is computed in float64, on exact inputs:
the float64 results of the ops before it. So the error of a result is that of all ops so far,
explicit casts included, and the code takes the same path in both. An op that draws random numbers
is exact as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mprun._torch import calling_frames, no_dispatch, op_name, storage_key
from mprun.nested import tensors_in
from mprun.numerics.nonfinite.nonfinite_watcher import CodeLine, current_line, is_library
from mprun.numerics.nonfinite.op_call import (
    OpCall,
    is_plain,
    op_spec,
    recomputed,
    value_range,
    written_arguments,
)
from mprun.numerics.op_watcher import OpWatcher, RunOp, tensors_of
from mprun.precision.products import LOW

CASTS = ("to", "type", "type_as", "half", "bfloat16")
"""Functions by which code casts."""
MODES = ("calling_frames", "<genexpr>", "__torch_function__")
"""Functions between a mode and the code that called a function."""
TAKE_CONSTANTS = ("add", "sub", "rsub", "clamp", "clamp_min", "full", "full_like", "fill")
"""Ops that a constant is a number for; others multiply by it, in float32."""
MASKS = 1e30
"""Larger numbers stand for infinity."""
SAMPLED = 2**16
"""Numbers of a result whose error is measured."""
NOISE, SMALL = 0.7, 0.05
"""Errors, as shares of the exact numbers, of a result that is noise, and of inputs that are not."""
NOISY_COLUMNS = 0.1
"""Share of the indices of the last dimension at which a result is noise."""
CANCELS = 2.0**-20
"""Size of a result, as a share of its inputs', below which float32 hardly determines it."""


class StepOp(NamedTuple):
    """An op of a step."""

    name: str
    """ATen's, without the overload."""
    call: str
    """The function that was called; empty in the backward pass."""
    phase: str
    module: str
    line: CodeLine | None
    """Of the forward pass and the loss."""
    inputs: tuple[tuple[torch.dtype, int], ...]
    """Dtype of each floating input, and the index of the op that made it, or -1."""
    makes: torch.dtype
    """Of its first floating result."""
    numbers: int
    """Of this result."""
    is_cast: bool
    by_hand: bool
    """Whether it is a cast that code outside of PyTorch and mprun asks for."""
    rounds: bool
    """Whether it is a cast that changes a number."""
    weighted: bool
    """Whether it reads a parameter, or a cast or view of one."""
    lowers: bool
    """Whether an argument asks for a result of 16 bits of float32 inputs."""
    size: float
    """The largest magnitude, without masks and infinities; NaN where there is none."""
    overflows: float | None
    """A number beyond the dtype that became infinite."""
    vanishes: float | None
    """A constant of the code that is 0 in the dtype of the result."""
    error: float
    """Root mean square of the error of all ops so far, as a share of the exact result's."""
    is_noise: bool
    """Whether the result is noise and the inputs are not."""


@dataclass
class KnownNumbers:
    """What is known of numbers in memory."""

    kept: Any
    """Keeps it from being given to other numbers."""
    index: int = -1
    is_weight: bool = False
    error: float = 0.0
    exact: Tensor | None = None
    """float64, all numbers of the storage."""
    is_spoiled: bool = False
    """Whether an infinity reached it that is none in float64."""


class StepOps(OpWatcher):
    """Keeps the ops of a step, without the optimizer's.

    Args:
        in_float64: compute the ops in float64 as well.
    """

    def __init__(self, in_float64: bool) -> None:
        super().__init__()
        self.ops: list[StepOp] = []
        self._in_float64 = in_float64
        self._calls = _Calls()
        self._known: dict[int, KnownNumbers] = {}

    @contextmanager
    def watching(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, exact: Mapping[str, Tensor]
    ) -> Iterator[None]:
        """Watch a step.

        Args:
            model, optimizer: whose modules and steps are known.
            exact: numbers of buffers before they were rounded, by name.
        """
        for p in model.parameters():
            self._known[storage_key(p)] = KnownNumbers(p.untyped_storage(), is_weight=True)
        for name, x in model.named_buffers():
            before = exact.get(name)
            if before is not None and is_plain(x) and x.dtype in LOW and before.shape == x.shape:
                self._store(x, KnownNumbers(x.untyped_storage()), before.double())
        with self.following(model, optimizer), self._calls, self:
            yield

    def forget(self) -> None:
        self._known.clear()

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        phase, module = self.tracker.context()
        is_over = phase == "other" and bool(self.ops) and self.ops[-1].phase == "backward"
        if phase == "optimizer" or is_over or not op_spec(func).makes_numbers:
            return run()  # after a backward pass: of the loss scale, of clipping
        inputs = [x for x in tensors_of((args, kwargs)) if is_plain(x)]
        read = [(x.dtype, self._known.get(storage_key(x), KnownNumbers(None))) for x in inputs]
        before = [(dtype, known.index) for dtype, known in read]
        exact = self._recomputed(func, args, kwargs) if phase in ("forward", "other") else None
        result = run()
        call = OpCall(func, args, kwargs, result)
        outputs = list(call.outputs())
        made = [x for _, _, x in outputs]
        plain = [x for name, _, x in outputs if name == "result" and is_plain(x)]
        plain += [x for name, _, x in outputs if name != "result" and is_plain(x)]
        if not plain:
            return result
        with no_dispatch(), torch.no_grad():
            pairs = list(zip(made, exact or [], strict=False))
            first = plain[0]
            right = next((e for x, e in pairs if x is first), None)
            error, noisy, rms = (0.0, 0.0, 0.0) if right is None else _error(first, right)
            spoiled = any(known.is_spoiled for _, known in read)
            beyond = None if right is None or spoiled else _beyond(first, right)
            name, is_copy = op_name(func), op_name(func) == "_to_copy"
            quiet = all(known.error <= SMALL for _, known in read)
            is_noise = noisy >= NOISY_COLUMNS and quiet and rms >= CANCELS * self._largest(inputs)
            weighted = any(known.is_weight for _, known in read)
            asked = kwargs.get("dtype")
            self.ops.append(
                StepOp(
                    name=name,
                    call=self._calls.name if phase != "backward" else "",
                    phase=phase,
                    module=module or "",
                    line=current_line() if phase != "backward" else None,
                    inputs=tuple(before),
                    makes=first.dtype,
                    numbers=first.numel(),
                    is_cast=is_copy,
                    by_hand=is_copy and self._calls.is_users and self._calls.name in CASTS,
                    rounds=is_copy and bool((first.to(args[0].dtype) != args[0]).any()),
                    weighted=weighted,
                    lowers=not is_copy
                    and asked in LOW
                    and any(dtype == torch.float32 for dtype, _ in before),
                    size=_size(first, call),
                    overflows=beyond,
                    vanishes=self._vanishing(name, call, first.dtype),
                    error=error,
                    is_noise=is_noise,
                )
            )
            for x in plain:
                known = KnownNumbers(
                    x.untyped_storage(),
                    len(self.ops) - 1,
                    weighted and is_copy,
                    error,
                    is_spoiled=spoiled or beyond is not None,
                )
                self._store(x, known, next((e for y, e in pairs if y is x), None))
        return result

    def _recomputed(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Tensor] | None:
        """The results in float64, before the op runs and writes to its inputs."""
        if not self._in_float64:
            return None
        targets = tensors_in(v for _, v in written_arguments(func, args, kwargs))
        call = OpCall(func, args, kwargs, None, saved={id(x): x for x in targets})
        return recomputed(call, value=self._exact)

    def _exact(self, x: Tensor) -> Tensor | None:
        known = self._known.get(storage_key(x)) if is_plain(x) else None
        if known is None or known.exact is None:
            return None
        if known.exact.numel() != x.untyped_storage().nbytes() // x.itemsize:  # another dtype
            return None
        return known.exact.as_strided(x.size(), x.stride(), x.storage_offset())

    def _store(self, x: Tensor, known: KnownNumbers, exact: Tensor | None) -> None:
        """Keep what is known of a result, with its exact numbers."""
        key = storage_key(x)
        old = self._known.get(key)
        if exact is not None:
            whole = old.exact if old is not None else None
            if whole is None:
                whole = torch.empty(0, dtype=x.dtype, device=x.device)
                whole = whole.set_(x.untyped_storage()).double()
            whole.as_strided(x.size(), x.stride(), x.storage_offset()).copy_(exact)
            known.exact = whole
        self._known[key] = known

    def _largest(self, inputs: Sequence[Tensor]) -> float:
        """The largest root mean square of the inputs."""
        exact = (x.double() if (e := self._exact(x)) is None else e for x in inputs)
        return max((float(x.square().mean().sqrt()) for x in exact if x.numel()), default=0.0)

    def _vanishing(self, name: str, call: OpCall, dtype: torch.dtype) -> float | None:
        """A constant of the user's code that is 0 in this dtype."""
        if dtype not in LOW or not self._calls.is_users or name.strip("_") not in TAKE_CONSTANTS:
            return None
        constants = (x for x in call.numbers() if x and not torch.tensor(x, dtype=dtype).item())
        return next(constants, None)


class _Calls(TorchFunctionMode):
    """Knows the function that is called, and whether code of the user calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.is_users = "", False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = self.name, self.is_users
        self.name = getattr(func, "__name__", "")
        codes = (frame.f_code for frame in calling_frames())
        caller = next(x for x in codes if x.co_name not in MODES)
        self.is_users = not is_library(caller.co_filename)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name, self.is_users = before


def _columns(x: Tensor) -> Tensor:
    """Some rows [N, C] of a tensor [..., C]."""
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return rows[:: max(1, x.numel() // SAMPLED)].double()


def _error(x: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """The error as a share of the exact numbers, the share of columns of noise, and the rms."""
    if not x.numel():
        return 0.0, 0.0, 0.0
    low, true = _columns(x), _columns(exact)
    usable = low.isfinite() & (true.abs() < MASKS)
    error = (low - true).where(usable, 0).square().mean(0)
    scale = true.where(usable, 0).square().mean(0)
    total = float(scale.mean())
    noisy = (error >= NOISE**2 * scale) & (scale >= 0.1 * total) & (error > 0)
    share = math.sqrt(float(error.mean()) / total) if total else math.inf
    return share if float(error.sum()) else 0.0, float(noisy.double().mean()), math.sqrt(total)


def _beyond(x: Tensor, exact: Tensor) -> float | None:
    """The largest exact number whose result is infinite, without masks."""
    if x.dtype not in LOW or not x.isinf().any():
        return None
    lost = exact[x.isinf() & (exact.abs() < MASKS)]
    return float(lost[lost.abs().argmax()]) if lost.numel() else None


def _size(x: Tensor, call: OpCall) -> float:
    limits, known = torch.finfo(x.dtype), value_range(x)
    if known is not None and not (known.finite and known.size < 0.9 * limits.max):
        known = value_range(x[(x > -0.99 * limits.max) & (x < limits.max)])
    if known is None or any(abs(c) == known.size for c in call.numbers()):
        return math.nan
    return known.size
