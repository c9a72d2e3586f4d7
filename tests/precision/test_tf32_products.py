"""Where TF32 is emulated every product of PyTorch is rounded: over `OpInfo`, in whole modules."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves, tree_map

from mprun.precision import EmulatedTf32
from mprun.precision.arithmetic import _Tf32Mode
from mprun.precision.products import CLOSED
from tests.each import each
from tests.op_info import op_infos, samples, title
from tests.precision import normal
from tests.precision.test_arithmetic import exact_tf32

# ---- no product escapes --------------------------------------------------------------------------

PRODUCT = re.compile(
    r"aten::(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|vdot|_addmm_activation|_slow_conv2d_forward"
    r"|(mkldnn|cudnn|miopen)_convolution|convolution|convolution_backward|slow_conv\w+)_?$"
)
"""PyTorch's ops that multiply and add, as its profiler names them."""

SPARSE = {"sparse.sampled_addmm", "sparse.mm (reduce)"}
"""Hardware has no TF32 for them (cuSPARSE computes in float32)."""

RAISES = {"to_sparse", "sparse.sampled_addmm"}
"""They cannot run below a dispatch mode: PyTorch's modes do not take their tensors."""


@contextmanager
def labelled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the profiler sees each call of the emulation, by the name of the op."""
    dispatch = _Tf32Mode.__torch_dispatch__

    def labelling(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rounded = "rounded" if func in self.ROUNDED else "passed on"
        with record_function(f"{rounded} {func}"):
            return dispatch(self, func, types, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(_Tf32Mode, "__torch_dispatch__", labelling)
        yield


def outermost(event: Any) -> str:
    while event.cpu_parent is not None:
        event = event.cpu_parent
    return str(event.name)


def escaped(events: Any) -> dict[str, set[str]]:
    """By the op that was called: products not handed to the emulation, or by it on unrounded.

    The events form a tree. A product is fine below a call that rounded its inputs, or above one: it
    is then what autograd saw before the emulation did.
    """
    above_rounded: set[int] = set()
    for event in events:
        if event.name.startswith("rounded"):
            while (event := event.cpu_parent) is not None:
                above_rounded.add(id(event))

    def below_rounded(event: Any) -> bool:
        while (event := event.cpu_parent) is not None:
            if event.name.startswith(("rounded", "passed on")):
                return bool(event.name.startswith("rounded"))
        return False

    found: dict[str, set[str]] = {}
    for event in events:
        if not PRODUCT.match(event.name) or id(event) in above_rounded or below_rounded(event):
            continue
        found.setdefault(outermost(event), set()).add(event.name)
    return found


def run(op: Any, sample: Any) -> None:
    """An op's forward and backward pass."""
    result = op(sample.input, *sample.args, **sample.kwargs)
    outs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if outs:
        torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])


def holes(
    ops: list[Any], count: int, monkeypatch: pytest.MonkeyPatch, arithmetic: EmulatedTf32
) -> tuple[dict[str, set[str]], set[str]]:
    """The products that escape in the first `count` samples of each op, and what cannot run."""
    given = [(title(op), op, x) for op in ops for x in samples(op, count, requires_grad=True)]
    raised: set[str] = set()
    with labelled(monkeypatch), profile(activities=[ProfilerActivity.CPU]) as profiled:
        for name, op, sample in given:
            with record_function(name):
                try:
                    with arithmetic.region():
                        run(op, sample)
                except (RuntimeError, NotImplementedError):
                    raised.add(name)
    return escaped(profiled.events()), raised


