"""`debug.guard` in real runs: what is promoted, said, recorded, and left as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mprun.cli.main import main
from mprun.precision import execution
from mprun.records.run_record import GuardedGemm, Summary, read_lines, read_summary
from mprun.train import recorder
from tests.run.test_resume import assert_equal, assert_same_run, trained
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("native_is_fast")

RECIPE = '''
"""Blocks with an outlier of known place: the input of one has a feature that is 1e5 times larger.

The weights of that feature are as much smaller, so the model computes the same numbers, and stay
as they are: the optimizer's steps would be 1e5 times too large for them.
"""

import torch
from torch import nn
from torch.nn import functional as F

DEFAULTS = {"train.max_steps": 6, "train.batch_size": 64, "train.lr": 1e-3}
OUTLIERS = (1.0, 1e5, 1.0)


class Block(nn.Module):
    def __init__(self, outlier):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
        self.register_buffer("scale", torch.tensor([outlier, *[1.0] * 63]))
        with torch.no_grad():
            self.linear.weight[:, 0] /= outlier
        if outlier != 1:
            self.linear.weight.register_hook(lambda g: g * (torch.arange(64) > 0).to(g))

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x) * self.scale))


def model():
    return nn.Sequential(nn.Linear(16, 64), *map(Block, OUTLIERS), nn.Linear(64, 4))


def data():
    x = torch.randn(384, 16)
    y = (x[:, :4] * x[:, 4:8]).argmax(1)
    return {"train": (x[:256], y[:256]), "test": (x[256:], y[256:])}


def loss(output, batch):
    return F.cross_entropy(output, batch[1])
'''
ALL = ("forward", "grad_input", "grad_weight")
WORDS = ["recipe=planted.py", "device=cpu"]


@pytest.fixture(autouse=True)
def planted() -> None:
    Path("planted.py").write_text(RECIPE, encoding="utf-8")
    healthy = RECIPE.replace("1e5, 1.0)", "1.0, 1.0)")
    assert healthy != RECIPE
    Path("healthy.py").write_text(healthy, encoding="utf-8")


def run(
    name: str, *words: str, mode: str = "fp8_tensorwise", status: int = 0, measured: bool = False
) -> Summary:
    """A run into the folder `name`, which ends with this status.

    The memory of a step is only `measured` where asked, for that takes as long as the run.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not measured:
            patch.setattr("mprun.train.run.footprint", lambda *_: ({}, None))
        assert main([*WORDS, f"precision={mode}", *words, f"run.dir={name}"]) == status
    summary = read_summary(Path(name))
    conforms(summary, Summary)
    return summary


def gemms(summary: Summary) -> list[GuardedGemm]:
    assert summary.guard is not None
    return summary.guard.gemms


def found(summary: Summary) -> dict[tuple[str, str], int]:
    """In how many steps each product was found."""
    return {(x.module, x.product): x.steps for x in gemms(summary)}


def events(name: str) -> list[dict[str, Any]]:
    return [x for x in read_lines(Path(name)) if x.get("event") == "guard"]


# ---- what is found -------------------------------------------------------------------------------


