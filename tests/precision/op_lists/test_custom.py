"""Custom autograd functions under op lists: torch.amp's decorators as under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mprun.precision import OpListCaster
from mprun.precision.op_lists import op_lists
from tests.each import each
from tests.precision.op_lists import BF16, FP16, FP32, caster, same, shipped

forward_amp = torch.amp.custom_fwd(device_type="cpu")
backward_amp = torch.amp.custom_bwd(device_type="cpu")


def product(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
    ctx.save_for_backward(x, w)
    return x @ w.t()


def gradients(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return g @ w, g.t() @ x


class Plain(Function):
    forward, backward = staticmethod(product), staticmethod(gradients)


class Amp(Function):
    forward, backward = staticmethod(forward_amp(product)), staticmethod(backward_amp(gradients))


class AmpOnce(Function):
    forward = staticmethod(forward_amp(product))
    backward = staticmethod(once_differentiable(backward_amp(gradients)))


class InFloat32(Function):
    forward = staticmethod(
        torch.amp.custom_fwd(product, device_type="cpu", cast_inputs=torch.float32)
    )
    backward = staticmethod(backward_amp(gradients))


DECORATED = (Amp, AmpOnce, InFloat32)


class Model(nn.Module):
    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(3, 6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function.apply(self.first(x), self.weight)
        return out


def trained(
    function: type[Function], region: Callable[[], Any], backward: Callable[[Tensor], None]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs and gradients of one step."""
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(4, 6)
    with region():
        out = model(x)
    backward(out.float().square().sum())
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def by_engine(loss: Tensor) -> None:
    loss.backward()


@each("dtype", [BF16, FP16])
@each("function", DECORATED)
@each("own", [False, True], ids=["loss.backward", "caster.backward"])
def test_a_decorated_function_gives_autocast_s_outputs_and_gradients(
    own: bool, function: type[Function], dtype: torch.dtype
) -> None:
    theirs = trained(function, lambda: torch.autocast("cpu", dtype), by_engine)
    lists = caster(shipped("native"), dtype)
    ours = trained(function, lists.region, lists.backward if own else by_engine)
    assert same(ours, theirs)
    assert len(ours[1]) == 3


def test_backward_is_cast_by_the_lists_and_not_by_autocast_s() -> None:
    seen: list[torch.dtype] = []

    class Exponential(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            seen.append(x.exp().dtype)
            seen.append((x.unsqueeze(0) @ x.unsqueeze(1)).dtype)
            return g * x

    x = torch.randn(3, requires_grad=True)
    lists = OpListCaster(op_lists(lower=["exp"], fp32=["matmul"]), BF16)
    with lists.region():
        out = Exponential.apply(x)  # type: ignore[no-untyped-call]
    out.float().sum().backward()
    assert seen == [BF16, FP32]
    assert torch.exp(x).dtype == FP32  # nothing is left on


def test_an_undecorated_function_fails_as_under_autocast_and_the_remedy_is_named() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        trained(Plain, lambda: torch.autocast("cpu", BF16), by_engine)
    with pytest.raises(RuntimeError, match="same dtype") as error:
        trained(Plain, caster(shipped("native")).region, by_engine)
    assert "decorate forward with torch.amp.custom_fwd(device_type='cpu')" in str(error.value)
    assert "Plain.backward met tensors of several dtypes" in str(error.value)


def test_function_apply_is_pytorch_s_again_after_the_region() -> None:
    before = vars(Function)["apply"]
    with caster().region():
        assert vars(Function)["apply"] is not before
    assert vars(Function)["apply"] is before
