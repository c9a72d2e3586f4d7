"""Private PyTorch interfaces: each one still does what mprun needs, and is used in `_torch*.py`.

A failure names the interface and PyTorch's version.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from mprun.precision import _torch
from mprun.watch import _torch_fakes

MPRUN = Path(_torch.__file__).parents[1]
CHECKS: dict[str, Callable[[], None]] = {}


def interface(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a check of what `_torch.py` uses `name` for."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = check
        return check

    return register


class Ops(_torch.TorchDispatchMode):
    """Lists the ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """A function mode that does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@interface("torch.utils._python_dispatch")
def dispatch() -> None:
    with Ops() as ops:
        torch.ones(2) + 1
        assert _torch.dispatch_modes() == [ops]
        with _torch.no_dispatch():
            torch.ones(2).relu()
        with _torch.outside_of_modes():
            torch.ones(2).neg()
    assert "aten::add.Tensor" in ops.names
    assert not {"aten::relu", "aten::neg"} & {*ops.names}
    assert not _torch.dispatch_modes()
    assert not _torch.is_traceable_wrapper_subclass(torch.ones(1))


@interface("torch.overrides._get_current_function_mode_stack")
def function_modes() -> None:
    with Calls() as outer, Calls() as inner:
        assert _torch.function_modes() == [outer, inner]
        with _torch.outside_of_modes():
            assert not torch.is_grad_enabled()


@interface("torch._C._current_autograd_node, Node._sequence_nr, autograd._get_sequence_nr")
def autograd_nodes() -> None:
    numbers: list[int | None] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            numbers.append(_torch.backward_node())
            assert _torch.in_backward()
            return gradients[0]

    x = torch.ones(1, requires_grad=True)
    following = _torch.next_node()
    y = Noted.apply(x)
    y.sum().backward()
    assert y.grad_fn is not None
    assert numbers == [_torch.node_number(y.grad_fn)] == [following]
    assert _torch.node_number(y.grad_fn.next_functions[0][0]) is None  # a parameter's node
    assert _torch.backward_node() is None
    assert not _torch.in_backward()


@interface("the stack of torch.utils.checkpoint and _engine_run_backward")
def recomputation() -> None:
    seen: list[tuple[bool, bool]] = []

    def block(x: Tensor) -> Tensor:
        seen.append((_torch.in_backward(), _torch.in_recomputation()))
        return x.sin()

    for reentrant in (False, True):
        seen.clear()
        x = torch.ones(1, requires_grad=True)
        y: Any = checkpoint(block, x, use_reentrant=reentrant)
        y.register_hook(lambda g: seen.append((_torch.in_backward(), _torch.in_recomputation())))
        y.sum().backward()
        # forward pass; a hook in the backward pass; the forward pass again
        assert seen == [(False, False), (True, False), (True, True)]


@interface("torch._C._dispatch_has_kernel_for_dispatch_key, OpOverload._op_dk")
def kernels() -> None:
    aten: Any = torch.ops.aten
    assert _torch.kernel_key(aten.add.Tensor, "cpu", False) is None
    key = _torch.kernel_key(aten.linear.default, "cpu", False)
    assert key is not None
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    with torch.no_grad(), Ops() as ops:
        result = _torch.call_kernel(aten.linear.default, key, x, w)
    assert torch.equal(result, F.linear(x, w))
    assert any("mm" in name for name in ops.names)


@interface("torch._C._dispatch_has_kernel_for_dispatch_key, for autocast")
def ops_of_autocast() -> None:
    assert _torch.autocast_has("linear")
    assert not _torch.autocast_has("relu")
    assert not _torch.autocast_has("no_such_op")


@interface("torch._ops, OpOverload._schema")
def ops() -> None:
    add = torch.ops.aten.add.Tensor
    assert isinstance(add, _torch.OpOverload)
    (packet,) = _torch.aten_packets("add")
    assert isinstance(packet, _torch.OpOverloadPacket)
    assert packet.Tensor is add
    assert [a.name for a in _torch.schema_of(add).arguments] == ["self", "other", "alpha"]
    written = _torch.schema_of(torch.ops.aten.add_.Tensor).arguments[0].alias_info
    assert written.is_write
    with pytest.raises(AttributeError):
        _torch.aten_packets("no_such_op")


@interface("Tensor._version, Module._parameters")
def fields() -> None:
    x = torch.ones(1)
    before = _torch.write_count(x)
    x.add_(1)
    assert _torch.write_count(x) == before + 1
    layer = nn.Linear(1, 1)
    assert [*_torch.own_parameters(layer)] == ["weight", "bias"]
    _torch.own_parameters(layer)["weight"] = torch.zeros(1, 1)  # type: ignore[assignment]
    assert layer(torch.ones(1)).item() == layer.bias.item()
    assert "num_batches_tracked" in _torch.own_buffers(nn.BatchNorm1d(1))


@interface("torch.nn.modules: _BatchNorm, _InstanceNorm")
def norms() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, _torch.BatchNorm) for kind in kinds)
    assert nn.BatchNorm2d.forward is _torch.BatchNorm.forward
    assert nn.InstanceNorm2d.forward is _torch.InstanceNorm.forward


@interface("torch.ops.mkldnn._is_mkldnn_bf16_supported")
def onednn() -> None:
    built = torch.backends.mkldnn.is_available()
    for dtype in (torch.bfloat16, torch.float16):
        assert (_torch.onednn_takes(dtype) is not None) is built
        has_lstm = _torch.onednn_has_lstm(dtype)
        assert isinstance(has_lstm, bool)
        _torch.onednn_has_lstm.cache_clear()
        with _torch_fakes.FakeTensorMode():  # a step is planned there before it is taken
            assert _torch.onednn_has_lstm(dtype) is has_lstm


@pytest.mark.parametrize("name", CHECKS)
def test_private_interface(name: str) -> None:
    try:
        CHECKS[name]()
    except Exception as error:
        pytest.fail(
            f"_torch*.py uses {name}, which changed in PyTorch {torch.__version__}: "
            f"{type(error).__name__}: {error}"
        )


# ---- no other module uses a private interface ---------------------------------------------------

NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}
"""Names that a leading underscore keeps apart from a named tuple's fields; they are public."""
REFLECTION = {"getattr", "hasattr", "setattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLE


def own_names(tree: ast.AST) -> set[str]:
    """What a module defines or assigns, by the last part of the name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


def private_uses(source: str) -> Iterator[str]:
    """Private names of torch that a module imports, and private attributes it does not define."""
    tree = ast.parse(source)
    own = own_names(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            torchs = (a.name.split(".") for a in node.names if a.name.startswith("torch"))
            names = [part for parts in torchs for part in parts]
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if ours else [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in REFLECTION:
            constants = (a.value for a in node.args[1:2] if isinstance(a, ast.Constant))
            names = [str(value) for value in constants]
        yield from (f"line {node.lineno}: {n}" for n in names if is_private(n))  # type: ignore[attr-defined]


def test_private_interfaces_are_used_in_few_modules() -> None:
    modules = [p for p in MPRUN.rglob("*.py") if not p.name.startswith("_torch")]
    users = [str(p) for p in modules if [*private_uses(p.read_text(encoding="utf-8"))]]
    assert not users, "use a function of mprun/precision/_torch.py"