def test_the_planted_layer_is_promoted_and_its_file_trains_it_in_bfloat16(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = run("first", "debug.guard=promote", measured=True)
    assert (first.memory_bytes.peak or 0) > 0
    out = capsys.readouterr().out
    assert found(first) == {("2.linear", name): 6 for name in ALL}
    assert first.variant == "fp8_tensorwise+guard"
    assert "guard: promoted 3 products of 1 layer: 2.linear (forward in 6 steps, grad_inp" in out
    assert "precision.layers_file=first/guard_layers.yaml, in place of precision.layers" in out
    assert [(x["step"], x["product"]) for x in events("first")] == [
        (step, name) for step in range(1, 7) for name in ALL
    ]
    row = events("first")[0]
    assert (row["kind"], row["action"], row["module"]) == ("event", "promote", "2.linear")
    assert (row["factors"], row["epoch"]) == (["input"], 1)
    assert row["underflow"] > 0.3

    assert yaml.safe_load(Path("first/guard_layers.yaml").read_text()) == {"2.linear": "bf16"}
    words = ["precision.layers_file=first/guard_layers.yaml", "debug.guard=promote"]
    second = run("second", *words)
    assert "guard: no product passed a threshold" in capsys.readouterr().out
    assert gemms(second) == []
    assert not Path("second/guard_layers.yaml").exists()
    assert first.converted_gemms == ["1.linear", "2.linear", "3.linear"]
    assert second.converted_gemms == ["1.linear", "3.linear"]
    # All products of the layer were promoted in every step, so that it is the same training.
    # (Without a bias, which a layer in bfloat16 adds before its result is rounded.)
    assert_equal(trained(Path("first"))["model"], trained(Path("second"))["model"])


def test_the_file_keeps_exactly_the_products_that_were_found() -> None:
    """In this mode the forward product alone, and the run's own layers stay in the file."""
    first = run(
        "first",
        "debug.guard=promote",
        "precision.layers={0: fp8, 3: {forward: mxfp8}}",
        mode="mxfp8",
    )
    assert found(first) == {("2.linear", "forward"): 6}
    assert yaml.safe_load(Path("first/guard_layers.yaml").read_text()) == {
        "3": {"forward": "mxfp8"},
        "0": "fp8",
        "2.linear": {"forward": "bf16", "grad_input": "mxfp8", "grad_weight": "mxfp8"},
    }
    second = run("second", "precision.layers_file=first/guard_layers.yaml", mode="mxfp8")
    assert second.converted_gemms is not None
    assert sorted(second.converted_gemms) == sorted(first.converted_gemms or [])
    assert_equal(trained(Path("first"))["model"], trained(Path("second"))["model"])


def test_a_guard_that_finds_nothing_changes_nothing() -> None:
    run("off", "recipe=healthy.py", mode="nvfp4")
    run("on", "recipe=healthy.py", "debug.guard=promote", mode="nvfp4")
    assert_equal(trained(Path("off")), trained(Path("on")))


def test_log_changes_nothing() -> None:
    off, on = run("off"), run("on", "debug.guard=log")
    assert found(on) == {("2.linear", name): 6 for name in ALL}
    assert_equal(trained(Path("off")), trained(Path("on")))
    assert (on.variant, on.variant_hash) == (off.variant, off.variant_hash)
    assert off.guard is None
    assert off.test == on.test


def test_thresholds_are_fields_and_part_of_a_variant_that_promotes() -> None:
    words = ["debug.guard=promote", "train.max_steps=2"]
    default = run("default", *words)
    generous = run("generous", *words, "debug.guard_underflow=1", "debug.guard_error=2")
    assert gemms(default) != []
    assert gemms(generous) == []
    assert default.variant_hash != generous.variant_hash
    assert default.guard is not None
    assert generous.guard is not None
    assert vars(default.guard.thresholds["8"]) == {"underflow": 0.05, "error": 1e-4}
    assert vars(generous.guard.thresholds["4"]) == {"underflow": 1.0, "error": 2.0}


# ---- resumed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["log", "promote"])
def test_a_resumed_run_is_the_uninterrupted_one(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "EVENTS", 13)  # the bound is reached after the resumption
    words = [f"debug.guard={action}"]
    whole = run("whole", *words)
    run("part", *words, "train.max_steps=2")
    monkeypatch.setattr("mprun.train.run.footprint", lambda *_: ({}, None))
    assert main(["run.resume=part", "train.max_steps=6"]) == 0
    part = read_summary(Path("part"))
    assert part.guard == whole.guard
    assert {*found(part).values()} == {6}
    assert_same_run(Path("part"), Path("whole"))
    file = "guard_layers.yaml"
    assert Path("part", file).read_text() == Path("whole", file).read_text()


# ---- refused, and without effect -----------------------------------------------------------------


def test_native_execution_is_refused_and_auto_says_that_it_emulates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU with float8 products."""
    monkeypatch.setattr(execution, "why_not_native", lambda gemms, device: None)
    words = [*WORDS, "precision=fp8_tensorwise", "debug.guard=promote"]
    assert main([*words, "execution=native", "run.dir=native"]) == 2
    error = capsys.readouterr().err
    assert "legal: auto, emulated" in error
    assert "debug.guard=off takes native ones" in error
    assert not Path("native").exists()
    assert run("auto", "debug.guard=promote").execution == "emulated"
    assert "guard=promote judges those factors" in capsys.readouterr().err


def test_a_mode_without_formats_has_nothing_to_guard(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["precision.layers={3: fp32}", "train.max_steps=1"]
    plain = run("plain", *words, mode="bf16_mixed")
    guarded = run("guarded", *words, "debug.guard=promote", mode="bf16_mixed")
    error = " ".join(capsys.readouterr().err.split())
    assert "debug.guard has no effect: precision=bf16_mixed has no products in formats" in error
    assert guarded.guard is None
    assert (guarded.variant, guarded.variant_hash) == (plain.variant, plain.variant_hash)


def test_a_format_of_one_layer_is_guarded_in_any_mode() -> None:
    layers = "precision.layers={2.linear: fp8}"
    summary = run("run", layers, "debug.guard=promote", mode="bf16_mixed")
    assert found(summary) == {("2.linear", name): 6 for name in ALL}
    assert summary.variant == "bf16_mixed+guard"
