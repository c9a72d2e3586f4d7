"""`assert_explained`: a test of a kernel in 16 bits without a tolerance that somebody guessed.

What the roundings of the dtype explain is measured on a reference, a function of PyTorch's ops: in
float64, and several times in the dtype with each result rounded stochastically, once to nearest
(`Emulated16`). The differences e of those passes from float64 are errors that a sound kernel may
have.

*Spread of an element.* The passes are few, so an element shares its spread with `GROUP` elements of
like magnitude, as far as they are alike: with the group's mean square V, and S the sum of squares
of the element's P errors,

    sigma^2 = (d V + S) / (d + P),   d = 4 + 2 / c^2

the mean under an inverse gamma distribution of d degrees of freedom (Smyth, "Linear models and
empirical Bayes methods", 2004). c^2, the relative variance of the true squares in a group, is the
covariance of the squares of two halves of the passes, which chance cannot make alike.

*Bound.* An element fails if its error is beyond `limit * sigma` and half a step of the dtype. Each
pass has a largest ratio M of |e| / sigma, with a sigma from the other passes; elements may be
rounded together (the root of a row's mean square), which only M shows. The limit is the largest M,
and at least the prediction limit of one more pass, by Student's t,

    (mean(M) + t(P - 1; FALSE_ALARMS) sqrt(1 + 1 / P) std(M)) / sqrt(2)

for a kernel that rounds to nearest where the reference rounds: its errors have half the variance of
stochastic ones (a step^2 / 12 and / 6, on average). So a sound tensor fails with a chance of about
`FALSE_ALARMS`, and one that rounds in fewer places, as kernels do that add up in float32, with
less. More passes make the limit tighter, most of all for few elements.

*Parts.* A factor of 1.01 hides in the roundings of each element, not in those of a row. So the
whole tensor, its rows and its slices along each dimension are judged too: of the errors e and
float64's r in a part, sum(e r) / |r|. The half steps, which may all have one sign, and the
bound as above are added here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mprun._torch import op_name, outside_of_modes
from mprun.nested import all_tensors, map_tensors, to_dtype
from mprun.numerics.divergence.boundaries import COPIES, Exact, floating
from mprun.numerics.float64 import in_float64
from mprun.numerics.nonfinite.op_call import op_spec
from mprun.numerics.updates import own_random_numbers
from mprun.precision.emulate import Emulated16
from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW, unfused

FALSE_ALARMS = 1e-6
"""The chance that a tensor of a sound kernel fails."""
GROUP = 64
"""Elements of like magnitude that share a spread: with 17 passes it is then known to 2 %."""
MOST_OPS = 100
"""Ops of a reference of which the noisiest is looked for: each takes a pass."""

Function = Callable[..., Any]


def assert_explained(
    actual: Function | Tensor,
    *inputs: Any,
    dtype: torch.dtype = torch.bfloat16,
    reference: Function | None = None,
    backward: bool = False,
    passes: int = 16,
    seed: int = 0,
) -> None:
    """Assert that a result in 16 bits differs from float64's by no more than roundings explain.

        assert_explained(my_softmax, x, reference=lambda x: x.softmax(-1), dtype=torch.float16)
        assert_explained(my_softmax(x.half()), x, reference=..., dtype=torch.float16)

    No `atol` or `rtol` is given. In a test of pytest, or anywhere.

    Args:
        actual: the function or module under test, which is called with the inputs in `dtype`; or
            the tensor that it gave for them.
        inputs: of both functions. Floating tensors, nested as they like, are cast to `dtype` first;
            anything else passes.
        dtype: torch.bfloat16 or torch.float16.
        reference: the same in PyTorch's ops. It is run in float64, and in `dtype` with each result
            rounded: where it casts to float32, nothing is rounded there. Its products add up in
            float32; for a kernel that adds up in the dtype write it so (on a CPU: of PyTorch's,
            `nll_loss`, and the weights' gradients of `layer_norm`). A module gets its
            parameters in the dtype. None: `actual` itself, whose ops must be PyTorch's.
        backward: compare the gradients of floating inputs and of a module's parameters as well,
            for random gradients of the outputs.
        passes: stochastic ones; more of them make the bound of a tensor of few elements tighter.
        seed: of the roundings, of those gradients and of what the functions draw.

    Raises:
        AssertionError: an element's error is not explained, or is NaN where float64 is not; the
            message has the worst element with its errors, and the noisiest op of the reference.
        TypeError: an argument has another type than these.
        ValueError: an argument has another value, or the shapes of the outputs differ.
    """
    function = _checked(actual, inputs, dtype, reference, backward, passes)
    runs = _Runs(to_dtype(inputs, dtype), dtype, backward, seed)
    exact = runs.exact(function)
    results = {"output": actual} if isinstance(actual, Tensor) else runs.low(actual)
    rounded = [runs.emulated(function, "stochastic", k) for k in range(1, passes + 1)]
    rounded.append(runs.emulated(function, "nearest", 0))
    if {n: x.shape for n, x in results.items()} != {n: x.shape for n, x in exact.items()}:
        raise ValueError(f"actual gives {_shapes(results)}, and the reference {_shapes(exact)}")
    failures = []
    for name, x in results.items():
        passed = torch.stack([one[name] for one in rounded])
        texts = [*_unexplained(x, exact[name], passed, dtype)]
        if texts and (op := runs.noisiest_op(function, name)):
            texts[-1] += f" (most of what is explained arises in {op})"
        failures += [f"{name}{text}" for text in texts]
    if failures:
        raise AssertionError("\n".join(failures))


def _checked(
    actual: Any, inputs: tuple[Any, ...], dtype: Any, reference: Any, backward: bool, passes: int
) -> Function:
    """The function that is the reference; see `assert_explained` for what is raised."""
    if not (callable(actual) or isinstance(actual, Tensor)):
        raise TypeError(f"actual is a {type(actual).__name__}; legal is a function or a tensor")
    if any(map(callable, inputs)):
        raise TypeError("an input is a function; write the reference by its name: reference=f")
    if reference is None and isinstance(actual, Tensor):
        raise TypeError("actual is a tensor, and there is no reference; write reference=f")
    if not (reference is None or callable(reference)):
        raise TypeError(
            f"reference is a {type(reference).__name__}; legal is the function that computes it"
        )
    if dtype not in LOW:
        raise ValueError(f"dtype is {dtype}; legal: torch.bfloat16, torch.float16")
    if passes < 2:
        raise ValueError(f"passes is {passes}; legal is 2 or more")
    if backward and isinstance(actual, Tensor):
        raise ValueError("actual is a tensor, which has no backward pass; give its function")
    function: Function = actual if reference is None else reference
    return function


def _shapes(results: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(x.shape)}" for name, x in results.items()) or "no number"


@dataclass(frozen=True)
class _Runs:
    """Runs functions on the same inputs, with the same random numbers."""

    inputs: tuple[Any, ...]
    """In the dtype."""
    dtype: torch.dtype
    backward: bool
    seed: int

    def low(self, function: Function) -> dict[str, Tensor]:
        """The results in the dtype, by PyTorch's or the function's own kernels."""
        return self._run(_in(function, self.dtype), self.inputs)

    def emulated(self, function: Function, rounding: str, step: int) -> dict[str, Tensor]:
        """The results in the dtype, each one rounded."""
        arithmetic = Emulated16(rounding, "infinity", "float32", self.seed)
        arithmetic.begin_step(step)
        return self._run(_in(function, self.dtype), self.inputs, arithmetic.region())

    def exact(self, function: Function, mode: Exact | None = None) -> dict[str, Tensor]:
        """The results in float64, of inputs and parameters in the dtype."""
        wide = to_dtype(self.inputs, torch.float64)
        region = _float64(mode or Exact())
        return self._run(_in(function, self.dtype, torch.float64), wide, region)

    def noisiest_op(self, function: Function, name: str) -> str:
        """The op whose rounding alone changes a result of float64 most; empty for too many ops."""
        exact, counted = self.exact(function, mode := _OneRounding(self.dtype, -1)), mode.names
        if len(counted) > MOST_OPS:
            return ""
        noise = [0.0] * len(counted)
        for i in range(len(counted)):
            one = self.exact(function, _OneRounding(self.dtype, i))
            noise[i] = float((one[name] - exact[name]).nan_to_num(0, 0, 0).square().sum())
        return counted[max(range(len(noise)), key=noise.__getitem__)] if any(noise) else ""

    def _run(
        self,
        function: Function,
        inputs: tuple[Any, ...],
        region: AbstractContextManager[object] | None = None,
    ) -> dict[str, Tensor]:
        fresh = map_tensors(self._leaf, inputs)
        with own_random_numbers(all_tensors(inputs)), region or nullcontext():
            torch.manual_seed(self.seed)
            outputs = floating(function(*fresh))
            several = len(outputs) > 1
            names = [f"output {i}" if several else "output" for i in range(len(outputs))]
            results = dict(zip(names, outputs, strict=True))
            if self.backward:
                wanted = {f"gradient of input {i}": x for i, x in enumerate(floating(fresh))}
                if isinstance(function, nn.Module):
                    own = function.named_parameters()
                    wanted |= {f"gradient of {n}": p for n, p in own if p.requires_grad}
                results |= self._gradients(outputs, wanted)
        return {name: x.detach() for name, x in results.items()}

    def _leaf(self, x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(self.backward and x.is_floating_point())

    def _gradients(
        self, outputs: Sequence[Tensor], wanted: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Zeros where the outputs do not depend on a tensor."""
        drawn, pairs = torch.Generator().manual_seed(self.seed), []
        with outside_of_modes():  # in float64 too they are rounded
            for x in outputs:
                given = torch.randn(x.shape, generator=drawn).to(self.dtype)
                pairs += [(x, given.to(x.device, x.dtype))] if x.requires_grad else []
        if not pairs:
            return {name: torch.zeros_like(x) for name, x in wanted.items()}
        gradients = torch.autograd.grad(
            [x for x, _ in pairs], [*wanted.values()], [y for _, y in pairs], allow_unused=True
        )
        named = zip(wanted.items(), gradients, strict=True)
        return {n: torch.zeros_like(x) if g is None else g for (n, x), g in named}


def _in(function: Function, *dtypes: torch.dtype) -> Function:
    """A copy of a module in a dtype, by way of the others; a function itself."""
    if not isinstance(function, nn.Module):
        return function
    copied = copy.deepcopy(function)
    for dtype in dtypes:
        copied = copied.to(dtype)
    return copied


@contextmanager
def _float64(mode: Exact) -> Iterator[None]:
    with ExitStack() as stack:
        for region in (unfused(), in_float64(nn.Module()), mode):
            stack.enter_context(region)
        yield


class _OneRounding(Exact):
    """Rounds the result of one op.

    Args:
        low: to this dtype.
        chosen: the number of the op; -1 for none.
    """

    def __init__(self, low: torch.dtype, chosen: int) -> None:
        super().__init__()
        self._low, self._chosen = low, chosen
        self.names: list[str] = []
        """The ops that made numbers so far."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        counts = op_name(func) not in COPIES and op_spec(func).makes_numbers
        self.dtype = self._low if counts and len(self.names) == self._chosen else None
        if counts:
            self.names.append(op_name(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _unexplained(
    actual: Tensor, exact: Tensor, rounded: Tensor, dtype: torch.dtype
) -> Iterator[str]:
    """What of a tensor is not explained, each as it follows its name.

    Args:
        actual: floating, any shape.
        exact: float64 of that shape.
        rounded: [P, *shape], the results of the passes, the one to nearest last.
        dtype: of the roundings.
    """
    if not exact.numel():
        return
    x, passes, step = actual.double(), rounded.double(), _half_step(exact, actual.dtype)
    bound = torch.maximum(step, _spread_bound(passes - exact, exact))
    equal = (passes == x).any(0) | (x == exact) | (x.isnan() & exact.isnan())  # infinities too
    error = (x - exact).masked_fill(equal, 0)
    fails = ~(error.abs() <= bound)  # NaN fails
    roundings = f"roundings to {dtype_name(dtype)} explain"
    if fails.any():
        ratio = (error.abs() / bound).nan_to_num(math.inf, math.inf).masked_fill(~fails, -1)
        at = _index(ratio)
        yield (
            f"{_shown(at)}: actual {x[at]:.6g}, float64 {exact[at]:.6g}, error {abs(error[at]):.3g}"
            f"; {roundings} {bound[at]:.3g}; {int(fails.sum())} of {fails.numel()} elements fail"
        )
    parts = [_part(kept, exact, passes, error, step) for kept in _slices(exact.shape)]
    worst, text = max(parts, default=(0.0, ""))
    if worst > 1:
        yield text.format(explain=roundings)


def _part(
    kept: tuple[int, ...], exact: Tensor, passes: Tensor, error: Tensor, step: Tensor
) -> tuple[float, str]:
    """Of the parts with one index in each of the kept dimensions, the worst: how far beyond what is
    explained its factor is, 1 being all of that, and a sentence."""
    others = [d for d in range(exact.dim()) if d not in kept]
    size = exact.square().nansum(others).sqrt()

    def along(e: Tensor) -> Tensor:
        """Of each part, how far its errors [..., *shape] lead along its exact numbers."""
        return torch.where(size > 0, (e * exact).nan_to_num().sum(others) / size, 0)

    spread = _spread_bound(torch.stack([along(e) for e in passes - exact]), size)
    lead, bound = along(error), along(step * exact.sign()) + spread
    ratio = (lead.abs() / bound).nan_to_num(0)
    at = _index(ratio)
    place = iter(at)
    shown = _shown([next(place) if d in kept else ":" for d in range(exact.dim())])
    factor, most = float(lead[at] / size[at]), float(bound[at] / size[at])
    return float(ratio[at]), (
        f"{shown}: as a whole {1 + factor:.5g} times float64's; {{explain}} a factor of "
        f"{1 - most:.5g} to {1 + most:.5g}; {int((ratio > 1).sum())} of "
        f"{ratio.numel()} such parts fail"
    )


def _slices(shape: torch.Size) -> list[tuple[int, ...]]:
    """The dimensions that stay: the whole tensor, rows, and slices along each dimension."""
    all_but_last = tuple(range(len(shape) - 1))
    kept = dict.fromkeys([(), all_but_last, *((d,) for d in range(len(shape)))])
    return [x for x in kept if math.prod(shape[d] for d in x) < shape.numel()]


def _index(x: Tensor) -> tuple[int, ...]:
    """Of the largest element."""
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))


def _shown(index: Sequence[object]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _half_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of the neighbours of numbers in a dtype; more below float32's normals,
    which kernels may set to 0."""
    info, single = torch.finfo(dtype), torch.finfo(torch.float32)
    exponent = (torch.frexp(x).exponent - 1).clamp_min(round(math.log2(info.tiny)))
    half = torch.ldexp(torch.full_like(x, info.eps / 2), exponent)
    return torch.where(x.isfinite(), half, 0).clamp_min(single.tiny)


def _spread_bound(errors: Tensor, exact: Tensor) -> Tensor:
    """What roundings explain of each element's error: see the module's text.

    Args:
        errors: [P, *shape], the one to nearest last.
        exact: of that shape; elements of like size share their spread.

    Returns:
        That shape; infinite where no pass is finite.
    """
    shape, count, elements = exact.shape, len(errors), exact.numel()
    errors, exact = errors.reshape(count, -1), exact.flatten()
    finite = errors.isfinite()
    squares = torch.where(finite, errors, 0).square()
    known, total = finite.sum(0), squares.sum(0)
    order = exact.abs().nan_to_num(math.inf, math.inf).argsort()
    groups = max(1, elements // GROUP)
    group = torch.empty_like(order)
    group[order] = torch.arange(elements, device=exact.device) * groups // elements

    def shared(x: Tensor) -> Tensor:
        sums = torch.zeros(groups, dtype=torch.float64, device=x.device)
        return sums.index_add_(0, group, x.double())[group]

    mean = shared(total) / shared(known).clamp_min(1)
    halves = [(squares[i : count - 1 : 2].mean(0) / mean)[mean > 0] for i in (0, 1)]
    alike = float((halves[0] * halves[1]).mean() / (halves[0].mean() * halves[1].mean()) - 1)
    prior = 4 + 2 / max(alike, 1e-6) if alike == alike else 4.0
    spread = ((prior * mean + total) / (prior + known)).sqrt()
    others = ((prior * mean + total - squares) / (prior + known - 1)).sqrt()
    ratios = torch.where(others > 0, squares.sqrt() / others, 0)
    largest = ratios.amax(1)
    rare = _student(count - 1) * math.sqrt(1 + 1 / count) * float(largest.std())
    limit = max(float(largest.max()), (float(largest.mean()) + rare) / math.sqrt(2))
    return torch.where(known > 0, limit * spread, math.inf).reshape(shape)


def _student(freedom: int) -> float:
    """The value that Student's t exceeds with a chance of `FALSE_ALARMS`."""
    from scipy.special import stdtrit  # 0.1 s

    return -float(stdtrit(freedom, FALSE_ALARMS))
