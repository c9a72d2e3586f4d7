"""The ops of one training step, each with what shows a fault of low precision.

A dispatch mode sees ops below autocast, where a cast by autocast and one by the model's own code
look the same; a function mode knows which function was called, and whose code called it.

Beside each op of the forward pass and the loss the same op is computed in float64, on exact inputs:
the float64 results of the ops before it. So the error of a result is that of all ops so far,
explicit casts included, and the code takes the same path in both. An op that draws random numbers
is exact as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mprun.precision._torch import calling_frames, no_dispatch, op_name, storage_key
from mprun.precision.nested import tensors_in
from mprun.precision.products import LOW
from mprun.watch.op_watcher import (
    CodeLine,
    OpCall,
    OpWatcher,
    RunOp,
    current_line,
    is_library,
    is_plain,
    op_spec,
    recomputed,
    tensors_of,
    written_arguments,
)

CASTS = ("to", "type", "type_as", "half", "bfloat16")  # Functions by which code casts
# Functions between a mode and the code that called a function
MODES = ("calling_frames", "<genexpr>", "__torch_function__")
# Ops that a constant is a number for; others multiply by it, in float32
TAKE_CONSTANTS = ("add", "sub", "rsub", "clamp", "clamp_min", "full", "full_like", "fill")
MASKS = 1e30  # Larger numbers stand for infinity
SAMPLED = 2**16  # Numbers of a result whose error is measured
# Errors, as shares of the exact numbers, of a result that is noise, and of inputs that are not
NOISE, SMALL = 0.7, 0.05
NOISY_COLUMNS = 0.1  # Share of the indices of the last dimension at which a result is noise
# Size of a result, as a share of its inputs', below which float32 hardly determines it
CANCELS = 2.0**-20
PRODUCTS = ("mul", "div")  # A small result of these is no difference of larger numbers


class StepOp(NamedTuple):
    """An op of a step."""

    name: str  # ATen's, without the overload
    phase: str
    module: str
    line: CodeLine | None  # Of the forward pass and the loss
    inputs: tuple[tuple[torch.dtype, int], ...]
    """Dtype of each floating input, and the index of the op that made it, or -1."""
    makes: torch.dtype  # Of its largest floating result
    numbers: int  # Of this result
    by_hand: bool  # Whether it is a cast of code outside of PyTorch and mprun
    rounds: bool  # Whether such a cast changes a number
    size: float
    """The largest magnitude, without masks and infinities; 0 where it is a constant of the call."""
    vanishes: float
    """A constant of the code that is 0 in the dtype of the result; 0 where there is none."""
    overflows: float = 0.0
    """The largest exact number whose result is infinite, without masks; 0 where there is none."""
    error: float = 0.0
    """Root mean square of the error of all ops so far, as a share of the exact result's."""
    is_noise: bool = False  # Whether the result is noise and the inputs are not


