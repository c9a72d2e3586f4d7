"""PyTorch's own lists by name: the dtypes and bits of torch.autocast, op by op and run by run."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mprun.cli.main import main
from mprun.config import compose
from mprun.precision.op_lists.lists import NOT_EVERYWHERE, name_of, spelled
from mprun.train.assemble.dtype_choices import choose_op_lists
from tests.each import each
from tests.op_info import op_infos, samples, title
from tests.precision import normal
from tests.precision.op_lists import BF16, FP16, FP32, caster, result, same, shipped, to
from tests.run.test_resume import assert_equal, exact_lines, trained
from tests.torch_version import torch_is

SHIPPED = ("hmp", "hmp_resnet50", "native", "native_uniform")

# ---- PyTorch's own test cases --------------------------------------------------------------------


@pytest.fixture(scope="module")
def testing() -> Any:
    """PyTorch's module of test cases, without the rest of its test machinery and its needs."""
    name, common = (
        "torch.testing._internal.autocast_test_lists",
        "torch.testing._internal.common_utils",
    )
    before = {key: sys.modules.pop(key, None) for key in (name, common)}
    stub = types.ModuleType(common)
    stub.TEST_WITH_ROCM, stub.TestCase = False, object  # type: ignore[attr-defined]
    sys.modules[common] = stub
    try:
        module = importlib.import_module(name)
    finally:
        for key, value in before.items():
            sys.modules.pop(key, None)
            if value is not None:
                sys.modules[key] = value
    return module


@pytest.fixture(scope="module")
def lists(testing: Any) -> Any:
    """The cases for the CPU."""
    torch.manual_seed(0)
    return testing.AutocastCPUTestLists(torch.device("cpu"))


KINDS = (
    *("torch_16", "torch_fp32", "nn_16", "nn_fp32", "torch_need_autocast_promote"),
    *("torch_expect_builtin_promote", "methods_expect_builtin_promote"),
)


def cases(lists: Any, kind: str, dtype: torch.dtype) -> Iterable[tuple[str, Any, Any]]:
    """Each op of a kind with its arguments, by position and by name."""
    for op, *rest in getattr(lists, kind):
        if "promote" in kind:  # arguments for bfloat16, then for float16
            yield op, rest[0] if dtype == BF16 else rest[1], {}
        else:
            args = in_dtype(rest[0], dtype) if "fp32" in kind else rest[0]
            yield op, args, rest[1] if len(rest) > 1 else {}


def in_dtype(args: Any, dtype: torch.dtype) -> Any:
    """Arguments for an op of the float32 list, which PyTorch gives in bfloat16 alone."""
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype == BF16 else x for x in args)


def ways(op: str, args: Any) -> dict[str, Callable[..., Any]]:
    """Function of torch, of torch._C._nn, and method; as far as there are such."""
    found = {
        "torch": getattr(torch, op, None),
        "torch._C._nn": getattr(torch._C._nn, op, None),
        "Tensor": getattr(Tensor, op, None) if isinstance(args[0], Tensor) else None,
        "aten": getattr(torch.ops.aten, op, None),
    }
    return {name: function for name, function in found.items() if function is not None}


@each("dtype", [BF16, FP16])
@each("kind", KINDS)
def test_every_case_of_pytorch_s_tests_gives_autocast_s_dtype_and_bits(
    lists: Any, kind: str, dtype: torch.dtype
) -> None:
    native = caster(shipped("native"), dtype)
    ran = set()
    for op, args, kwargs in cases(lists, kind, dtype):
        for way, function in ways(op, args).items():

            def call(function: Any = function, args: Any = args, kwargs: Any = kwargs) -> Any:
                return function(*args, **kwargs)

            with torch.autocast("cpu", dtype):
                theirs = result(call)
            with native.region():
                ours = result(call)
            if isinstance(theirs, type) or isinstance(ours, type):
                assert ours is theirs, f"{way}.{op}: {ours}, and under autocast {theirs}"
            else:
                assert same(ours, theirs), f"{way}.{op}: {ours}, and under autocast {theirs}"
                ran.add(op)
    assert ran == {op for op, _, _ in cases(lists, kind, dtype)}


