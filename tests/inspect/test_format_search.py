"""GEMMs that do not tolerate a format: a planted outlier is found, by search and diff."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import mprun
from mprun.cli.main import main
from mprun.inspect.cast_probe import CastProbe
from mprun.inspect.op_search import GemmCandidates, Sensitivity, with_high
from mprun.inspect.passes import Passes
from mprun.inspect.tolerance import DEFAULT
from mprun.precision.gemms import GEMMS, computing_with, formats_of, model_gemms
from mprun.records.layer_values import PRODUCTS, layer_values, with_high_products
from mprun.records.policy_columns import FORMAT_MODES

pytestmark = pytest.mark.usefixtures("native_is_fast")

WIDTH, OUTLIER = 64, "3"
"""The name of the layer behind the outliers."""


class Outliers(nn.Module):
    """One number in each block of 16 becomes large; the next layer makes it small again."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.register_buffer("factors", torch.ones(WIDTH))
        self.factors[::16] = size

    def forward(self, x: Tensor) -> Tensor:
        factors: Tensor = self.factors
        return x * factors


def model(size: float = 1.0, layers: int = 5) -> nn.Module:
    """Layers 0, 1, 3, 4, ...; the inputs of layer 3 have outliers of this size."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
    modules.insert(2, Outliers(size))
    with torch.no_grad():
        modules[3].weight[:, ::16] /= size  # type: ignore[index, operator]
    return nn.Sequential(*modules)


class RowOutliers(nn.Module):
    """Every 16th sample is multiplied by `size`."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.ones(len(x), 1)
        factors[::16] = self.size
        return x * factors


def planted(product: str, size: float) -> nn.Module:
    """A model in which one number of each block of a factor of `3.<product>` is large.

    Each block lies along the dimension that the product sums over, so the same numbers are in
    blocks without outliers in the other two products.
    """
    if product == "forward":
        return model(size)
    net = nn.Sequential(*model().children())
    net[2] = nn.Identity()
    if product == "grad_input":  # the gradient of layer 3's output has large features
        net.insert(4, Outliers(size))
        with torch.no_grad():
            net[3].weight[::16] /= size  # type: ignore[index, operator]
            net[3].bias[::16] /= size  # type: ignore[index, operator]
    else:  # large samples of its input, whose gradients are small
        net[2] = RowOutliers(size)
        net.insert(4, RowOutliers(1 / size))
        net[3].bias = None
    return net


def sensitivity_of(net: nn.Module, mode: str, per: str = "gemm") -> Sensitivity:
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(64, WIDTH, generator=generator) for _ in "xy") for _ in range(3)]
    passes = Passes(net, nn.functional.mse_loss, batches)
    before = copy.deepcopy(net.state_dict())
    found = Sensitivity(CastProbe(passes), GemmCandidates(model_gemms(net, {}, mode), per))
    found.measure()
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any("forward" in vars(module) for module in net.modules())
    return found


@pytest.mark.representative("nvfp4", "fp8_rowwise_hp")
@pytest.mark.parametrize("mode", FORMAT_MODES)
def test_gemms_without_outliers_tolerate_each_format(mode: str) -> None:
    found = sensitivity_of(model(), mode)
    products = [p for p in PRODUCTS if getattr(GEMMS[mode], p).formats]
    expected = [f"{layer}.{product}" for layer in "134" for product in products]
    assert [effect.name for effect in found.ops] == expected
    high = found.smallest()
    assert (high.high, high.is_within) == ((), True)
    in_bfloat16 = found.kept((*found.candidates.names,))
    assert in_bfloat16.gradients_db > found.kept(()).gradients_db


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_one_gemm_behind_outliers_must_stay_high_in_four_bits(product: str) -> None:
    found = sensitivity_of(planted(product, 300.0), "nvfp4")
    high = found.smallest()
    assert (high.high, high.is_within) == ((f"{OUTLIER}.{product}",), True)
    assert (
        max(found.ops, key=lambda effect: found.beside(DEFAULT).harm(effect.alone)).name
        == f"{OUTLIER}.{product}"
    )


@pytest.mark.representative("forward")
@pytest.mark.parametrize("product", PRODUCTS)
def test_eight_bits_have_the_range_for_the_same_outliers(product: str) -> None:
    """E4M3 has numbers from 2^-9 to 448."""
    found = sensitivity_of(planted(product, 300.0), "mxfp8")
    assert found.smallest().high == ()


def test_layers_can_be_searched_as_a_whole() -> None:
    found = sensitivity_of(model(300.0), "nvfp4", "layer")
    assert [effect.name for effect in found.ops] == ["1", "3", "4"]
    high = found.smallest()
    assert (high.high, high.is_within) == ((OUTLIER,), True)
    assert isinstance(found.candidates, GemmCandidates)
    assert found.candidates.layers("nvfp4", high.high) == {OUTLIER: "bf16"}


@pytest.mark.representative("mxfp8", "nvfp4", "fp8_rowwise_hp")
@pytest.mark.parametrize("mode", FORMAT_MODES)
def test_diff_explains_the_errors_of_a_format(mode: str) -> None:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    a, b = model(layers=3), model(layers=3)
    mprun.Precision(mode, device="cpu", execution="emulated").prepare(b)
    for sides in ((b, a), (b, b), (a, b)):
        found = mprun.diff(*sides, x)
        assert found.first is None, found
    errors = {row.b.dtype for row in found.rows}
    assert {f.name for f in formats_of(b[1])} & errors


