"""`assert_explained`: sound kernels pass always, and a small fault does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mprun
from mprun.inspect.explained import assert_explained

DTYPES = [torch.bfloat16, torch.float16]
Make = Callable[[], tuple[Tensor, ...]]
draw = torch.randn


def manual_softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def manual_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def heads() -> tuple[Tensor, ...]:
    return draw(2, 2, 16, 8), draw(2, 2, 16, 8), draw(2, 2, 16, 8)


SOUND: dict[str, tuple[Callable[..., Tensor], Make]] = {
    "softmax": (lambda x: x.softmax(-1), lambda: (draw(8, 50) * 3,)),
    "softmax by hand": (manual_softmax, lambda: (draw(8, 50) * 3,)),
    "softmax in float32": (lambda x: x.float().softmax(-1).to(x.dtype), lambda: (draw(8, 50),)),
    "layer norm": (layer_norm, lambda: (draw(8, 64), draw(64), draw(64))),
    "layer norm of equal numbers": (layer_norm, lambda: (torch.ones(4, 64), draw(64), draw(64))),
    "rms norm by hand": (rms_norm, lambda: (draw(32, 64), draw(64))),
    "matmul": (torch.matmul, lambda: (draw(16, 128), draw(128, 16))),
    "attention": (F.scaled_dot_product_attention, heads),
    "attention by hand": (manual_attention, heads),
    "attention of zeros": (manual_attention, lambda: (torch.zeros(1, 1, 9, 8), *heads()[1:])),
    "cancellation": (lambda x, y: (x + y) - x, lambda: (draw(8, 32) * 100, draw(8, 32))),
    "all cancels": (lambda x, y: x @ y - x @ y, lambda: (draw(8, 32), draw(32, 8))),
    "a mean": (lambda x, y: ((x - y) ** 2).mean(), lambda: (draw(16, 20), draw(16, 20))),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.exhaustive)], ids=len
)
def test_sound_kernels_pass_forward_and_backward(
    seeds: range, name: str, dtype: torch.dtype
) -> None:
    function, make = SOUND[name]
    for seed in seeds:
        torch.manual_seed(seed)
        # The CPU's kernel adds up the gradients of weight and bias in 16 bits.
        backward = not name.startswith("layer norm")
        assert_explained(function, *make(), dtype=dtype, backward=backward, seed=seed)


def test_a_kernel_that_rounds_twice_passes_beside_a_reference_that_does() -> None:
    """The CPU's rsqrt of fewer than 32 numbers rounds the root, then its inverse."""

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return x * (1 / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()) * weight

    numbers = torch.linspace(0.5, 2, 31).bfloat16()
    assert torch.equal(numbers.rsqrt(), 1 / numbers.sqrt())
    for seed in (138, 178):  # these fail where the reference says rsqrt
        torch.manual_seed(seed)
        x, weight = draw(8, 64), draw(64)
        assert_explained(rms_norm, x, weight, reference=reference, backward=True, seed=seed)


def test_half_a_step_of_bfloat16_passes_where_a_guessed_tolerance_fails() -> None:
    """An atol of 0.06 around 16, where neighbours are 0.125 apart (sglang #35795)."""
    flaked = 0
    for seed in range(20):
        x = 16 + 8 * torch.rand(4, 8, generator=torch.Generator().manual_seed(seed))
        kernel = (x.bfloat16().float() * 1.003).bfloat16()
        flaked += not torch.allclose(kernel.float(), x.bfloat16().float() * 1.003, 0, 0.06)
        assert_explained(kernel, x, reference=lambda y: (y.float() * 1.003).to(y.dtype))
    assert flaked > 10


@pytest.mark.parametrize("name", ["matmul", "layer norm"])
def test_a_lost_factor_on_one_row_fails(name: str) -> None:
    function, make = SOUND[name]

    def kernel(*inputs: Tensor) -> Tensor:
        result = function(*(x.float() for x in inputs)).clone()
        result[3] *= 1.01
        return result.bfloat16()

    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(AssertionError, match=r"output\[3, .+\]: .* make at most "):
            assert_explained(kernel, *make(), reference=function)