CUDA_KINDS = {
    "torch_fp16": (torch, BF16),
    "nn_fp16": (torch._C._nn, BF16),
    "linalg_fp16": (torch._C._linalg, BF16),
    "methods_fp16": (Tensor, BF16),
    "torch_fp32": (torch, FP32),
    "nn_fp32": (torch._C._nn, FP32),
    "methods_fp32": (Tensor, FP32),
    "torch_need_autocast_promote": (torch, FP32),
}
NOT_ON_CPU = {"cudnn_convolution", "cudnn_convolution_transpose"}
"""einsum apart: its case in PyTorch's list is no legal call."""


@pytest.mark.filterwarnings("ignore")
@each("kind", CUDA_KINDS)
def test_the_uniform_lists_do_on_the_cpu_what_autocast_does_on_cuda(
    testing: Any, kind: str
) -> None:
    """As PyTorch's own test for CUDA compares: with the same op on arguments cast by hand."""
    torch.manual_seed(0)
    space, dtype = CUDA_KINDS[kind]
    by, ran = caster(shipped("native_uniform")), set()
    given = getattr(testing.AutocastTestLists(torch.device("cpu")), kind)
    # torch.convolution is what compiled code calls, whose casts are decided: it is left alone.
    skipped = {"einsum", "convolution"}
    for op, args, *rest in (case for case in given if case[0] not in skipped):
        function = getattr(space, op)
        kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
        theirs = result(lambda: function(*to(args, dtype), **kwargs))  # noqa: B023
        with by.region():
            ours = result(lambda: function(*args, **kwargs))  # noqa: B023
        if isinstance(theirs, type):
            assert ours is theirs, op
        else:
            assert same(ours, theirs), f"{op}: {ours}, and by hand {theirs}"
            ran.add(op)
    assert ran == {op for op, *_ in given} - NOT_ON_CPU - skipped


# ---- the names -----------------------------------------------------------------------------------


def registered(key: str) -> set[str]:
    """Base names of the ops PyTorch registers a kernel of autocast for."""
    names = torch._C._dispatch_get_all_op_names()
    own = (n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key))
    return {n.removeprefix("aten::").partition(".")[0] for n in own if n.startswith("aten::")}


def named(device: str) -> set[str]:
    """The names on the native lists of a device, as they are written."""
    section = compose(["recipe=mnist", "op_lists=native"]).config.op_lists
    names: set[str] = set()
    for kind in ("lower", "fp32", "promote"):
        own = getattr(section, f"{device}_{kind}", None)
        names |= set(getattr(section, kind) if own is None else own)
    return names


NOT_REGISTERED_HERE: dict[str, set[str]] = {
    "cpu": {"_grid_sampler_2d_cpu_fallback", *NOT_EVERYWHERE},
    "cuda": set(NOT_EVERYWHERE),
}
"""Names of other versions of PyTorch."""

NO_CASTS: dict[str, set[str]] = {"cpu": set(), "cuda": {"binary_cross_entropy"}}
"""Registered to be refused: on CUDA autocast raises in its place."""


@pytest.mark.representative("cuda")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_native_lists_are_what_pytorch_registers(device: str) -> None:
    theirs = registered(f"Autocast{device.upper()}")
    assert len(theirs) > 50
    assert theirs - named(device) - NO_CASTS[device] == set()
    assert named(device) - theirs <= NOT_REGISTERED_HERE[device] | NO_CASTS[device]


@each("device", ["cpu", "cuda"])
def test_what_only_another_pytorch_lists_is_on_no_list_here(device: str) -> None:
    here = registered(f"Autocast{device.upper()}")
    assert set(shipped("native", device).rules) & set(NOT_EVERYWHERE) == here & set(NOT_EVERYWHERE)


