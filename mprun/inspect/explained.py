"""`assert_explained`: a test of a kernel in 16 bits without a tolerance that somebody guessed.

How large rounding errors may be is measured on a reference, a function of PyTorch's ops: in
float64, and several times in the dtype with each result rounded stochastically, once to nearest
(`Emulated16`). The differences e of those passes from float64 are errors that a sound kernel may
have.

*Elements.* An element fails if its error is beyond half a step of the dtype and the bound that
`element_bounds` (`rounding_oracle.py`) makes of those errors.

*Parts.* A factor of 1.01 hides in the roundings of each element, not in those of a row. So the
whole tensor, its rows and its slices along each dimension are judged in the same way, by one number
each: of the errors e and float64's r in a part, sum(e r) / |r|.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mprun.inspect.divergence.boundaries import exact_arithmetic, floating
from mprun.inspect.rounding_oracle import element_bounds
from mprun.precision.emulate import Emulated16
from mprun.precision.nested import all_tensors, map_tensors, to_dtype
from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW, unfused
from mprun.watch.updates import own_random_numbers

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
    """Assert that a result in 16 bits differs from float64's by no more than rounding errors.

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
            `nll_loss`, and the weights' gradients of `layer_norm`), as for one that rounds twice
            (on a CPU `rsqrt` of fewer than 32 numbers is `1 / sqrt`). A module gets its
            parameters in the dtype. None: `actual` itself, whose ops must be PyTorch's.
        backward: compare the gradients of floating inputs and of a module's parameters as well,
            for random gradients of the outputs.
        passes: stochastic ones; more of them make the bound of a tensor of few elements tighter.
        seed: of the roundings, of those gradients and of what the functions draw.

    Raises:
        AssertionError: an element's error is too large, or is NaN where float64 is not; the
            message has the worst element with its errors.
        TypeError: an argument has another type than these.
        ValueError: an argument has another value, or the outputs differ in number or shape.
    """
    function: Any = actual if reference is None else reference
    _check(inputs, dtype, function, passes)
    runs = _Runs(to_dtype(inputs, dtype), dtype, backward, seed)
    tested, function = (_in(f, dtype) for f in (actual, function))
    exact = runs.exact(function)
    results = {"output": tested} if isinstance(tested, Tensor) else runs.results(tested, dtype)
    rounded = [runs.rounded(function, step) for step in (*range(1, passes + 1), None)]
    shapes, expected = ({n: [*x.shape] for n, x in each.items()} for each in (results, exact))
    if shapes != expected:
        raise ValueError(f"actual gives {shapes}, and the reference {expected}")
    failures = []
    for name, x in results.items():
        texts = _beyond_bound(x, exact[name], [one[name] for one in rounded], dtype)
        failures += [f"{name}{text}" for text in texts]
    if failures:
        raise AssertionError("\n".join(failures))


def _check(inputs: tuple[Any, ...], dtype: torch.dtype, reference: Any, passes: int) -> None:
    """See `assert_explained` for what is raised."""
    if any(map(callable, inputs)):
        raise TypeError("an input is a function; write the reference by its name: reference=f")
    if not callable(reference):
        kind = type(reference).__name__
        raise TypeError(f"the reference is a {kind}; legal is a function, as actual or reference=f")
    if dtype not in LOW or passes < 2:
        legal = "torch.bfloat16, torch.float16; 2 or more passes"
        raise ValueError(f"dtype is {dtype} and passes is {passes}; legal: {legal}")


@dataclass(frozen=True)
class _Runs:
    """Runs functions on the same inputs, with the same random numbers."""

    inputs: tuple[Any, ...]  # In the dtype
    dtype: torch.dtype
    backward: bool
    seed: int

    def rounded(self, function: Function, step: int | None) -> dict[str, Tensor]:
        """The results in the dtype, each one rounded; to nearest where there is no step."""
        arithmetic = Emulated16("stochastic", "infinity", "float32", self.seed)
        if step is not None:
            arithmetic.begin_step(step)
        with arithmetic.region():
            return self.results(function, self.dtype)

    def exact(self, function: Function) -> dict[str, Tensor]:
        """The results in float64 of inputs in the dtype."""
        with unfused(), exact_arithmetic(nn.Module()):
            return self.results(function, torch.float64)

    def results(self, function: Function, dtype: torch.dtype) -> dict[str, Tensor]:
        """The results in a dtype, by the kernels that the function calls."""
        inputs = map_tensors(lambda x: x.detach().clone(), to_dtype(self.inputs, dtype))
        wanted = {f"gradient of input {i}": x for i, x in enumerate(floating(inputs))}
        function = _in(function, dtype)
        if isinstance(function, nn.Module):
            own = function.named_parameters()
            wanted |= {f"gradient of {n}": p for n, p in own if p.requires_grad}
        for x in wanted.values():
            x.requires_grad_(self.backward)
        drawn = torch.Generator().manual_seed(self.seed)
        with own_random_numbers(all_tensors(inputs)):
            torch.manual_seed(self.seed)  # a function that draws (dropout) draws the same each time
            outputs = floating(function(*inputs))
            several = len(outputs) > 1
            results = {f"output {i}" if several else "output": x for i, x in enumerate(outputs)}
            if self.backward:
                # Multiples of 1/32 that each dtype has: products with them are exact.
                given = [torch.randint(-64, 65, x.shape, generator=drawn).to(x) for x in outputs]
                sums = [(x * y / 32).sum() for x, y in zip(outputs, given, strict=True)]
                heads = [x for x in sums if x.requires_grad]
                gradients = torch.autograd.grad(heads, [*wanted.values()], materialize_grads=True)
                results |= zip(wanted, gradients, strict=True)
        return {name: x.detach() for name, x in results.items()}


def _in(function: Any, dtype: torch.dtype) -> Any:
    """A copy of a module in a dtype; anything else itself."""
    return copy.deepcopy(function).to(dtype) if isinstance(function, nn.Module) else function


def _beyond_bound(
    actual: Tensor, exact: Tensor, rounded: Sequence[Tensor], dtype: torch.dtype
) -> list[str]:
    """What of a tensor is beyond its bound; of the passes, the one to nearest is the last."""
    if not exact.numel():
        return []
    shape, x, passes = exact.shape, actual.double(), torch.stack([*rounded]).double()
    equal = (passes == x).any(0) | (x == exact) | (x.isnan() & exact.isnan())  # infinities too
    error = (x - exact).masked_fill(equal, 0)  # infinity minus infinity would be NaN
    numbers = torch.stack([x, exact, error, *(passes - exact)])
    step = _half_step(exact, actual.dtype)
    # The sizes of sums over elements, the whole tensor, rows, and slices along each dimension; the
    # dict drops those that are the same.
    slices = [[n if i == d else 1 for i, n in enumerate(shape)] for d in range(len(shape))]
    rows = [[*shape[:-1], 1], [1] * len(shape)] if shape else []
    sizes = dict.fromkeys(map(tuple, [shape, *rows, *slices]))
    elements, *parts = [_judged(numbers, step, size, dtype) for size in sizes]
    return [text for ratio, text in (elements, *sorted(parts)[-1:]) if ratio > 1]


def _judged(
    numbers: Tensor, step: Tensor, size: tuple[int, ...], dtype: torch.dtype
) -> tuple[float, str]:
    """The worst of a tensor's elements, or of its parts of one kind.

    Args:
        numbers: [3 + P, *shape], float64: the actual numbers, float64's, the error, and the errors
            of the passes, the one to nearest last.
        step: [*shape], half a step of the actual dtype.
        size: of the parts' sums: the shape for elements, with a 1 in each dimension of a part.
        dtype: of the roundings.

    Returns:
        The error over its bound, and a sentence.
    """
    shape, true = step.shape, numbers[1].nan_to_num(0, 0, 0)
    length = true.square().sum_to_size(size).sqrt()
    along = torch.where(length > 0, true / length, 1) if size != shape else torch.ones_like(true)
    # where: an infinity times 0 would be NaN
    sums = torch.where(along != 0, numbers * along, 0).sum_to_size(len(numbers), *size)
    error, steps = sums[2].abs(), (step * along.abs()).sum_to_size(size)
    spread = element_bounds(sums[3:], length)
    # in a part the half steps may all have one sign, so they are added to the spread
    bound = torch.maximum(steps, spread) if size == shape else steps + spread
    ratio = (error / bound).nan_to_num(math.inf, math.inf)  # one that is not finite is beyond all
    at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), size))
    place = (str(i) if m == n else ":" for i, m, n in zip(at, size, shape, strict=True))
    factor = "" if size == shape else f" (as a whole {sums[0][at] / sums[1][at]:.5g} times)"
    return float(ratio[at]), (
        f"[{', '.join(place)}]: actual {sums[0][at]:.6g}, float64 {sums[1][at]:.6g}{factor}, error "
        f"{error[at]:.3g}; roundings to {dtype_name(dtype)} make at most {bound[at]:.3g}; "
        f"{int((ratio > 1).sum())} of {ratio.numel()} {'such parts' if factor else 'elements'} fail"
    )


def _half_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of the neighbours of finite numbers in a dtype; more below float32's
    normals, which kernels may set to 0."""
    info, single = torch.finfo(dtype), torch.finfo(torch.float32)
    exponent = torch.frexp(x).exponent.clamp_min(round(math.log2(info.tiny)) + 1)
    return torch.ldexp(torch.full_like(x, info.eps / 4), exponent).clamp_min(single.tiny)
