"""The cast rules, over all pairs of dtypes: what each op is given, against casts by hand.

By hand: the same function outside of a region, on arguments cast as the rule says. The same dtypes
and bits are expected, or the same error; and a look below autograd at the dtypes that were really
computed in, for results that do not show them (comparisons, selections).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import nms

from mprun.precision.op_lists import OpLists
from tests.each import each
from tests.precision.op_lists import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    FP64,
    LOWER,
    PAIRS,
    caster,
    own,
    result,
    same,
    shipped,
    to,
    watched,
)

aten = torch.ops.aten
Function = Callable[..., Any]
Args = Callable[[Tensor, Tensor], tuple[Any, ...]]


class Row(NamedTuple):
    """The ways to call an op, and its arguments from two tensors of shape (4, 3) in (0.1, 0.9)."""

    functions: tuple[Function, ...]
    args: Args = lambda a, b: (a, b)


MORE: dict[str, tuple[Function, ...]] = {
    "add": (operator.add, Tensor.__radd__),
    "atan2": (torch.arctan2, Tensor.arctan2),
    "cat": (torch.concat, torch.concatenate),
    "eq": (operator.eq,),
    "ge": (operator.ge, torch.greater_equal, Tensor.greater_equal),
    "gt": (operator.gt, torch.greater, Tensor.greater),
    "le": (operator.le, torch.less_equal, Tensor.less_equal),
    "lt": (operator.lt, torch.less, Tensor.less),
    "ne": (operator.ne, torch.not_equal, Tensor.not_equal),
    "pow": (operator.pow, Tensor.__rpow__),
    "remainder": (operator.mod,),
    "rsub": (Tensor.__rsub__,),
    "sub": (operator.sub, torch.subtract, Tensor.subtract),
    "matmul": (operator.matmul,),
    "mul": (operator.mul, Tensor.__rmul__, torch.multiply),
    "div": (operator.truediv, torch.divide, torch.true_divide, Tensor.__rtruediv__),
    "softmax": (torch.special.softmax,),
    "log_softmax": (torch.special.log_softmax,),
    "cross_entropy": (torch._C._nn.cross_entropy_loss,),
    "dropout2d": (torch.feature_dropout,),
    "outer": (torch.ger,),
    "clamp": (torch.clip,),
    "floor_divide": (operator.floordiv,),
    "mse_loss": (nn.MSELoss(),),
    "add_": (operator.iadd, Tensor.__iadd__),
    "sub_": (operator.isub, Tensor.__isub__, Tensor.subtract_),
    "mul_": (operator.imul, Tensor.__imul__, Tensor.multiply_),
    "div_": (operator.itruediv, Tensor.__itruediv__, Tensor.divide_, Tensor.true_divide_),
    "pow_": (operator.ipow,),
    "remainder_": (operator.imod,),
    "floor_divide_": (operator.ifloordiv,),
    "atan2_": (Tensor.arctan2_,),
}
"""Operators and other names of an op."""


def rows(names: str, args: Args = lambda a, b: (a, b)) -> dict[str, Row]:
    """The ops of these names, each as a function of torch, F and ATen, as a method, and `MORE`."""
    found = {}
    for name in names.split():
        ways = (getattr(space, name, None) for space in (torch, F, Tensor, aten))
        functions = dict.fromkeys(f for f in (*ways, *MORE.get(name, ())) if callable(f))
        found[name] = Row(tuple(functions), args)
    return found


def tensor(dtype: torch.dtype, seed: int = 0, shape: tuple[int, ...] = (4, 3)) -> Tensor:
    """Numbers in (0.1, 0.9) that need all of float32's bits, legal for logarithms and entropies."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 0.8 + 0.1).to(dtype)


ROWS = torch.tensor([2, 0, 3, 1])
INDEX = torch.tensor([[0, 1, 2], [1, 2, 3], [3, 0, 1], [2, 3, 0]])
CLASSES = torch.tensor([0, 2, 1, 1])
MASK = torch.tensor([[True, False, True]] * 4)


def square(x: Tensor) -> Tensor:
    """(4, 3) -> (4, 4)."""
    return torch.cat([x, x[:, :1]], 1)


