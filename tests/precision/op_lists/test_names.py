"""Every spelling of an op's name leads to the op, and every function to its name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import get_overridable_functions

from mprun.precision.op_lists import op_lists
from mprun.precision.op_lists.lists import ALIASES, INNER, known, name_of, spelled
from tests.each import each
from tests.precision.op_lists import own

SPELLINGS: dict[str, tuple[str, ...]] = {
    "relu": (
        *("relu", "F.relu", "torch.relu", "Tensor.relu", "torch.Tensor.relu", "aten::relu"),
        *("aten.relu", "aten::relu.default", "torch.nn.functional.relu", "  relu\t"),
        *("torch.ops.aten.relu", "torch.ops.aten.relu.default", "relu.default"),
    ),
    "add": ("__add__", "__radd__", "Tensor.__add__", "aten::add.Tensor", "add.Scalar"),
    "add_": ("add_", "__iadd__", "iadd", "Tensor.add_", "aten::add_.Tensor"),
    "rsub": ("rsub", "__rsub__", "aten::rsub.Scalar", "torch.rsub"),
    "div": (
        *("truediv", "__truediv__", "__rtruediv__", "rtruediv", "true_divide", "rdiv", "__div__"),
        *("__rdiv__", "div.Tensor_mode"),
    ),
    "floor_divide": ("floordiv", "__floordiv__", "rfloordiv", "__rfloordiv__"),
    "matmul": ("__matmul__", "__rmatmul__", "rmatmul", "torch.linalg.matmul"),
    "softmax": ("_softmax", "aten::_softmax", "_safe_softmax", "softmax.int"),
    "nll_loss": ("nll_loss2d", "nll_loss_nd", "nll_loss2d_forward", "torch._C._nn.nll_loss2d"),
    "max_pool2d": ("max_pool2d_with_indices", "mkldnn_max_pool2d", "F.max_pool2d_with_indices"),
    "batch_norm": (
        *("F.batch_norm", "native_batch_norm", "cudnn_batch_norm", "_batch_norm_impl_index"),
        *("aten::native_batch_norm.default", "_native_batch_norm_legit.no_stats"),
    ),
    "linalg_inv": ("torch.linalg.inv", "linalg.inv", "linalg_inv", "aten::linalg_inv"),
    "conv2d": ("F.conv2d", "torch.conv2d", "conv2d.padding", "thnn_conv2d"),
    "scaled_dot_product_attention": (
        *("F.scaled_dot_product_attention", "_scaled_dot_product_efficient_attention"),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
}
"""By every kind of prefix, overload, operator and inner op; plain aliases are below."""


@each("canonical", SPELLINGS)
def test_every_spelling_of_an_op_means_the_op(canonical: str) -> None:
    for text in SPELLINGS[canonical]:
        assert spelled(text) == (canonical,), text
        lists = own(lower=[text])
        assert lists.rules == {canonical: "lower"}, text
        assert lists.unknown == (), text


CONVOLUTIONS = {f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3)}


@each(
    "text",
    [
        *("_convolution", "convolution", "aten::_convolution.deprecated", "_convolution.default"),
        *("aten::convolution", "cudnn_convolution", "mkldnn_convolution", "_convolution_mode"),
    ],
)
def test_the_op_all_convolutions_end_in_means_all_of_them(text: str) -> None:
    assert set(spelled(text)) == CONVOLUTIONS
    assert own(fp32=[text]).rules == dict.fromkeys(CONVOLUTIONS, "fp32")


ALIASES_OF_PYTORCH = """
    absolute=abs arccos=acos arccosh=acosh arcsin=asin arcsinh=asinh arctan=atan arctanh=atanh
    arctan2=atan2 clip=clamp concat=cat concatenate=cat divide=div true_divide=div fix=trunc
    greater=gt greater_equal=ge less=lt less_equal=le not_equal=ne ger=outer multiply=mul
    negative=neg subtract=sub row_stack=vstack matrix_power=linalg_matrix_power det=linalg_det
    inverse=linalg_inv slogdet=linalg_slogdet special_erf=erf special_erfc=erfc
    special_erfinv=erfinv special_exp2=exp2 special_expm1=expm1 special_log1p=log1p
    special_expit=sigmoid special_logit=logit special_logsumexp=logsumexp special_xlogy=xlogy
    special_sinc=sinc special_softmax=softmax special_log_softmax=log_softmax
