"""Modules kept in float32: names, globs, errors, and what they compute in."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from mprun.precision import (
    LossScale,
    NativeArithmetic,
    NoCaster,
    OpListCaster,
    Precision,
    op_lists,
)
from mprun.precision.caster import AutocastCaster, Caster
from mprun.precision.gemms import GEMMS, PRODUCT_FORMATS
from mprun.precision.layers import layer_rows, resolve
from mprun.precision.policy import torch_dtype
from mprun.records.layer_values import OF_A_PRODUCT
from mprun.records.policy_columns import FORMAT_MODES
from tests.each import each
from tests.precision.test_policy import policy

pytestmark = pytest.mark.usefixtures("native_is_fast")

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    )


def test_an_exact_name_wins_over_a_glob() -> None:
    assert resolve(model(), {"0": "fp32", "1*": "fp32"}) == {
        "0": "fp32",
        "1": "fp32",
        "1.0": "fp32",
        "1.1": "fp32",
    }
    assert resolve(model(), {"1.0": "a", "1.*": "b"}) == {"1.0": "a", "1.1": "b"}


@each(
    ("layers", "message"),
    [
        ({"1.*": "fp32", "*.0": "fp32"}, r"1\.\* and \*\.0 both fit module '1\.0'"),
        ({"9": "fp32"}, "no module is named '9'.*legal: 0, 1, 1.0, 1.1, 2"),
        ({"1.9": "fp32"}, "did you mean '1.[01]'"),
        ({"x*": "fp32"}, "no module is named 'x\\*'"),
    ],
)
def test_mistakes_name_what_is_legal(layers: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(model(), layers)


# ---- modules without parameters, modes for layers ----


class Small(nn.Module):
    """Two linear layers, a norm, a pool between them and a softmax at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.pool = nn.AvgPool1d(2)
        self.fc2 = nn.Linear(4, 3)
        self.predictions = nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.predictions(self.fc2(self.pool(self.norm(self.fc1(x)))))
        return out


def prepared(mode: str, layers: dict[str, str], lists: bool = False) -> tuple[Small, Precision]:
    row = policy(mode)
    dtype = torch_dtype(row.compute_dtype)
    caster: Caster = NoCaster() if row.casting == "none" else AutocastCaster("cpu", dtype)
    if lists:
        row = replace(row, casting="op_lists")
        caster = OpListCaster(op_lists(["linear"], ["softmax"], []), dtype)
    torch.manual_seed(0)
    model = Small()
    native, scale = NativeArithmetic(), LossScale()
    ours = Precision(row, execution=native, loss_scale=scale, layers=layers, op_lists=caster)
    ours.prepare(model, CPU)
    return model, ours


def computed(model: nn.Module, ours: Precision) -> dict[str, str]:
    """The dtype of what each layer computes in a forward pass."""
    seen: dict[str, str] = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: str(out.dtype)[6:]})
        )
    x = torch.randn(2, 8).to(torch_dtype(ours.policy.input_dtype))
    ours.backward(ours.forward(model, x).square().sum())
    return seen


F32, F16, B16 = "float32", "float16", "bfloat16"
ANY = "any"  # as the caster has it
# mode, layers, whether op lists, what each layer computes in, what 16-bit parameters there are
CASES: list[tuple[str, dict[str, str], bool, list[str], dict[str, str]]] = [
    ("fp32", {"pool": "fp16"}, False, [F32, F32, F16, F32, F32], {}),
    ("fp32", {"fc1": "bf16_mixed"}, False, [B16, F32, F32, F32, F32], {}),
    ("fp32", {"fc1": "fp16_true"}, False, [F16, F32, F32, F32, F32], {"fc1": F16}),
    (
        "half_sr",
        {"predictions": "fp32"},
        False,
        [F16, F16, F16, F16, F32],
        {"fc1": F16, "norm": F16, "fc2": F16},
    ),
    (
        "half_sr",
        {"fc1": "bf16_sr", "norm": "fp32", "fc2": "fp16_mixed"},
        False,
        [B16, F32, F32, F16, F16],
        {"fc1": B16},
    ),
    ("bf16_mixed", {"pool": "fp16", "predictions": "fp32"}, False, [B16, ANY, F16, B16, F32], {}),
    ("bf16_mixed", {"fc1": "fp16_mixed", "fc2": "fp32"}, False, [F16, ANY, ANY, F32, ANY], {}),
    ("bf16_mixed", {"norm": "fp16_true"}, False, [B16, F16, ANY, B16, ANY], {"norm": F16}),
    ("bf16_mixed", {"fc1": "fp16", "pool": "fp32"}, True, [F16, ANY, F32, B16, F32], {}),
    ("bf16_mixed", {"fc1": "fp16_true"}, True, [F16, ANY, ANY, B16, F32], {"fc1": F16}),
]