WITH_PRODUCTS = re.compile(
    r".*(mm|mv|dot|conv\d|conv_tr|matmul|linear|attention|einsum|inner|cdist|pinv|matrix_exp|polar"
    r"|matrix_sqrth|matrix_power|cov|lstsq|linalg.qr|linalg.svd|linalg.solve$|cholesky_solve)"
)
"""Ops with products in them, for runs that cannot take minutes for all of them."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.representative("with products")
@pytest.mark.parametrize(
    ("names", "count"),
    [(WITH_PRODUCTS, 1), (re.compile(""), 2)],
    ids=["with products", "all"],
)
def test_no_product_of_any_op_escapes_forward_or_backward(
    names: re.Pattern[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arithmetic = EmulatedTf32()
    looked_at = [op for op in op_infos() if title(op) not in SPARSE and names.match(op.name)]
    assert len(looked_at) > 50
    failed, raised = holes(looked_at, count, monkeypatch, arithmetic)
    assert failed == {}
    assert raised <= RAISES
    # What cannot be opened is listed: of PyTorch's table the fused attention called by name.
    assert {s.op.removeprefix("aten.") for s in arithmetic.substitutions} <= CLOSED


# ---- values against inputs rounded by hand -------------------------------------------------------

ADDED = {"addmm": 0, "addbmm": 0, "baddbmm": 0, "addmv": 0, "nn.functional.linear": 2}
"""The tensor that is added to the product, by its position; not rounded."""
CONVOLUTIONS = [f"nn.functional.conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]
ADDED |= dict.fromkeys(CONVOLUTIONS, 2)
PRODUCTS = (*ADDED, "mm", "bmm", "mv", "dot", "vdot", "matmul", "__rmatmul__", "inner")
VECTORS = {"addmv", "mv", "dot", "vdot", "matmul", "__rmatmul__", "inner"}
"""Their gradients are in part products of single numbers, which are no matmuls."""


def tensors(op: Any, sample: Any) -> list[Tensor]:
    return [x for x in (sample.input, *sample.args) if isinstance(x, Tensor)]


def called(op: Any, sample: Any, instead: Mapping[int, Tensor]) -> Tensor:
    """The op with other tensors, by the identity of those of the sample."""
    args = tree_map(lambda x: instead.get(id(x), x), (sample.input, *sample.args))
    result: Tensor = op(args[0], *args[1:], **sample.kwargs)
    return result


def close(found: Tensor, exact: Tensor) -> bool:
    """float32 sums of some hundred products are off by some 1e-6 of the largest, TF32 by 1e-4."""
    if not exact.numel():
        return True
    return bool((found.double() - exact).abs().max() <= 1e-5 * exact.abs().max())


@each("op", [x for x in op_infos() if x.name in PRODUCTS], ids=title)
def test_a_product_is_the_exact_one_of_rounded_factors(op: Any) -> None:
    changes = 0
    for sample in samples(op, 6, requires_grad=True):
        given = tensors(op, sample)
        if not all(x.numel() for x in given) or (op.name == "inner" and given[0].dim() == 0):
            continue
        factors = [x for i, x in enumerate(given) if i != ADDED.get(op.name)]
        exact = {id(x): x.detach().double().requires_grad_() for x in given}
        for x in factors:
            exact[id(x)] = exact_tf32(x.detach()).double().requires_grad_()
        with EmulatedTf32().region():
            ours = called(op, sample, {})
        theirs = called(op, sample, exact)
        assert close(ours.detach(), theirs.detach())
        changes += not close(called(op, sample, {}).detach(), theirs.detach())
        if not ours.requires_grad or op.name in VECTORS or any(x.dim() < 2 for x in factors):
            continue
        g = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
        with EmulatedTf32().region():
            grads = torch.autograd.grad(ours, given, g)
        for x, grad in zip(given, grads, strict=True):
            is_factor = any(x is f for f in factors)
            incoming = (exact_tf32(g) if is_factor else g).double()
            (wanted,) = torch.autograd.grad(theirs, exact[id(x)], incoming, retain_graph=True)
            assert close(grad, wanted), f"the gradient of {tuple(x.shape)}"
    assert changes, "rounding changes nothing in these samples: they prove nothing"


A, B, C = normal(32, 48), normal(48, 40, seed=1), normal(32, 40, seed=2)
AB = exact_tf32(A).double() @ exact_tf32(B).double()
X, Y, W = (  # multiples of 2^-12: TF32 cannot hold them, and their sums are exact in float32
    (normal(*shape, seed=i) * 2**12).round() / 2**12
    for i, shape in enumerate([(40, 30), (40, 6), (3, 30, 6)])
)
WHOLE = W.round()


def bilinear(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Two matmuls. One of x and weight in whole numbers: their sum is exact in any order."""
    first = torch.einsum("nj,ijk->nik", exact_tf32(x).double(), exact_tf32(weight).double())
    assert torch.equal(first.float().double(), first)
    return torch.einsum("nik,nk->ni", exact_tf32(first.float()).double(), exact_tf32(y).double())