def image(x: Tensor, dims: int) -> Tensor:
    """(4, 3) -> (2, 4, 6, ...) with `dims` last dimensions of 6."""
    return x.repeat(2, 2).reshape(2, 4, 6, *[1] * (dims - 1)).expand(2, 4, *[6] * dims)


def kernels(x: Tensor, dims: int) -> Tensor:
    """(4, 3) -> (4, 4, 3, ...) with `dims` last dimensions of 3."""
    return x.repeat(1, 4).reshape(4, 4, 3, *[1] * (dims - 1)).expand(4, 4, *[3] * dims)


def widest_of(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Written out, so that it is no copy of the code under test."""
    if FP64 in (a, b):
        return FP64
    if FP32 in (a, b):
        return FP32
    return a if a == b else FP32


def by_hand(function: Function, args: tuple[Any, ...], dtype: torch.dtype | None) -> Any:
    """The function outside of a region, on arguments in `dtype`; None leaves them as they are."""
    return result(lambda: function(*(args if dtype is None else to(args, dtype))))


def assert_same(ours: Any, theirs: Any, label: str) -> None:
    """The same result, or the same kind of error."""
    if isinstance(ours, type) or isinstance(theirs, type):
        assert ours is theirs, f"{label}: {ours}, and by hand {theirs}"
    else:
        assert same(ours, theirs), f"{label}: {ours}, and by hand {theirs}"


Expected = Callable[[torch.dtype, torch.dtype, torch.dtype], "torch.dtype | None"]
"""From a pair of dtypes and the lower one to what all inputs are in; None: they are left alone."""


def check_row(row: Row, name: str, expected: Expected) -> None:
    """Every way to call an op, every pair of dtypes; float16 as the lower dtype one way."""
    worked = 0
    for lower, functions in ((BF16, row.functions), (FP16, row.functions[:1])):
        by = caster(dtype=lower)
        for one, other in PAIRS:
            want = expected(one, other, lower)
            args = row.args(tensor(one, 1), tensor(other, 2))
            for number, function in enumerate(functions):
                label = f"{name}[{number}]({one}, {other}), lower {lower}"
                theirs = by_hand(function, args, want)
                with watched(by) as spy:
                    ours = result(lambda f=function: f(*args))  # type: ignore[misc]  # noqa: B023
                assert_same(ours, theirs, label)
                if want is not None and not isinstance(ours, type):
                    assert spy.dtypes == {want}, f"{label}: computed in {spy.dtypes}"
                    worked += 1
    assert worked >= len(row.functions) * 4, f"{name} was refused nearly everywhere"


# ---- the third list: the widest of the inputs ----------------------------------------------------

PROMOTED: dict[str, Row] = {
    **rows("add atan2 copysign eq fmax fmin fmod ge gt hypot le logaddexp lt maximum minimum ne"),
    **rows("pow remainder rsub sub"),
    **rows("addcdiv addcmul lerp", lambda a, b: (a, b, a)),
    **rows("cat", lambda a, b: ([a, b], 1)),
    **rows("column_stack vstack", lambda a, b: ((a, b),)),
    **rows("dstack hstack stack", lambda a, b: ([a, b],)),
    **rows("cross", lambda a, b: (a, b, 1)),
    **rows("index_add index_copy", lambda a, b: (a, 0, ROWS, b)),
    **rows("index_put", lambda a, b: (a, (ROWS,), b)),
    **rows("masked_scatter", lambda a, b: (a, MASK, b)),
    **rows("scatter scatter_add", lambda a, b: (a, 0, INDEX, b)),
    "where": Row(
        (torch.where, lambda m, a, b: Tensor.where(a, m, b), aten.where),
        lambda a, b: (MASK, a, b),
    ),
}


def listed(name: str, kind: str) -> set[str]:
    """The canonical names on one of a file's lists."""
    return {op for op, of in shipped(name).rules.items() if of == kind}


def test_the_table_has_every_op_of_the_promote_lists() -> None:
    assert set(PROMOTED) == listed("hmp", "promote") == listed("hmp_resnet50", "promote")


@each("name", PROMOTED)
def test_an_op_of_the_promote_list_computes_in_the_widest_of_its_inputs(name: str) -> None:
    check_row(PROMOTED[name], name, lambda one, other, _: widest_of(one, other))


# ---- the first two lists -------------------------------------------------------------------------


def conv(dims: int) -> dict[str, Row]:
    names = f"conv{dims}d conv_transpose{dims}d"
    return rows(names, lambda a, b: (image(a, dims), kernels(b, dims), b[:, 0]))


LOWERED: dict[str, Row] = {
    **rows("mul"),
    **rows("addmm", lambda a, b: (square(a), square(b), square(a))),
    **rows("bmm", lambda a, b: (square(a)[None], square(b)[None])),
    **conv(1),
    **conv(2),
    **conv(3),
    **rows("dot", lambda a, b: (a[:, 0], b[:, 1])),
    **rows("dropout dropout1d", lambda a, b: (a, 0.5, True)),
    **rows("dropout2d", lambda a, b: (image(a, 2), 0.5, True)),
    **rows("dropout3d", lambda a, b: (image(a, 3), 0.5, True)),
    **rows("leaky_relu", lambda a, b: (a - 0.5, 0.1)),
    **rows("linear", lambda a, b: (a, b, b[:, 0])),
    **rows("matmul mm", lambda a, b: (a, b.T)),
    **rows("mv", lambda a, b: (a, b[0])),
    **rows("relu", lambda a, b: (a - 0.5,)),
    **rows("t", lambda a, b: (a,)),
}
NORMALISATIONS = {"batch_norm", "group_norm", "instance_norm", "layer_norm"}

IN_FLOAT32: dict[str, Row] = {
    **rows("binary_cross_entropy binary_cross_entropy_with_logits div smooth_l1_loss"),
    **rows("cross_entropy nll_loss", lambda a, b: (a, CLASSES, b[0])),
    "embedding": Row((lambda w, i: F.embedding(i, w),), lambda a, b: (a, INDEX)),
    "embedding_bag": Row((lambda w, i: F.embedding_bag(i, w),), lambda a, b: (a, INDEX)),
    **rows("log log2", lambda a, b: (a,)),
    **rows("softmax log_softmax", lambda a, b: (a, 1)),
    **rows("topk", lambda a, b: (a, 2)),
}


def takes_both(row: Row) -> bool:
    """Whether both of the two tensors are among the arguments."""
    a, b = torch.full((4, 3), 0.25), torch.full((4, 3), 0.75)
    flat = torch.utils._pytree.tree_leaves(row.args(a, b))
    values = {
        v for x in flat if isinstance(x, Tensor) and x.is_floating_point() for v in x.unique()
    }
    return any(v > 0.5 for v in values)


def unless_float64(row: Row, dtype: torch.dtype | None = None) -> Expected:
    """`dtype` (the lower one), unless one of the op's inputs is in float64."""
    both = takes_both(row)
    return lambda one, other, lower: (
        None if FP64 in (one, other if both else one) else dtype or lower
    )


def test_the_tables_have_every_op_of_the_first_two_lists() -> None:
    assert set(LOWERED) | NORMALISATIONS == listed("hmp", "lower")
    assert set(IN_FLOAT32) == listed("hmp", "fp32")
    assert listed("hmp_resnet50", "fp32") <= set(IN_FLOAT32)
    assert listed("hmp_resnet50", "lower") - set(LOWERED) == {"avg_pool2d", "max_pool2d"}


@each("name", LOWERED)
def test_an_op_of_the_lower_list_computes_in_the_lower_dtype(name: str) -> None:
    check_row(LOWERED[name], name, unless_float64(LOWERED[name]))


@each("name", IN_FLOAT32)
def test_an_op_of_the_fp32_list_computes_in_float32(name: str) -> None:
    check_row(IN_FLOAT32[name], name, unless_float64(IN_FLOAT32[name], FP32))


# ---- ops on no list ------------------------------------------------------------------------------

UNLISTED: dict[str, Row] = {
    **rows("baddbmm", lambda a, b: (square(a)[None], square(b)[None], square(b)[None])),
    **rows("addmv", lambda a, b: (a[:, 0], b, b[0])),
    **rows("outer", lambda a, b: (a[0], b[:, 0])),
    **rows("xlogy heaviside floor_divide mse_loss l1_loss block_diag max"),
    **rows("clamp", lambda a, b: (a, b)),
    **rows("prelu", lambda a, b: (a - 0.5, b[0])),
}


@each("name", UNLISTED)
def test_an_op_on_no_list_computes_in_the_dtype_of_its_first_input(name: str) -> None:
    row = UNLISTED[name]
    worked = 0
    by = caster()
    for one, other in PAIRS:
        a, b = tensor(one, 1), tensor(other, 2)
        # float64 is never cast: PyTorch's own promotion, or its error.
        cast = row.args(a, b if other == FP64 else b.to(one))
        args = row.args(a, b)
        for function in row.functions:
            theirs = result(lambda f=function: f(*cast))  # type: ignore[misc]  # noqa: B023
            with watched(by) as spy:
                ours = result(lambda f=function: f(*args))  # type: ignore[misc]  # noqa: B023
            assert_same(ours, theirs, f"{name}({one}, {other})")
            if other != FP64 and not isinstance(ours, type):
                assert spy.dtypes == {one}, f"{name}({one}, {other}): computed in {spy.dtypes}"
                worked += 1
    assert worked >= 6


def test_the_first_floating_input_counts_where_whole_numbers_come_before_it() -> None:
    with watched(caster()) as spy:
        out = torch.clamp(torch.arange(3), torch.zeros(3, dtype=BF16), torch.ones(3))
    assert out.dtype == BF16
    assert spy.seen[-1].dtypes == (BF16, BF16)


def test_as_it_is_leaves_ops_on_no_list_to_pytorch_s_promotion() -> None:
    a, b = tensor(BF16, 1), tensor(FP32, 2)
    with caster().region():
        assert torch.xlogy(a, b).dtype == BF16
    with caster(own()).region():
        assert same(torch.xlogy(a, b), result(lambda: torch.xlogy(a, b)))
        assert torch.xlogy(a, b).dtype == FP32


# ---- normalisations ------------------------------------------------------------------------------

NORMS: dict[str, Row] = {
    "batch_norm": Row(
        (
            lambda x, w: F.batch_norm(x, None, None, w, w, True),
            lambda x, w: torch.batch_norm(x, w, w, None, None, True, 0.1, 1e-5, True),
            lambda x, w: F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
        ),
        lambda x, w: (image(x, 1), w.mean(1)),
    ),
    "group_norm": Row(
        (
            lambda x, w: F.group_norm(x, 2, w, w),
            lambda x, w: torch.group_norm(x, 2, w, w),
        ),
        lambda x, w: (image(x, 1), w.mean(1)),
    ),
    "instance_norm": Row(
        (
            lambda x, w: F.instance_norm(x, None, None, w, w),
            lambda x, w: torch.instance_norm(x, w, w, None, None, True, 0.1, 1e-5, True),
        ),
        lambda x, w: (image(x, 1), w.mean(1)),
    ),
    "layer_norm": Row(
        (
            lambda x, w: F.layer_norm(x, [3], w, w),
            lambda x, w: torch.layer_norm(x, [3], w, w),
            lambda x, w: F.layer_norm(input=x, normalized_shape=[3], weight=w),
        ),
        lambda x, w: (x, w[0]),
    ),
}


@each("lower", LOWER)
@each("name", NORMS)
def test_a_norm_takes_its_activation_alone_in_the_lower_dtype(
    name: str, lower: torch.dtype
) -> None:
    row, by = NORMS[name], caster(dtype=lower)
    worked = 0
    for one in DTYPES:
        for weight in (FP32, lower):
            for number, function in enumerate(row.functions):
                x, w = row.args(tensor(one, 1), tensor(weight, 2))
                cast = x if one == FP64 else x.to(lower)
                theirs = result(lambda f=function, x=cast, w=w: f(x, w))  # type: ignore[misc]
                with watched(by) as spy:
                    ours = result(lambda f=function, x=x, w=w: f(x, w))  # type: ignore[misc]
                label = f"{name}[{number}]({one}, weight {weight})"
                assert_same(ours, theirs, label)
                if one != FP64 and not isinstance(ours, type):
                    assert ours.dtype == lower, label
                    norms = [x.dtypes for x in spy.seen if "norm" in x.op]
                    assert norms, label
                    assert all(x[0] == lower and {*x[1:]} <= {weight} for x in norms), label
                    worked += 1
    assert worked >= 6


@each("name", ["layer_norm", "group_norm"])
def test_a_norm_on_the_fp32_list_takes_everything_in_float32(name: str) -> None:
    row = NORMS[name]
    x, w = row.args(tensor(BF16, 1), tensor(BF16, 2))
    for function in row.functions:
        theirs = function(x.float(), w.float())
        with watched(caster(own(fp32=[name]))) as spy:
            assert same(function(x, w), theirs)
        assert spy.dtypes == {FP32}


@each("dtype", [FP32, BF16])
@each("name", ["batch_norm", "instance_norm"])
def test_running_statistics_on_the_fp32_list_are_written_into_and_not_a_copy(
    name: str, dtype: torch.dtype
) -> None:
    function = getattr(F, name)
    found = []
    for region in (nullcontext, caster(own(fp32=[name])).region):
        x, statistics = image(tensor(BF16), 1), [torch.ones(4, dtype=dtype) for _ in range(2)]
        # By hand the activation alone is cast; with statistics in bfloat16 PyTorch refuses that.
        given = x.float() if region is nullcontext else x
        with region():
            out = result(lambda: function(given, *statistics, None, None, True))  # noqa: B023
        found.append((out, statistics))
    assert_same(found[0][0], found[1][0], name)
    assert same(found[0][1], found[1][1])


# ---- in place ------------------------------------------------------------------------------------


INPLACE: dict[str, Row] = {
    **rows("add_ sub_ mul_ div_ pow_ remainder_ floor_divide_ fmod_ atan2_ copysign_ hypot_ eq_"),
    **rows("clamp_ xlogy_"),
    **rows("lerp_ addcmul_ addcdiv_", lambda a, b: (a, b, b)),
    **rows("addmm_", lambda a, b: (square(a), square(b), square(b))),
    **rows("baddbmm_", lambda a, b: (square(a)[None], square(b)[None], square(b)[None])),
    **rows("index_add_ index_copy_", lambda a, b: (a, 0, ROWS, b)),
    **rows("index_put_", lambda a, b: (a, (ROWS,), b)),
    **rows("scatter_ scatter_add_", lambda a, b: (a, 0, INDEX, b)),
    **rows("masked_scatter_", lambda a, b: (a, MASK, b)),
}


@each("lists", [shipped("hmp"), own()], ids=["HMP's lists", "no lists"])
@each("name", INPLACE)
def test_an_in_place_op_computes_in_the_dtype_of_what_it_writes_into(
    name: str, lists: OpLists
) -> None:
    """Where ops on no list are left to PyTorch's promotion too."""
    row, by = INPLACE[name], caster(lists)
    worked = 0
    for one, other in PAIRS:
        for number, function in enumerate(row.functions):
            label = f"{name}[{number}]({one}, {other})"
            b = tensor(other, 2)
            theirs = row.args(tensor(one, 1), b if other == FP64 else b.to(one))
            ours = row.args(tensor(one, 1), b)
            expected = result(lambda f=function, a=theirs: f(*a))  # type: ignore[misc]
            with watched(by) as spy:
                got = result(lambda f=function, a=ours: f(*a))  # type: ignore[misc]
            assert_same(got, expected, label)
            if isinstance(got, type):
                continue
            assert got is ours[0], label
            assert got.dtype == one
            if other != FP64:
                assert spy.dtypes == {one}, f"{label}: computed in {spy.dtypes}"
                worked += 1
    assert worked >= 6


def test_an_assignment_by_indices_takes_the_dtype_of_what_it_writes_into() -> None:
    for one, other in PAIRS:
        if other == FP64:  # never cast
            continue
        target, source = tensor(one, 1), tensor(other, 2)
        expected = tensor(one, 1)
        expected[ROWS] = source.to(one)
        with caster().region():
            target[ROWS] = source
        assert same(target, expected)


def test_ops_of_torchvision_get_float32_as_in_autocast() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [9, 9, 12, 12]])
    scores = torch.tensor([0.9, 0.8, 0.7])
    with caster().region():
        kept = nms(boxes.bfloat16(), scores.bfloat16(), 0.5)  # it has no kernel for bfloat16
    assert kept.tolist() == nms(boxes, scores, 0.5).tolist() == [0, 2]


