"""Habana HMP: op lists (rows A1 to A13)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.config import compose
from mprun.precision import OpListCaster, op_lists
from mprun.recipes.linear import Linear
from mprun.records.policy_columns import FORMAT_MODES
from tests.reference_features.runs import LINEAR, MNIST, dtypes, losses, run, same, weights, written

pytestmark = pytest.mark.usefixtures("native_is_fast", "one_traced_step", "quick_runs")

BF16, FP32 = torch.bfloat16, torch.float32

A2 = """addmm, batch_norm, bmm, conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d,
conv_transpose3d, dot, dropout, dropout1d, dropout2d, dropout3d, group_norm, instance_norm,
layer_norm, leaky_relu, linear, matmul, mm, mul, mv, relu, t"""
A3 = """binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, div, divide,
embedding, embedding_bag, log, log2, log_softmax, nll_loss, smooth_l1_loss, softmax, topk,
truediv"""
A8 = """addmm, avg_pool2d, bmm, conv2d, dot, max_pool2d, mm, mv, relu, t, linear"""
A8_FP32 = "cross_entropy, log_softmax, softmax, nll_loss, topk"


def names(text: str) -> set[str]:
    return set(text.replace("\n", " ").replace(",", " ").split())


def shipped(name: str) -> dict[str, list[str]]:
    """The lists of a file in conf/op_lists."""
    text = (files("mprun.conf") / "op_lists" / f"{name}.yaml").read_text(encoding="utf-8")
    section: dict[str, list[str]] = yaml.safe_load(text)["op_lists"]
    return section


def hmp() -> OpListCaster:
    """The default lists in bfloat16."""
    section = shipped("hmp")
    lists = op_lists(section["lower"], section["fp32"], section["promote"])
    return OpListCaster(lists, BF16)


def file(name: str, *lines: str) -> str:
    Path(name).write_text("\n".join(lines), encoding="utf-8")
    return name


def test_a1_listed_ops_cast_their_inputs() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    with hmp().region():
        lower = nn.functional.linear(x, w)
        upper = torch.softmax(x.bfloat16(), 1)
    assert torch.equal(lower, nn.functional.linear(x.bfloat16(), w.bfloat16()))
    assert torch.equal(upper, torch.softmax(x.bfloat16().float(), 1))
    rows = written("trace", *MNIST, "op_lists=hmp", file="trace.json")["rows"]
    linear = [row for row in rows if (row["op"], row["phase"]) == ("linear", "forward")]
    assert [(row["rule"], row["dtypes_out"]) for row in linear] == [
        ("listed lower", ["bfloat16"])
    ] * 3


def test_a2_the_default_bf16_list() -> None:
    assert set(shipped("hmp")["lower"]) == names(A2)
    found = compose(["op_lists=hmp"]).config
    assert set(found.op_lists.lower) == names(A2)


def test_a3_the_default_fp32_list() -> None:
    assert set(shipped("hmp")["fp32"]) == names(A3)
    assert set(compose(["op_lists=hmp"]).config.op_lists.fp32) == names(A3)


def test_a7_a_file_overrides_either_list() -> None:
    lower = file("lower.txt", "linear", "", "relu  ", "softmax")  # softmax is on the other list
    run("op_lists=hmp", f"op_lists.lower_file={lower}", "train.max_steps=2")
    kept = yaml.safe_load(Path("run/config.yaml").read_text(encoding="utf-8"))["op_lists"]
    assert set(kept["lower"]) == {"linear", "relu", "softmax"}
    fp32 = file("fp32.txt", "linear", "relu")
    run("op_lists=hmp", f"op_lists.fp32_file={fp32}", name="exact")
    run("precision=fp32", name="plain")
    assert losses("exact")[0] == losses("plain")[0]  # nothing else computes
    both = [f"op_lists.lower_file={lower}", f"op_lists.fp32_file={fp32}"]
    assert main([*MNIST, "op_lists=hmp", *both, "run.dir=refused"]) == 2  # they contradict


def test_a8_the_lists_for_resnet50() -> None:
    section = shipped("hmp_resnet50")
    assert set(section["lower"]) == names(A8)
    assert set(section["fp32"]) == names(A8_FP32)
    assert run("op_lists=hmp_resnet50").variant == "bf16_mixed+hmp_resnet50"


def test_a11_the_linear_recipe_is_the_published_one() -> None:
    config = compose(["recipe=linear"]).config
    assert (config.recipe.model["samples"], config.train.batch_size) == (64, 64)
    assert (config.recipe.model["in_features"], config.recipe.model["out_features"]) == (1024, 512)
    assert (config.train.lr, config.train.epochs) == (1e-3, 500)
    run("op_lists=hmp", recipe=["recipe=linear", "device=cpu", "speed=plain"], steps=5)
    assert dtypes() == {FP32}  # the optimizer step is outside of the casts
    assert same(weights(), _sgd(Linear(1024, 512, 64), 5))


def _sgd(recipe: Linear, steps: int) -> dict[str, Tensor]:
    """Raw PyTorch: `linear` in bfloat16 by hand, everything else in float32."""
    from mprun.train.data import DataRequest

    data = recipe.data(DataRequest()).train
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        low = [p.bfloat16() for p in (data.inputs, model.weight, model.bias)]
        recipe.loss(nn.functional.linear(*low).float(), data.content).backward()
        optimizer.step()
    return dict(model.state_dict())


MODES = sorted(
    path.name.removesuffix(".yaml")
    for path in (files("mprun.conf") / "precision").iterdir()
    if path.name.endswith(".yaml")
)


@pytest.mark.representative("half_sr", "bf16_true")
@pytest.mark.parametrize("mode", MODES)
def test_a13_every_mode_runs_on_a_cpu(mode: str) -> None:
    recipe = MNIST if mode in FORMAT_MODES else LINEAR  # which has no inner linear layer
    summary = run(f"precision={mode}", recipe=recipe, steps=20)
    assert summary.hardware.device == "cpu"
    assert losses()[-1] < losses()[0]
