"""`Precision` from a mode's name and plain arguments: what a run of that mode would have."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from mprun.config import compose
from mprun.precision import (
    AutocastCaster,
    DynamicLossScale,
    Float16Fallback,
    NativeArithmetic,
    NoCaster,
    Precision,
    StaticLossScale,
)
from mprun.precision.op_lists.lists import SHIPPED, shipped_lists
from mprun.precision.policy import policy
from mprun.records.mode_names import SHIPPED_MODES
from mprun.records.policy_columns import FORMAT_MODES
from mprun.train.assemble.dtype_choices import choose_op_lists
from mprun.train.assemble.parts import build_loss_scale
from tests.each import each

pytestmark = pytest.mark.usefixtures("native_is_fast")

CPU = torch.device("cpu")


def precision(mode: Any, **options: Any) -> Precision:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Precision(mode, **{"device": "cpu", **options})


@each("mode", SHIPPED_MODES)
def test_the_defaults_are_those_of_a_run(mode: str) -> None:
    ours, composed = precision(mode), compose([f"precision={mode}", "device=cpu"])
    assert ours.policy == policy(mode)
    expected = build_loss_scale(composed.config, {}, CPU)
    assert type(ours.loss_scale) is type(expected)
    assert ours.loss_scale.state_dict() == expected.state_dict()
    emulated = mode in ("tf32", "half_sr_full", *FORMAT_MODES)
    assert ours.execution == ("emulated" if emulated else "native")
    assert ours.columns["casting" if ours.policy.casts else "output_dtype"] in (
        "autocast",
        "float64" if mode == "fp64" else "float32",
    )


def test_a_policy_a_name_and_another_s_name_are_the_same() -> None:
    assert precision(policy("bf16_mixed")).policy == precision("bf16_mixed").policy
    assert precision("bf16-mixed").policy == policy("bf16_mixed")  # Lightning's name
    row = replace(policy("bf16_true"), rounding="kahan")
    assert precision(row).policy is row


@each("mode", ["tf32", "half_sr_full", "nvfp4"])
def test_emulation_that_was_not_asked_for_is_warned_of(mode: str) -> None:
    with pytest.warns(UserWarning, match=rf"^precision={mode} is emulated: .*execution='emulated'"):
        Precision(mode, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Precision(mode, device="cpu", execution="emulated")


def test_slow_native_kernels_are_not_taken_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mprun.precision.execution.slowdown", lambda *_: 4.1)
    with pytest.warns(UserWarning, match="take 4.1 times as long as float32"):
        assert Precision("bf16_sr", device="cpu").execution == "emulated"
    assert precision("bf16_sr", execution="native").execution == "native"


def test_arithmetic_and_caster_may_be_given_themselves() -> None:
    """The caster is all that casts: a run's batches have their dtype, and targets keep theirs."""
    arithmetic, seen = NativeArithmetic(), []
    for options in ({}, {"op_lists": NoCaster()}):
        ours = precision("half_sr", execution=arithmetic, **options)
        assert ours.arithmetic is arithmetic
        ours.forward(lambda x: seen.append(x.dtype), torch.ones(1))
    assert seen == [torch.float16, torch.float32]
    ours = precision("fp32", op_lists=AutocastCaster("cpu", torch.bfloat16))
    assert ours.columns["casting"] == "autocast"


def test_native_takes_every_kernel_of_pytorch() -> None:
    """`auto` computes slow float16 ops in float32 and lists them."""
    automatic, native = precision("half_sr"), precision("half_sr", execution="native")
    assert isinstance(automatic.arithmetic, Float16Fallback)
    assert {s.dtype for s in automatic.substitutions} == {"float16"}
    assert (native.execution, native.substitutions) == ("native", ())


@each(
    ("given", "kind", "factor"),
    [
        ("none", "none", None),
        ("static", "static", 1024.0),
        ("dynamic", "dynamic", 65536.0),
        (8, "static", 8.0),
    ],
)
def test_loss_scales(given: Any, kind: str, factor: float | None) -> None:
    scale = precision("fp16_mixed", loss_scale=given).loss_scale
    assert scale.kind == kind
    assert (scale.tensor is None) == (factor is None)
    assert factor is None or float(scale.tensor) == factor  # type: ignore[arg-type]


def test_a_layer_in_float16_needs_a_loss_scale() -> None:
    assert isinstance(precision("bf16_mixed", layers={"0": "fp16"}).loss_scale, DynamicLossScale)
    own = StaticLossScale(4.0, CPU)
    assert precision("half_sr", loss_scale=own).loss_scale is own


@each("name", SHIPPED)
def test_shipped_op_lists_are_those_of_a_run(name: str) -> None:
    config = compose([f"op_lists={name}", "device=cpu"]).config
    expected = choose_op_lists(config, CPU, resumed=False)
    assert shipped_lists(name, "cpu") == expected
    cuda = choose_op_lists(config, torch.device("cuda"), resumed=False)
    assert shipped_lists(name, "cuda") == cuda
    ours = precision("bf16_mixed", op_lists=name)
    assert ours.policy.casting == ours.columns["casting"] == "op_lists"


def test_inputs_of_16_bit_parameters_are_cast_and_differentiable() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    ids = torch.arange(3)

    def model(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        seen.extend([batch["x"].dtype, ids.dtype])
        output: torch.Tensor = batch["x"].sum()
        return output

    for mode, expected in (("bf16_sr", torch.bfloat16), ("bf16_mixed", torch.float32)):
        seen: list[torch.dtype] = []
        precision(mode).forward(model, {"x": x}, ids=ids).backward()
        assert seen == [expected, torch.int64]
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@each(
    ("mode", "options", "words"),
    [
        ("bf16_st", {}, "did you mean 'bf16_sr'"),
        ("fp32", {"device": "gpu"}, "device=gpu is not a device that mprun knows"),
        ("half_sr_full", {"execution": "native"}, "execution=native: .*legal: auto, emulated"),
        ("bf16_sr", {"execution": "fast"}, "execution=fast; legal: auto, native, emulated"),
        ("fp16_mixed", {"loss_scale": "big"}, "loss_scale='big'; legal: auto, none, static"),
        ("fp16_mixed", {"loss_scale": 0}, "loss_scale=0; legal is a number above 0"),
        ("bf16_sr", {"op_lists": "hmp"}, "which casts no op; legal: bf16_mixed"),
        ("bf16_mixed", {"op_lists": "hpm"}, "no op lists are named 'hpm'; did you mean 'hmp'"),
        ("bf16_mixed", {"layers": {"0": "fp9"}}, "layers: 0: 'fp9'; legal is a dtype"),
        ("bf16_mixed", {"layers": {"0": "bf16_sr"}}, "one optimizer rounds all of them alike"),
    ],
)
def test_mistakes_are_one_line_with_what_is_legal(
    mode: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as e:
        Precision(mode, **{"device": "cpu", **options})
    assert "\n" not in str(e.value)


def test_what_is_no_policy_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a policy of type dtype; legal: the name of a mode"):
        Precision(torch.bfloat16)  # type: ignore[arg-type]
    row = replace(policy("bf16_mixed"), casting="op_lists")
    with pytest.raises(ValueError, match="casting=op_lists needs op_lists="):
        Precision(row, device="cpu")
    row = replace(policy("fp16_true"), overflow="saturate")
    with pytest.raises(ValueError, match="legal: loss_scale='static' or 'none'"):
        Precision(row, device="cpu")