def test_the_uniform_lists_are_those_of_cuda() -> None:
    native, uniform = shipped("native", "cuda"), shipped("native_uniform")
    assert native.rules == uniform.rules == shipped("native_uniform", "cuda").rules
    assert native.rules != shipped("native").rules


@pytest.mark.representative("hmp-cpu", "native_uniform-cuda")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_list_has_a_name_that_no_op_has(name: str, device: str) -> None:
    config = compose(["recipe=mnist", f"op_lists={name}", "op_lists.strict=true"]).config
    found = choose_op_lists(config, torch.device(device), False)
    assert found is not None
    assert found.unknown == ()
    assert len(found.rules) > 50


def test_no_two_equal_functions_have_two_names() -> None:
    """PyTorch's builtins are equal where they share C code: a table holds one for all of them."""
    names: dict[Any, set[str | None]] = {}
    for space in (torch, Tensor, torch._C._nn, torch._C._linalg, torch._C._special, torch._C._fft):
        for attribute in dir(space):
            function = getattr(space, attribute, None)
            if callable(function) and getattr(function, "__hash__", None) is not None:
                names.setdefault(function, set()).add(name_of(function))
    split = {str(f): n for f, n in names.items() if len(n) > 1}
    canonical = {name for kind in SHIPPED for name in shipped(kind).rules}
    assert not [n for n in split.values() if n & canonical]


def test_every_registered_op_is_reached_by_its_name() -> None:
    """A name on the list leads to a rule for it, or for the functions that end in it."""
    for device in ("cpu", "cuda"):
        rules = shipped("native", device).rules
        for name in named(device) - NOT_REGISTERED_HERE[device]:
            assert any(target in rules for target in spelled(name)), name


# ---- modules -------------------------------------------------------------------------------------

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 5), nn.LogSoftmax(1)),
        ),
        (2, 3, 6, 6),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)),
        (4, 6),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2), (3, 4, 8)),
    "prelu": (lambda: nn.Sequential(nn.Linear(5, 5), nn.PReLU(), nn.Softplus()), (4, 5)),
}


@each("dtype", [BF16, FP16])
@each("name", MODULES)
def test_modules_give_autocast_s_outputs_and_gradients(name: str, dtype: torch.dtype) -> None:
    make, shape = MODULES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = []
    for region in (
        lambda: torch.autocast("cpu", dtype),
        caster(shipped("native"), dtype).region,
    ):
        torch.manual_seed(0)
        model = make()
        with region():
            out = model(x)
        out.float().square().sum().backward()
        found.append((out.detach(), [p.grad for p in model.parameters()]))
        assert all(p.grad is not None and p.grad.dtype == FP32 for p in model.parameters())
    assert same(*found)


A, B, C = (normal(5, 5, seed=i) for i in range(3))
LOW = A.to(BF16)


def of(make: Callable[[], nn.Module], *inputs: Tensor) -> Callable[[], Any]:
    """A call of a module with weights of a fixed seed."""

    def call() -> Any:
        torch.manual_seed(0)
        return make()(*inputs)

    return call


