"""Layers that do not tolerate a format: an outlier that is planted is found, by search and diff."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

import mprun
from mprun.cli.main import main
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.format_search import SLACK_DB, FormatSensitivity
from mprun.numerics.passes import Passes
from mprun.numerics.tolerance import DEFAULT
from mprun.precision.gemms import formats_of, model_gemms
from mprun.records.format_names import FORMAT_MODES

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


def model(size: float = 1.0, layers: int = 6) -> nn.Module:
    """Layers 0, 1, 3, 4, ...; the inputs of layer 3 have outliers of this size."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
    modules.insert(2, Outliers(size))
    with torch.no_grad():
        modules[3].weight[:, ::16] /= size  # type: ignore[index, operator]
    return nn.Sequential(*modules)


def searched(mode: str, size: float) -> tuple[FormatSensitivity, tuple[str, ...], bool]:
    net = model(size)
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(64, WIDTH, generator=generator) for _ in "xy") for _ in range(3)]
    probe = CastProbe(Passes(net, nn.functional.mse_loss, batches))
    gemms = model_gemms(net, {}, mode)
    before = copy.deepcopy(net.state_dict())
    found = FormatSensitivity(probe, gemms, "cpu")
    tolerance = DEFAULT.beside(found.unavoidable, SLACK_DB)
    found.measure(tolerance)
    high = found.smallest(tolerance, dict.fromkeys(gemms, 1 / len(gemms))).search
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any("forward" in vars(module) for module in net.modules())
    return found, high.fp32, high.is_within


@pytest.mark.parametrize("mode", FORMAT_MODES)
def test_layers_without_outliers_tolerate_each_format(mode: str) -> None:
    found, high, within = searched(mode, 1.0)
    assert [effect.name for effect in found.effects] == ["1", "3", "4", "5"]
    assert (high, within) == ((), True)
    assert found.bfloat16.gradients_db > found.everything.gradients_db


def test_the_layer_behind_outliers_must_stay_high_in_four_bits() -> None:
    found, high, within = searched("nvfp4", 300.0)
    assert (high, within) == ((OUTLIER,), True)
    assert max(found.effects, key=lambda effect: effect.harm).name == OUTLIER
    assert searched("mxfp8", 300.0)[1] == ()  # E4M3 has numbers from 2^-9 to 448


@pytest.mark.parametrize("mode", FORMAT_MODES)
def test_diff_explains_the_errors_of_a_format(mode: str) -> None:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    a, b = model(), model()
    mprun.Precision(mode, device="cpu", execution="emulated").prepare(b)
    for sides in ((a, b), (b, a), (b, b)):
        found = mprun.diff(*sides, x)
        assert found.first is None, found
    errors = {row.b.dtype for row in mprun.diff(a, b, x).rows}
    assert {f.name for f in formats_of(b[1])} & errors


def test_diff_names_the_layer_behind_outliers() -> None:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    a, b = model(300.0), model(300.0)
    mprun.Precision("nvfp4", device="cpu", execution="emulated").prepare(b)
    first = mprun.diff(a, b, x).first
    assert first is not None
    assert (first.module, first.phase, first.op) == (OUTLIER, "forward", "linear")


def test_the_command_writes_layers_that_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=mnist", "data.source=generated", "precision=nvfp4", "device=cpu"]
    quick = ["search_ops.batches=2", "search_ops.warmup_steps=2", "search_ops.steps=3", "seeds=2"]
    assert main(["search-ops", *words, *quick, "train.batch_size=64", "run.dir=found"]) == 0
    printed = capsys.readouterr().out
    assert "use it: mprun" in printed
    found = json.loads(Path("found/search_ops.json").read_text(encoding="utf-8"))
    assert found["format"] == "nvfp4"
    assert [row["name"] for row in found["layers"]] == ["2"]
    assert found["layers"][0]["operations"] == 1
    assert len(found["proof"]["values"]) == 2
    layers = Path("found/layers.yaml")
    assert not layers.exists() or yaml.safe_load(layers.read_text(encoding="utf-8"))