class StepOps(OpWatcher):
    """Keeps the ops of a step, without the optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[StepOp] = []
        self._calls = _Calls()
        self._made: dict[int, int] = {}
        """A storage to the index of the last op that wrote to it."""
        self._exact: dict[int, Tensor] = {}
        """A storage to its exact numbers, all of them, in float64."""
        self._alive: list[Any] = []
        """Storages: freed memory would be given to other results."""

    @contextmanager
    def watching(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Watch a step of a model by its optimizer."""
        with self.following(model, optimizer), self._calls, self:
            yield

    def forget(self) -> None:
        for known in (self._made, self._exact, self._alive):
            known.clear()

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        phase, module = self.tracker.context()
        is_over = phase == "other" and bool(self.ops) and self.ops[-1].phase == "backward"
        if phase == "optimizer" or is_over or not op_spec(func).makes_numbers:
            return run()  # after a backward pass: of the loss scale, of clipping
        name, inputs = op_name(func), [x for x in tensors_of((args, kwargs)) if is_plain(x)]
        if name.startswith("new_") or name.endswith("_like"):  # it reads a shape alone
            inputs = []
        read = tuple((x.dtype, self._made.get(storage_key(x), -1)) for x in inputs)
        targets = tensors_in(v for _, v in written_arguments(func, args, kwargs))
        call = OpCall(func, args, kwargs, None, saved={id(x): x for x in targets})
        exact = None if phase == "backward" else recomputed(call, value=self._exact_part)
        result = run()
        call = call._replace(result=result)
        pairs = zip_longest((x for _, x in call.outputs()), exact or ())
        made = [(x, right) for x, right in pairs if is_plain(x) and x.numel()]
        if made:
            with no_dispatch(), torch.no_grad():
                x, right = max(made, key=lambda pair: pair[0].numel())
                line = None if phase == "backward" else current_line()
                where = phase, module or "", line, read, x.dtype, x.numel()
                seen = *self._by_hand(name, args, x), _size(x, call), self._vanishing(call, x)
                before = [self.ops[i] for _, i in read if i >= 0]
                error = () if right is None else _error(x, right, before, name)
                self.ops.append(StepOp(name, *where, *seen, *error))
                for x, right in made:
                    self._keep(x, right)
        return result

    def _exact_part(self, x: Tensor) -> Tensor | None:
        """The exact numbers of a tensor."""
        whole = self._exact.get(storage_key(x)) if is_plain(x) else None
        if whole is None or whole.numel() != x.untyped_storage().nbytes() // x.itemsize:
            return None  # or of another dtype
        return whole.as_strided(x.size(), x.stride(), x.storage_offset())

    def _keep(self, x: Tensor, exact: Tensor | None) -> None:
        """Note that the last op made a tensor."""
        key, storage = storage_key(x), x.untyped_storage()
        self._made[key] = len(self.ops) - 1
        self._alive.append(storage)
        if exact is None:
            self._exact.pop(key, None)
            return
        if self._exact_part(x) is None:
            self._exact[key] = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage).double()
        self._exact[key].as_strided(x.size(), x.stride(), x.storage_offset()).copy_(exact)

    def _by_hand(self, name: str, args: tuple[Any, ...], x: Tensor) -> tuple[bool, bool]:
        is_asked = name == "_to_copy" and self._calls.is_users and self._calls.name in CASTS
        return is_asked, is_asked and bool((x.to(args[0].dtype) != args[0]).any())

    def _vanishing(self, call: OpCall, x: Tensor) -> float:
        takes = self._calls.is_users and call.name.strip("_") in TAKE_CONSTANTS and x.dtype in LOW
        lost = (c for c in call.numbers() if c and not torch.tensor(c, dtype=x.dtype))
        return next(lost, 0.0) if takes else 0.0


class _Calls(TorchFunctionMode):
    """Knows the function that is called, and whether code of the user calls it."""

    name, is_users = "", False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.name, self.is_users
        self.name = getattr(func, "__name__", "")
        codes = (frame.f_code for frame in calling_frames())
        caller = next(x for x in codes if x.co_name not in MODES)
        self.is_users = not is_library(caller.co_filename)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name, self.is_users = before


def _size(x: Tensor, call: OpCall) -> float:
    most = torch.finfo(x.dtype).max
    # Masks are written as minus infinity or as the dtype's least number
    size = float(x.where((x > -0.99 * most) & (x < most), 0).abs().max())
    return 0.0 if any(abs(c) == size for c in call.numbers()) else size


def _error(x: Tensor, exact: Tensor, before: list[StepOp], op: str) -> tuple[float, float, bool]:
    """What overflows, the error, and whether it is noise that no op before it has."""
    is_lost = x.isinf() & (exact.abs() < MASKS)
    last, step = x.shape[-1] if x.dim() else 1, max(1, x.numel() // SAMPLED)
    # By columns of the last dimension, over evenly spaced rows: some channels alone may be noise
    low, right = (t.reshape(-1, last)[::step].double() for t in (x, exact))
    usable = low.isfinite() & (right.abs() < MASKS)
    errors, sizes = (t.where(usable, 0).square().mean(0).sqrt() for t in (low - right, right))
    size = float(sizes.square().mean().sqrt())
    noisy = (errors > 0) & (errors >= NOISE * sizes) & (sizes >= size / 3)
    is_noise = (
        float(noisy.double().mean()) >= NOISY_COLUMNS
        and (op in PRODUCTS or size >= CANCELS * max((x.size for x in before), default=0.0))
        and all(x.error <= SMALL for x in before)  # else an earlier op is to blame
    )
    error = float(errors.norm() / sizes.norm()) if errors.any() else 0.0
    return float(exact.abs().where(is_lost, 0).max()), error, is_noise