HIDING: dict[str, Callable[[], Any]] = {
    "einsum": lambda: torch.einsum("ij,jk", A, B),
    "chain_matmul": lambda: torch.chain_matmul(A, B, C),
    "multi_dot": lambda: torch.linalg.multi_dot([A, B, C]),
    "sdpa": lambda: nn.functional.scaled_dot_product_attention(*(x[None, None] for x in (A, B, C))),
    "attention": of(lambda: nn.MultiheadAttention(6, 2), *[normal(4, 3, 6)] * 3),
    "circular convolution": of(
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), normal(1, 2, 5, 5)
    ),
    "weight norm": of(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), normal(4, 6)),
    "cross entropy": lambda: nn.functional.cross_entropy(LOW, torch.arange(5)),
    "kl_div": lambda: nn.functional.kl_div(LOW, LOW.abs(), reduction="sum"),
    "cdist": lambda: torch.cdist(LOW, LOW),
    "grid_sample": lambda: nn.functional.grid_sample(
        normal(1, 2, 4, 4).to(BF16), normal(1, 3, 3, 2).to(BF16), align_corners=False
    ),
    "interpolate": lambda: nn.functional.interpolate(normal(1, 2, 4, 4).to(BF16), scale_factor=2),
    # Before, two calls on the same numbers gave different bits.
    **({"lstsq": lambda: torch.linalg.lstsq(LOW, B.to(BF16))} if torch_is(2, 14) else {}),
    "out=": lambda: torch.mm(A, B, out=torch.empty(5, 5)),
    "float64": lambda: torch.mm(A.double(), B.double()),
    "float64 beside float32": lambda: torch.mm(A.double(), B),
    "matrix_power": lambda: torch.linalg.matrix_power(A, 3),
    "matrix_power, an inverse": lambda: torch.linalg.matrix_power(A, -1),
    "matrix_power, lower inputs": lambda: torch.linalg.matrix_power(LOW, -3),
    "LSTM": of(lambda: nn.LSTM(6, 5), normal(4, 3, 6)),
    "LSTM after linear": of(lambda: nn.Sequential(nn.Linear(6, 6), nn.LSTM(6, 5)), normal(4, 3, 6)),
}

"""One call each, in which autocast meets the listed ops one by one."""


def native_and_autocast(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call gives under each of them."""
    with caster(shipped("native")).region():
        ours = result(call)
    with torch.autocast("cpu", BF16):
        return ours, result(call)


@pytest.mark.filterwarnings("ignore")
@each("name", HIDING)
def test_functions_that_hide_ops_give_autocast_s_dtypes_and_bits(name: str) -> None:
    ours, theirs = native_and_autocast(HIDING[name])
    if name.startswith("LSTM") and theirs is RuntimeError:
        pytest.skip("oneDNN has no LSTM in bfloat16 on this CPU, so autocast fails")
    if isinstance(ours, type) or isinstance(theirs, type):
        assert ours is theirs
    else:
        assert same(ours, theirs), f"{ours}, and under autocast {theirs}"


DIFFERENT = {
    *("corrcoef", "cov", "einsum", "inner", "linalg.pinv", "linalg.pinv (hermitian)"),
    *("nn.functional.bilinear", "tensordot"),
}
if torch_is(2, 14):
    DIFFERENT |= {
        "linalg.polar",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    }
"""Of PyTorch's table of operators, those with a sample that is cast as a whole."""


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_of_all_operators_of_pytorch_these_alone_differ_from_autocast() -> None:
    different = set()
    for op in op_infos():
        # Sparse tensors and half complex numbers cannot be compared; `empty` has no values.
        if "empty" in op.name or op.name in ("chalf", "to_sparse", "sparse.sampled_addmm"):
            continue
        if op.name == "linalg.lstsq" and not torch_is(2, 14):  # each call gives other bits
            continue
        for sample in samples(op, 6):

            def call(op: Any = op, sample: Any = sample) -> Any:
                given = tree_map(copied, (sample.input, sample.args, sample.kwargs))
                return op(given[0], *given[1], **given[2])

            ours, theirs = native_and_autocast(call)
            failed = isinstance(ours, type) or isinstance(theirs, type)
            if not (ours is theirs if failed else same(ours, theirs)):
                different.add(title(op))
    assert different == DIFFERENT


def copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_is_that_of_autocast_bit_for_bit() -> None:
    words = ["recipe=mnist", "recipe.model.units=32", "data.source=generated", "speed=plain"]
    words += ["data.train_limit=128", "data.eval_limit=32", "device=cpu", "train.max_steps=8"]
    words += ["train.batch_size=16", "precision=fp16_mixed", "loss_scale.growth_interval=3"]
    assert main([*words, "run.dir=autocast"]) == 0
    assert main([*words, "op_lists=native", "run.dir=native"]) == 0
    theirs, ours = Path("autocast"), Path("native")
    assert_equal(trained(ours), trained(theirs))
    assert exact_lines(ours) == exact_lines(theirs)
    assert len([x for x in exact_lines(ours) if x["kind"] == "step"]) == 8