"""
"""From torch/csrc/jit/passes/normalize_ops.cpp and the documentation ("Alias for ...")."""


@each("pair", ALIASES_OF_PYTORCH.split())
def test_what_pytorch_documents_as_an_alias_is_the_same_op(pair: str) -> None:
    alias, op = pair.split("=")
    assert spelled(alias) == spelled(op)


def test_every_canonical_name_means_itself() -> None:
    for name in known():
        assert spelled(name) == (name,)
    for targets in (*ALIASES.values(), *INNER.values()):
        assert set(targets) <= known()
    assert set(INNER) <= known()


def test_every_function_a_mode_can_see_has_a_known_name_or_none() -> None:
    found = {f for functions in get_overridable_functions().values() for f in functions}
    names = {name_of(f) for f in found if callable(f)} - {None}
    assert len(names) > 800
    assert {n for n in names if n and not n.startswith("__")} <= known()


# ---- unknown names -------------------------------------------------------------------------------


@each(
    ("text", "nearest"),
    [
        *(("sofmax", "softmax"), ("F.linaer", "linear"), ("aten::addmmm", "addmm")),
        *(("batchnorm", "batch_norm"), ("ReLU", "relu"), ("LayerNorm", "layer_norm")),
        ("my_hpu_only_fused_operation_of_mine", None),
    ],
)
def test_an_unknown_name_is_kept_aside_with_the_nearest(text: str, nearest: str | None) -> None:
    lists = own(lower=["relu", text])
    (unknown,) = lists.unknown
    assert lists.rules == {"relu": "lower"}
    assert unknown.entry.text == text
    assert unknown.nearest == nearest
    assert f"no op is named '{text}'" in str(unknown)
    assert ("did you mean" in str(unknown)) == (nearest is not None)


def test_a_misspelt_name_in_code_is_warned_of_with_the_nearest() -> None:
    with pytest.warns(UserWarning, match="left out: .*'matmull'; did you mean 'matmul'") as w:
        lists = op_lists(lower=["matmull", "linear"], fp32=["softmax"])
    assert len(w) == 1
    assert w[0].filename == __file__  # where the list is made
    assert lists.rules == {"linear": "lower", "softmax": "fp32"}


@each("text", ["Tensor", "wraps", "boolean_dispatch", "__get__", "__add", ".", ""])
def test_what_is_no_op_is_no_known_name(text: str) -> None:
    assert own(lower=[text]).rules == {}
    assert len(own(lower=[text]).unknown) == 1


PARTS = st.sampled_from(
    [
        *("torch.", "F.", "aten::", "Tensor.", "torch.nn.functional.", "__", "_", ".", "relu"),
        *("add", "linalg", "default", "Tensor", "torch.ops.aten.", "i", "special.", "::", " "),
    ]
)
TEXTS = st.text() | st.lists(PARTS, max_size=5).map("".join) | st.sampled_from(sorted(ALIASES))


@given(TEXTS)
def test_any_text_is_names_or_unknown(text: str) -> None:
    lists = own(lower=[text])
    assert bool(lists.rules) != bool(lists.unknown)
    assert set(lists.rules) <= known()
    assert set(lists.rules.values()) <= {"lower"}
    assert all(u.entry.text == text for u in lists.unknown)


@given(st.sampled_from(sorted(known())), st.sampled_from(["F.", "torch.", "aten::", "Tensor.", ""]))
def test_every_canonical_name_is_known_behind_every_prefix(name: str, prefix: str) -> None:
    assert spelled(prefix + name) == (name,)


@given(
    *[st.lists(st.sampled_from([*sorted(ALIASES), *sorted(known())[::20]]), max_size=4)] * 3,
)
def test_lists_agree_or_the_error_names_what_does_not(
    lower: list[str], fp32: list[str], promote: list[str]
) -> None:
    """The rules are the lists', the first two before the third; none else is left."""
    sets = [{c for text in texts for c in spelled(text)} for texts in (lower, fp32, promote)]
    if sets[0] & sets[1]:
        with pytest.raises(ValueError, match="an op is on one of them"):
            op_lists(lower, fp32, promote)
        return
    rules = op_lists(lower, fp32, promote).rules
    for name in set().union(*sets) & known():
        kind = "lower" if name in sets[0] else "fp32" if name in sets[1] else "promote"
        assert rules[name] == kind
    assert set(rules) <= set().union(*sets)