INPLACE_RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu, by name": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "nn.ReLU": nn.ReLU(inplace=True),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.01, True),
    "F.dropout": lambda x: F.dropout(x, 0.5, True, True),
    "nn.Dropout1d": nn.Dropout1d(0.5, inplace=True),
    "nn.SiLU": nn.SiLU(inplace=True),
    "F.threshold": lambda x: F.threshold(x, 0.1, 0.0, True),
}


@each("name", INPLACE_RELUS)
@each("dtype", [FP32, BF16])
def test_an_activation_in_place_writes_into_its_input_whatever_the_list(
    name: str, dtype: torch.dtype
) -> None:
    """relu, leaky_relu and dropout are on the lower list: a copy would be written into."""
    function = INPLACE_RELUS[name]
    ours, theirs = tensor(dtype, 1) - 0.5, tensor(dtype, 1) - 0.5
    torch.manual_seed(0)
    function(theirs)
    torch.manual_seed(0)
    with caster().region():
        out = function(ours)
    assert out is ours
    assert same(ours, theirs)
    assert not same(ours, tensor(dtype, 1) - 0.5)


# ---- whatever is left alone ----------------------------------------------------------------------


@each(
    "function",
    [torch.mm, lambda a, b, out=None: torch.ops.aten.mm.out(a, b, out=out)],
    ids=["torch.mm", "aten.mm.out"],
)
def test_a_call_with_out_is_left_alone(function: Function) -> None:
    a, b, target = tensor(FP32, 1), tensor(FP32, 2).T, torch.empty(4, 4)
    with watched(caster()) as spy:
        assert function(a, b, out=target) is target
        with pytest.raises(RuntimeError):  # as without a region: out has another dtype
            torch.mm(a, b, out=torch.empty(4, 4, dtype=BF16))
    assert same(target, torch.mm(a, b))
    assert not spy.casts


WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)


@each("dtype", WHOLE)
@each(
    "function",
    [torch.relu, torch.mul, torch.add, torch.div, torch.where, torch.outer, torch.maximum],
)
def test_whole_numbers_and_truth_values_are_never_cast(
    function: Function, dtype: torch.dtype
) -> None:
    whole = torch.tensor([0, 1, 3]).to(dtype)
    args = {torch.relu: (whole,), torch.where: (whole > 0, whole, whole)}
    given = args.get(function, (whole, whole))
    theirs = result(lambda: function(*given))
    with watched(caster()) as spy:
        assert_same(result(lambda: function(*given)), theirs, str(function))
    assert not spy.casts


# ---- arguments of every kind ---------------------------------------------------------------------


def test_arguments_by_name_are_cast() -> None:
    a, b = tensor(FP32, 1), tensor(FP32, 2)
    with caster().region():
        assert same(torch.mm(input=a, mat2=b.T), torch.mm(a.to(BF16), b.to(BF16).T))
        assert F.linear(input=a, weight=b, bias=b[:, 0]).dtype == BF16
        assert torch.softmax(input=a.half(), dim=0).dtype == FP32
        assert torch.add(input=a.half(), other=b).dtype == FP32
        assert torch.xlogy(input=a.half(), other=b).dtype == FP16
        assert F.embedding(input=INDEX, weight=a.half()).dtype == FP32


def test_an_embedding_with_max_norm_renormalises_its_own_weights() -> None:
    """max_norm writes into the weights: a cast copy would be written into."""
    for function in (F.embedding, F.embedding_bag):
        ours, theirs = tensor(FP16, 1) * 8, tensor(FP16, 1) * 8
        expected = function(INDEX, theirs, max_norm=1.0)
        with caster().region():
            out = function(INDEX, ours, max_norm=1.0)
        assert same(out, expected)
        assert same(ours, theirs)
        assert not same(ours, tensor(FP16, 1) * 8)
    module = nn.Embedding(4, 3, max_norm=0.5)
    with caster().region():
        module(INDEX)
    # float32's own rounding of a norm of 3 numbers
    assert module.weight.norm(dim=1).max() <= 0.5 * (1 + 2**-20)