BY_HAND: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
    "mm, out=": (lambda: torch.mm(A, B, out=torch.empty(32, 40)), AB),
    "addmm, in place": (lambda: C.clone().addmm_(A, B), C + AB),
    "addmv, in place": (lambda: C[:, 0].clone().addmv_(A, B[:, 0]), (C + AB)[:, 0]),
    "_addmm_activation": (lambda: torch._addmm_activation(C[0], A, B), (C[0] + AB).relu()),
    "linear, inference": (lambda: inferred(lambda: F.linear(A, B.T)), AB),
    "bilinear": (lambda: F.bilinear(X, Y, WHOLE), bilinear(X, Y, WHOLE)),
}


def inferred(call: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return call()


@each("name", BY_HAND)
def test_a_call_of_another_kind_is_the_exact_product_too(name: str) -> None:
    call, exact = BY_HAND[name]
    with EmulatedTf32().region():
        ours = call()
    assert close(ours, exact)
    assert not close(call(), exact)


# ---- whole modules -------------------------------------------------------------------------------


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM, two layers, both ways": lambda: nn.LSTM(8, 6, 2, bidirectional=True),
    "LSTM with a projection": lambda: nn.LSTM(8, 6, proj_size=3),
    "GRU": lambda: nn.GRU(8, 6),
    "RNN": lambda: nn.RNN(8, 6),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2
    ),
}


@each("name", MODULES)
def test_a_module_in_evaluation_is_rounded_as_in_training(name: str) -> None:
    """Evaluation takes fast paths of one kernel, training is a chain of ops."""
    torch.manual_seed(0)
    module, x = MODULES[name](), normal(4, 3, 8)
    first: Callable[[Any], Tensor] = lambda y: y[0] if isinstance(y, tuple) else y  # noqa: E731
    with EmulatedTf32().region():
        training = first(module(x)).detach()
        with torch.no_grad():
            evaluation = first(module.eval()(x))
        with torch.inference_mode():
            inference = first(module(x))
    assert torch.equal(training, evaluation)
    assert torch.equal(training, inference)
    with torch.no_grad():
        assert not close(first(module(x)), training.double())


def test_what_cannot_be_rounded_is_warned_of_once_and_listed() -> None:
    q = normal(1, 2, 4, 8)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    arithmetic = EmulatedTf32()
    with warnings.catch_warnings(record=True) as caught, arithmetic.region():
        warnings.simplefilter("always")
        for _ in range(2):
            attention(q, q, q)
    (warning,) = caught
    assert "_scaled_dot_product_flash_attention_for_cpu is not rounded to TF32" in str(
        warning.message
    )
    (listed,) = arithmetic.substitutions
    assert listed[:2] == ("aten._scaled_dot_product_flash_attention_for_cpu", "float32")


def test_the_switches_are_as_before() -> None:
    def switches() -> tuple[bool, bool, bool]:
        backends = torch.backends
        fast: bool = backends.mha.get_fastpath_enabled()  # type: ignore[no-untyped-call]
        return fast, torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()

    before = switches()
    with pytest.raises(RuntimeError, match="input"), EmulatedTf32().region():
        nn.LSTM(3, 2)(normal(4, 1, 2))
    assert switches() == before