@each(("mode", "layers", "lists", "computes", "stored"), CASES)
def test_a_layer_stores_and_computes_in_its_precision_and_the_table_says_so(
    mode: str, layers: dict[str, str], lists: bool, computes: list[str], stored: dict[str, str]
) -> None:
    model, ours = prepared(mode, layers, lists)
    own = {name: next(m.parameters(), None) for name, m in model.named_children()}
    assert {n: str(p.dtype)[6:] for n, p in own.items() if p is not None and p.itemsize == 2} == (
        stored
    )
    seen = computed(model, ours)
    assert [
        x if y != ANY else ANY for x, y in zip(seen.values(), computes, strict=True)
    ] == computes
    for p in model.parameters():
        assert p.grad is not None
        assert torch.isfinite(p.grad).all()
    rows = {row.name: row for row in layer_rows(model, layers, ours.policy)}
    assert {*rows} == {"fc1", "norm", "fc2", *layers}
    for name in layers:
        assert rows[name].compute == seen[name]
        p = own[name]
        assert rows[name].parameters == ("none" if p is None else str(p.dtype)[6:])


def test_a_containers_own_ops_run_in_its_dtype() -> None:
    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x * x * x)

    model = nn.Sequential(nn.Linear(2, 2), Cube())
    ours = Precision("fp16_true", device=CPU, execution="native", layers={"1": "fp32"})
    ours.prepare(model, CPU)
    assert torch.isfinite(ours.forward(model, torch.full((1, 2), 500.0).half())).all()


def test_a_mixed_layer_equals_autocast_around_it() -> None:
    model, ours = prepared("fp32", {"fc1": "bf16_mixed"})
    plain, _ = prepared("fp32", {})
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        first = plain.fc1(x)
    rest = plain.predictions(plain.fc2(plain.pool(plain.norm(first.float()))))
    assert torch.equal(ours.forward(model, x), rest)


@each(
    ("mode", "value", "message"),
    [
        ("fp32", "bf16_sr", "fc1: bf16_sr rounds its parameters stochastically"),
        ("half_sr", "bf16_true", "legal: bf16_sr, or another"),
        ("half_sr", "half_sr_full", "which one layer of precision=half_sr cannot; legal: "),
        ("bf16_mixed", "tf32", "'tf32'; legal is a dtype or a mode, one of fp32, fp16, bf16, fp8"),
    ],
)
def test_modes_that_one_layer_cannot_have_are_refused(mode: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Precision(mode, device=CPU, layers={"fc1": value}).prepare(Small(), CPU)


def test_the_names_of_formats_are_those_of_products() -> None:
    assert {*FORMAT_MODES} == {*GEMMS}
    assert {*OF_A_PRODUCT} == {*PRODUCT_FORMATS}


# ---- copies and files of a prepared model ----


def copied(model: Any, how: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


PREPARED = {
    "op lists": ("bf16_mixed", {"fc1": "fp16", "predictions": "fp32"}, True),
    "autocast": ("bf16_mixed", {"fc1": "fp16_mixed", "norm": "fp16_true"}, False),
    "none": ("half_sr", {"fc1": "bf16_sr", "fc2": "fp16_mixed", "pool": "fp32"}, False),
}


@each("how", ["deepcopy", "pickle", "torch.save"])
@each("name", PREPARED)
def test_a_copy_computes_the_same_with_its_own_parameters(name: str, how: str) -> None:
    mode, layers, lists = PREPARED[name]
    model, ours = prepared(mode, layers, lists)
    other = copied(model, how)
    x = torch.randn(2, 8).to(torch_dtype(ours.policy.input_dtype))
    expected = ours.forward(model, x).detach()
    for _ in range(2):  # with gradients: no weight cast for the first backward pass is kept
        other.zero_grad()
        output = ours.forward(other, x)
        assert torch.equal(output, expected)
        ours.backward(output.square().sum())
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert torch.equal(ours.forward(model, x), expected)
    assert not torch.equal(ours.forward(other, x), expected)
