"""`mprun numerics` on the hostile models: no false alarm, no miss, against training and float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.inspect.cast_probe import CastProbe
from mprun.inspect.passes import CastPlan, Passes
from mprun.precision import AutocastCaster
from tests.adversarial import models
from tests.adversarial.models import CASES, CLASSES, FEATURES, Case
from tests.adversarial.recipe import FLOAT32_IS_EXACT, WORDS, write_recipe
from tests.adversarial.seeds import SEEDS

Function = Callable[[Tensor], Tensor]
FEW = ("numerics.steps=3", "numerics.span=60", "numerics.plots=false", "run.dir=run")


@pytest.fixture(autouse=True)
def recipe(in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(in_empty_folder)
    monkeypatch.setenv("COLUMNS", "200")


def looked(case: str, seed: int, precision: str = "fp32") -> dict[str, Any]:
    """numerics.json of a case."""
    words = (*WORDS, f"recipe.model.case={case}", f"precision={precision}", f"seed={seed}")
    assert main(["numerics", *words, *FEW]) == 0
    found: dict[str, Any] = json.loads(Path("run/numerics.json").read_text(encoding="utf-8"))
    return found


def needed(case: Case) -> str:
    """The verdict that agrees with training in autocast."""
    fp16, bf16 = "fp16_mixed" not in case.fails, "bf16_mixed" not in case.fails
    if fp16 and bf16:
        return "either"
    return "needs range: bf16" if bf16 else "needs precision: fp16" if fp16 else "needs fp32"


DECIDING_ROWS = {
    "outlier_beyond_fp16": ("weight_gradients body.0.weight", "activations (input)"),
    "log_of_zero": ("the loss in float16",),
    "fp16_hostile": ("weight_gradients first.weight",),
    "bf16_hostile": ("weight_gradients offset.map.weight",),
}
"""Rows that have to be named beside a verdict, with others or without."""


@pytest.mark.representative(
    "fp16_hostile-0", "bf16_hostile-0", "outlier_beyond_fp16-0", "log_of_zero-0", "tied-0"
)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_what_training_shows(
    name: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    case, found = CASES[name], looked(name, seed)
    verdict = found["verdict"]
    assert verdict["word"] == needed(case), verdict["reason"]
    # Zero by the gradients in float64 (test_truth.py), some of them in float32 as well.
    kinds = ("undetermined", "zero_gradients")
    zero, other = reversed(kinds) if name in FLOAT32_IS_EXACT else kinds
    assert (verdict[zero], verdict[other]) == (sorted(case.zero), [])
    assert verdict["reference"] == {"name": "float64", "reason": ""}
    verdicts = {row["verdict"] for row in found["rows"]} - {None, "either"}
    hostile = verdict["word"] != "either"
    deciding_rows = verdict["deciding_rows"]
    assert [row for row in DECIDING_ROWS.get(name, ()) if row not in deciding_rows] == []
    assert (deciding_rows != []) == hostile
    assert (f"decided by: {', '.join(deciding_rows[:2])}" in capsys.readouterr().out) == hostile
    assert verdicts <= ({verdict["word"]} if hostile else set())
    assert verdict["rows_of_another_verdict"] == []
    for row in found["rows"]:
        if row["name"] in case.zero and "gradients" in row["kind"]:
            assert row["verdict"] is None or row["histogram"]["largest"] == 0


# ---- a conv bias before BatchNorm, and what is around it -----------------------------------------


class Around(nn.Module):
    """`ConvBias` with something before the convolution, and something between it and BatchNorm."""

    def __init__(self, before: Function, between: Function, bias: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 16, 3, padding=1, bias=bias), nn.BatchNorm2d(16)
        self.more, self.last = nn.Conv2d(16, 8, 3, padding=1), nn.LazyLinear(CLASSES)
        self.before, self.between = before, between
        self(torch.zeros(2, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(self.conv(self.before(x.unflatten(1, (1, 4, 4)))))
        out: Tensor = self.last(self.more(self.norm(h).relu()).relu().flatten(1))
        return out


def same(x: Tensor) -> Tensor:
    return x


def noise(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x) + 0.1 * torch.randn(x.shape)


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (3, 3, 3, 3))


class Half(nn.Module):
    """Some of each batch is padding."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[: len(x) // 2], torch.zeros_like(x[len(x) // 2 :])])


AROUND: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "plain": (partial(Around, same, same), ("conv.bias",)),
    "no_bias": (partial(Around, same, same, bias=False), ()),
    "dropout": (partial(Around, partial(F.dropout, p=0.3), same), ("conv.bias",)),
    "noise": (partial(Around, noise, noise), ("conv.bias",)),
    "padding": (partial(Around, padded, same), ("conv.bias",)),
    "empty_samples": (partial(Around, Half(), same), ("conv.bias",)),
    # What is dropped behind the convolution takes part of the bias with it: it has a gradient.
    "dropout_behind": (partial(Around, same, partial(F.dropout, p=0.3)), ()),
}


@pytest.mark.representative("*-0")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_bias_neither_hides_it_nor_brings_others(name: str, seed: int) -> None:
    model, zero = AROUND[name]
    torch.manual_seed(seed)
    probed, data = model(), [models.points(64, 100 + seed + n) for n in range(2)]
    optimizer = torch.optim.AdamW(probed.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(probed(data[0].inputs), data[0].targets).backward()
        optimizer.step()
    probe = CastProbe(Passes(probed, F.cross_entropy, data))
    assert (probe.rounding.undetermined, probe.rounding.zero) == (zero, ())
    assert probe.rounding.reference.name == "float64"
    assert probe.measure(CastPlan(AutocastCaster("cpu", torch.bfloat16))).worst_db > 10


# ---- loss scales ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "needed"), [(1.0, False), (1e-7, True)])
def test_whether_a_loss_scale_is_needed_is_said_and_is_so(
    factor: float, needed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of gradients near 1e-9, float16 keeps none without a loss scale."""
    cross_entropy = models.loss_of("tied")
    monkeypatch.setattr(models, "loss_of", lambda _: lambda out, y: factor * cross_entropy(out, y))
    words = (*WORDS, "recipe.model.case=tied", *FEW)
    assert main(["numerics", *words, "precision=fp32"]) == 0
    scale = json.loads(Path("run/numerics.json").read_text(encoding="utf-8"))["loss_scale"]
    assert scale["needed"] == needed
    verdicts = {v["label"]: v for v in scale["verdicts"]}
    assert (verdicts["none"]["word"] != "fine") == needed
    assert all(v["reason"] for v in scale["verdicts"])
    out = capsys.readouterr().out
    assert "\nwithout a loss scale " in out
    assert scale["need"].startswith("one is needed: " if needed else "none is needed: ")
    assert ("\n  recommended: " in out) == needed
    assert ("\n  largest that fits: " in out) == (not needed)
