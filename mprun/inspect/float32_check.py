"""Is float32 itself good enough? The same ops in float64, and the op that loses the result.

float32 keeps 24 bits. A difference of nearly equal sums (a variance as E[x^2] - E[x]^2, a KL
divergence near 0) may leave none of them, and then a 16-bit format that agrees with float32 proves
nothing. So the loss of a pass is compared with float64's. They may also differ because a model
computes something else in float64: code that branches on dtypes, or random numbers that are not
followed. It is the same model if it runs the same ops, and gives its float32 loss again.

The op is searched from the loss backwards. Of the ops whose numbers an inexact result was made of,
it is the one that is as inexact and made of exact numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.inspect.divergence.boundaries import COPIES
from mprun.inspect.numerics import Float32Loss
from mprun.inspect.passes import in_float64
from mprun.inspect.rounding_oracle import relative_rms
from mprun.inspect.tolerance import DEFAULT
from mprun.precision._torch import in_backward, no_dispatch, op_name, storage_key
from mprun.watch.op_watcher import OpWatcher, RunOp, op_spec, tensors_of

MAX_NUMBERS = 2**25  # Of stored results: 256 MiB in float64. Beyond them no op is named.

Region = Callable[[nn.Module], AbstractContextManager[object]]
# Runs a forward and backward pass of a model inside of a region, and returns its loss
Pass = Callable[[Region], float]


class _Computed(NamedTuple):
    """What an op of the forward pass made."""

    op: str
    module: str
    numbers: Tensor  # In float64
    made_of: tuple[int, ...]  # The indices of the results that it read


class ForwardResults(OpWatcher):
    """Stores the results of the ops of a pass, without those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[_Computed] = []
        self.names: list[str] = []
        self.is_whole = True
        """Whether every result was stored."""
        self._numbers = 0
        self._made: dict[int, int] = {}
        """A storage to the index of the last result in it."""
        self._alive: list[Any] = []
        """Storages: freed memory would be given to other results."""

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        strided = (x for x in tensors_of((args, kwargs)) if x.layout == torch.strided)
        read = [self._made[key] for key in map(storage_key, strided) if key in self._made]
        result = run()
        if in_backward() or not op_spec(func).makes_numbers:
            return result
        name = op_name(func)
        made = [x for x in tensors_of(result) if x.is_floating_point()]
        if name not in COPIES:
            self.names.append(name)
        for x in made:
            self._numbers += x.numel()
            self.is_whole &= self._numbers <= MAX_NUMBERS
            if self.is_whole:
                self._store(name, x, tuple(read))
        return result

    def _store(self, name: str, x: Tensor, read: tuple[int, ...]) -> None:
        with no_dispatch(), torch.no_grad():
            numbers = x.detach().double().clone()
        if name in COPIES:  # the copy is what it was made of
            for index in read[:1]:
                self._made[storage_key(x)] = index
        else:
            self._made[storage_key(x)] = len(self.results)
            module = self.tracker.context().module or ""
            self.results.append(_Computed(name, module, numbers, read))
        self._alive.append(x.untyped_storage())


def float32_loss(loss: float, float64: float, run: Pass) -> Float32Loss | None:
    """What float32 makes of a loss, beside float64; None where that is another computation.

    `run` repeats the pass.
    """
    try:
        low_loss, low = _recorded(run, nullcontext)
        _, exact = _recorded(run, in_float64)
    except Exception:  # a model's own code may fail in float64 in any way
        return None
    # a model that branches on dtypes runs other ops; one whose random numbers are not followed has
    # another loss
    is_same = low_loss == loss or (math.isnan(low_loss) and math.isnan(loss))
    if not is_same or low.names != exact.names:
        return None
    op, module = _origin(low, exact) if low.is_whole else ("", "")
    return Float32Loss(loss=loss, float64=float64, op=op, module=module)


def is_good_enough(result: Float32Loss) -> bool:
    """Whether the loss keeps to the tolerance that 16-bit formats are given beside float32."""
    difference = abs(result.loss - result.float64)
    return math.isfinite(difference) and difference <= DEFAULT.loss * abs(result.float64)


def _recorded(run: Pass, region: Region) -> tuple[float, ForwardResults]:
    results = ForwardResults()

    @contextmanager
    def inside(model: nn.Module) -> Iterator[None]:
        with region(model), results.following(model), results:
            yield

    return run(inside), results


def _origin(low: ForwardResults, exact: ForwardResults) -> tuple[str, str]:
    """The op that loses the loss, and its module."""
    errors = [_error(a.numbers, b.numbers) for a, b in zip(low.results, exact.results, strict=True)]
    # the loss is the last inexact single number; from there to the inputs that are as inexact
    scalars = [i for i, x in enumerate(low.results) if x.numbers.numel() == 1]
    bad = [i for i in scalars if errors[i] > DEFAULT.loss]
    if not bad:
        return "", ""
    at = bad[-1]
    while worse := [i for i in low.results[at].made_of if errors[i] > DEFAULT.loss and i != at]:
        at = max(worse, key=lambda i: errors[i])
    return low.results[at].op, low.results[at].module


def _error(low: Tensor, exact: Tensor) -> float:
    if low.shape != exact.shape or not low.isfinite().all():
        return math.inf
    return relative_rms(low, exact)