def test_diff_names_the_layer_behind_outliers() -> None:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    a, b = model(300.0), model(300.0)
    mprun.Precision("nvfp4", device="cpu", execution="emulated").prepare(b)
    first = mprun.diff(a, b, x).first
    assert first is not None
    assert (first.module, first.phase, first.op) == (OUTLIER, "forward", "linear")


def command(folder: str, *more: str) -> dict[str, Any]:
    """`search_ops.json` of a short search, and of `use it`, its run."""
    words = ["recipe=mnist", "data.source=generated", "precision=nvfp4", "device=cpu"]
    quick = ["search_ops.batches=2", "search_ops.warmup_steps=2"]
    given = [*words, *quick, *more, "train.batch_size=64", f"run.dir={folder}"]
    assert main(["search-ops", *given]) == 0
    content: dict[str, Any] = json.loads(
        Path(folder, "search_ops.json").read_text(encoding="utf-8")
    )
    return content


def test_a_run_with_the_file_has_the_products_of_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # better than rounded weights alone: not all of this small layer's products can stay in 4 bits
    monkeypatch.setattr(GemmCandidates, "slack_db", -4.0)
    found = command("found", "search_ops.batches=1")
    printed = capsys.readouterr().out
    kept = found["answer"]["high"]
    assert 0 < len(kept) < 3
    named = yaml.safe_load(Path("found/layers.yaml").read_text(encoding="utf-8"))
    assert layer_values(named) == found["layers"]
    (line,) = (line for line in printed.splitlines() if line.startswith("use it: "))
    words = shlex.split(line.removeprefix("use it: mprun "))
    assert main([*words, "train.max_steps=2", "run.dir=run", "data.eval_limit=64"]) == 0
    summary = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    assert summary["converted_gemms"] == ["2"]
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    net.append(nn.Linear(256, 10))
    (of_layer,) = model_gemms(net, found["layers"], "nvfp4").values()
    high = [f"2.{product}" for product in PRODUCTS if not getattr(of_layer, product).formats]
    assert high == sorted(kept)


@pytest.mark.parametrize(
    ("mode", "high", "value"),
    [
        ("nvfp4", ["forward"], "forward=bf16,grad_input=nvfp4,grad_weight=nvfp4"),
        ("nvfp4", [*PRODUCTS], "bf16"),
        # The mode itself leaves gradients of weights in bfloat16.
        ("fp8_rowwise_hp", ["forward"], "forward=bf16,grad_input=fp8_rowwise_hp,grad_weight=bf16"),
        ("fp8_rowwise_hp", ["forward", "grad_input"], "bf16"),
    ],
)
def test_layers_of_an_answer(mode: str, high: list[str], value: str) -> None:
    net = model()
    gemms = model_gemms(net, {}, mode)
    names = [f"3.{product}" for product in high]
    layers = GemmCandidates(gemms).layers(mode, names)
    assert layers == {"3": value}
    # What a run makes of the file is what was measured.
    made = model_gemms(model(), layers, mode)
    expected = with_high(gemms, names)
    assert {*made} == {*expected}
    for layer, of_layer in made.items():
        assert [g.formats for g in of_layer] == [g.formats for g in expected[layer]]


@pytest.mark.parametrize("product", PRODUCTS)
def test_bfloat16_in_the_file_is_what_the_mode_computes_without_a_format(product: str) -> None:
    """Equal bits: `bf16` names the dtype that autocast gives the layer."""
    nets = [model(), model()]
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    layers = {"3": with_high_products("mxfp8", [product])}
    named = mprun.Precision("mxfp8", device="cpu", execution="emulated", layers=layers)
    named.prepare(nets[0])
    named.forward(nets[0], x).square().sum().backward()
    plain = mprun.Precision("bf16_mixed", device="cpu", execution="native")
    plain.prepare(nets[1])
    high = with_high(model_gemms(nets[1], {}, "mxfp8"), [f"3.{product}"])
    with computing_with(nets[1], high, 0):
        plain.forward(nets[1], x).square().sum().backward()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_one_inner_layer_may_have_some_products_in_bfloat16() -> None:
    """The file names the only layer that the mode converts."""
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])
    made = model_gemms(net, {"1": "forward=bf16,grad_weight=nvfp4"}, "nvfp4")
    assert [bool(g.formats) for g in made["1"]] == [False, False, True]
    with pytest.raises(ValueError, match="no product of this model can have the mode's format"):
        model_gemms(net, {"1": "forward=bf16"}, "nvfp4")


@pytest.mark.parametrize(
    ("more", "fragments"),
    [
        (
            ["precision=bf16_mixed", "search_ops.per=layer"],
            ["search_ops.per=layer: precision=bf16_mixed has no format", "precision=mxfp8"],
        ),
        (["precision=nvfp4", "search_ops.per=op"], ["search_ops.per", "gemm", "layer"]),
    ],
    ids=str,
)
def test_a_mistake_ends_with_status_2_and_one_line(
    more: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=mnist", "data.source=generated", "device=cpu", "train.batch_size=64"]
    assert main(["search-ops", *words, *more, "run.dir=found"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mprun: ")
    assert [text for text in fragments if text not in line] == [], line
    assert not Path("found/search_ops.json").exists()