def test_the_message_has_the_worst_element_and_its_errors() -> None:
    torch.manual_seed(0)
    x, w = draw(8, 64), draw(64, 8) / 8

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        result = x @ w
        result[2, 5] += 1
        return result

    with pytest.raises(AssertionError) as error:
        assert_explained(kernel, x, w, dtype=torch.float16, reference=torch.matmul)
    message = str(error.value)
    assert message.startswith("output[2, 5]: actual ")
    assert "float64" in message
    assert "error 1; roundings to float16 make at most 0.00" in message
    assert "1 of 64 elements fail" in message


def test_a_kernel_that_adds_up_in_the_dtype_passes_beside_a_reference_that_does() -> None:
    def one_by_one(x: Tensor, w: Tensor, order: int = 1) -> Tensor:
        total = torch.zeros(len(x), w.shape[1], dtype=x.dtype)
        for k in range(x.shape[1])[::order]:
            total = total + x[:, k : k + 1] * w[k : k + 1]
        return total

    for seed in range(3):
        torch.manual_seed(seed)
        x, w = draw(8, 24), draw(24, 8)
        assert_explained(lambda x, w: one_by_one(x, w, -1), x, w, reference=one_by_one)
        assert_explained(torch.matmul, x, w, reference=one_by_one)  # float32 is better: fine
    with pytest.raises(AssertionError):
        assert_explained(one_by_one, draw(8, 256), draw(256, 8), reference=torch.matmul)


class LosesScale(torch.autograd.Function):
    """Twice its input, with a gradient of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_a_wrong_gradient_fails_where_the_output_is_right() -> None:
    x = draw(4, 8)
    assert_explained(LosesScale.apply, x, reference=lambda x: 2 * x)
    with pytest.raises(AssertionError, match=r"^gradient of input 0"):
        assert_explained(LosesScale.apply, x, reference=lambda x: 2 * x, backward=True)
    with pytest.raises(AssertionError, match=r"^gradient of input 0.*: actual 0, "):
        assert_explained(lambda x: 2 * x.detach(), x, reference=lambda x: 2 * x, backward=True)


def test_parameters_of_a_module_have_gradients_too_and_it_does_not_change() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert_explained(model, draw(6, 8), backward=True)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())


def test_nan_fails_and_infinities_pass_where_the_format_has_no_larger_number() -> None:
    x = torch.tensor([1.0, 300.0])
    assert_explained(lambda x: x * x, x, dtype=torch.float16)
    with pytest.raises(AssertionError, match=r"output\[1\]: actual nan, float64 90000"):
        assert_explained(torch.tensor([1.0, math.nan]).half(), x, dtype=torch.float16, reference=sq)
    with pytest.raises(AssertionError, match=r"output\[0\]: actual inf, float64 1"):
        assert_explained(torch.tensor([math.inf] * 2).half(), x, dtype=torch.float16, reference=sq)
    with pytest.raises(AssertionError, match=r"output\[0\]: actual -7, float64 -inf"):
        assert_explained(lambda x: torch.full_like(x, -7), torch.zeros(1), reference=torch.log)


def sq(x: Tensor) -> Tensor:
    return x * x


def test_it_changes_no_random_numbers() -> None:
    x, before = draw(4), torch.get_rng_state()
    mprun.assert_explained(F.dropout, x)
    assert torch.equal(before, torch.get_rng_state())


SHAPES = r"{'output': \[3\]}, and the reference {'output': \[2\]}"
GRADIENTS = r"actual gives {'output': \[2\]}, and .* 'gradient of input 0': \[2\]}"


@pytest.mark.parametrize(
    ("given", "options", "kind", "text"),
    [
        ((3, draw(2)), {}, TypeError, "reference is a int; legal is a function"),
        ((sq, sq, draw(2)), {}, TypeError, "write the reference by its name"),
        ((sq, draw(2)), {"dtype": torch.float64}, ValueError, "legal: torch"),
        ((sq, draw(2)), {"passes": 1}, ValueError, "2 or more"),
        ((draw(2), draw(2)), {"reference": sq, "backward": True}, ValueError, GRADIENTS),
        ((draw(3), draw(2)), {"reference": sq}, ValueError, SHAPES),
    ],
)
def test_wrong_use_is_told(
    given: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        assert_explained(*given, **options)
