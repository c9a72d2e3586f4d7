"""Quantities of a recipe: their errors in a run, in comparisons, numerics, check and search-ops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.records.result import Result
from mprun.records.run_record import QuantityRow, Summary, read_summary
from mprun.study.compare.comparison import Comparison, Run
from mprun.study.compare.verdicts import compare
from mprun.study.planned_run import load
from mprun.study.report.answer import headline, quantity_sentences
from mprun.study.report.comparison_report import quantities_table
from tests.study.compare.folders import run_of

RECIPE = """
import torch
from torch import nn

DEFAULTS = {"train.batch_size": 16, "train.max_steps": 8, "train.lr": 0.01}
METRIC = ("loss", "min")


def model():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def data():
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(96, 4, generator=drawn)
    y = x.sum(1, keepdim=True).sin()
    return {"train": (x[:64], y[:64]), "validation": (x[64:], y[64:]), "test": None}


def loss(output, batch):
    return (output.float() - batch[1]).square().mean()


def slope(model, batch):
    x = batch[0].detach().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x)[0]


def change(model, batch):
    return model(batch[0] + 1 / 64) - model(batch[0])


def mean(model, batch):
    return model(batch[0]).mean()


def quantities():
    return {"u": (lambda model, batch: model(batch[0]), lambda batch: batch[1]), QUANTITIES}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return written('"slope": slope, "mean": mean')


def written(quantities: str, name: str = "waves.py") -> list[str]:
    Path(name).write_text(RECIPE.replace("QUANTITIES", quantities))
    return [f"recipe={name}", "speed=plain", "device=cpu", "run.dir=out"]


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value - exact).norm() / exact.norm())


@pytest.mark.parametrize("mode", ["fp64", "fp32", "bf16_true", "bf16_mixed"])
def test_errors_are_those_of_a_computation_by_hand(recipe: list[str], mode: str) -> None:
    assert main([*recipe, f"precision={mode}"]) == 0
    rows, saved = read_summary(Path("out")).quantities, load("out", trust=True)
    low, exact = saved.model, saved.recipe.model().double().eval()
    exact.load_state_dict(saved.weights)
    space: dict[str, Any] = {}
    exec(Path("waves.py").read_text(), space)
    x, y = space["data"]()["validation"]

    def of_batch(model: Any, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        inputs = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "bf16_mixed"):
            u = model(inputs)
            total, mean = u.sum(), u.mean()
        slope = torch.autograd.grad(total, inputs)[0]
        return {"u": u.detach(), "slope": slope, "mean": mean.detach().reshape(1)}

    def of(model: Any, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        one, two = (of_batch(model, part) for part in inputs.split(16))
        return {name: torch.cat([one[name], two[name]]).double() for name in one}

    own = of(low, x.to(next(low.parameters()).dtype))
    for name, true in of(exact, x.double()).items():
        value = own[name]
        error = rows[name].arithmetic_error
        assert error is not None
        assert float(error) == pytest.approx(relative(value, true), rel=1e-6, abs=1e-12)
        assert rows[name].split == "validation"
        size = value.mean() if name == "mean" else value.square().mean().sqrt()
        assert float(rows[name].value) == pytest.approx(float(size))
    assert float(rows["u"].error or 0) == pytest.approx(relative(own["u"], y.double()))
    assert rows["slope"].error is None
    assert len(rows["slope"].entries) == 128
    if mode == "fp64":
        assert {row.arithmetic_error for row in rows.values()} == {0.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('"w": 3', "quantities()['w'] is a int; legal: a function of (model, batch)"),
        ('"loss": mean', "quantities() names a quantity 'loss', which the record uses"),
        ("7: mean", "quantities() names a quantity 7; legal is a short text"),
    ],
)
def test_a_mistake_is_one_line_before_the_run(
    recipe: list[str], capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    assert main(written(given, "other.py")) == 2
    assert message.split(" is ")[0] in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("broken", ["lambda m, b: 1 / 0", "lambda m, b: m(b[0]) + 1j"])
def test_a_broken_quantity_is_a_warning_and_the_run_is_kept(recipe: list[str], broken: str) -> None:
    assert main(written(f'"broken": {broken}', "other.py")) == 0
    summary = read_summary(Path("out"))
    assert summary.status == "completed"
    assert summary.quantities == {}
    [warning] = [x for x in summary.warnings if "quantit" in x]
    assert "ZeroDivisionError" in warning or "legal is a real tensor" in warning


def test_without_float64_the_value_is_kept_and_the_reason_recorded(recipe: list[str]) -> None:
    words = written('"only": lambda m, b: m(b[0].float())', "other.py")
    assert main([*words, "precision=fp32"]) == 0
    summary = read_summary(Path("out"))
    row = summary.quantities["only"]
    assert row.arithmetic_error is None
    assert "not computed in float64: quantities: RuntimeError" in row.note
    assert any(row.note in x for x in summary.warnings)


# ---- comparisons ---------------------------------------------------------------------------------


def quantity(summary: Summary, name: str, value: float, error: float | None, own: float) -> None:
    summary.quantities[name] = QuantityRow(
        split="validation",
        value=value,
        error=error,
        arithmetic_error=own,
        entries=[3.0 + value, -4.0],
        samples_crc=7,
    )


def runs(mode: str, values: list[float], own: float, factor: float = 1.0) -> list[Run]:
    made = []
    for seed, value in enumerate(values):
        run = run_of(mode, seed)
        run.summary.precision = mode
        quantity(run.summary, "forces", value, factor * (0.1 + 1e-5 * seed), own)
        quantity(run.summary, "energy", factor * (5 + value), None, own)
        made.append(run)
    return made


VALUES = [0.0, 0.02, -0.02, 0.01]


def compared(**terms: Any) -> Comparison:
    made = [*runs("fp64", VALUES, 0.0), *runs("fp32", VALUES, 1e-6)]
    made += runs("tf32", VALUES, 1e-3, 1.03)
    return compare(made, margin=0.005, relative_margin=0.02, **terms)


def test_added_is_the_error_of_the_arithmetic_over_the_spread_over_seeds() -> None:
    rows = {(x.quantity, x.variant): x for x in compared().quantities}
    # of two entries one has the standard deviation of `VALUES`, the other is the same everywhere
    mean = sum(VALUES) / 4
    spread = math.sqrt(sum((x - mean) ** 2 for x in VALUES) / 3 / 2)
    size = math.sqrt(sum(((3 + x) ** 2 + 16) / 2 for x in VALUES) / 4)
    assert rows["forces", "fp64"].added == 0.0
    assert rows["forces", "tf32"].added == pytest.approx(1e-3 * size / spread)
    [first, _] = quantity_sentences(compared())
    assert first == (
        f"forces: float32 adds {100e-6 * size / spread:.2g} % of what training leaves open (the "
        f"spread over 4 seeds); TF32 adds {0.1 * size / spread:.2g} %: turn it off "
        "(precision=fp32)."
    )


def test_verdicts_are_of_errors_and_of_values_with_margins_by_name() -> None:
    words = {(x.quantity, x.variant): x.word for x in compared().quantities}
    assert words["forces", "fp32"] == words["energy", "fp32"] == "equivalent"
    assert words["forces", "tf32"] == "worse"  # an error that is 3 % larger
    assert words["energy", "tf32"] == "differs"  # a value is neither better nor worse
    wide = compared(margins={"forces": 0.05})
    words = {(x.quantity, x.variant): x.word for x in wide.quantities}
    assert words["forces", "tf32"] == "equivalent"
    assert words["energy", "tf32"] == "differs"
    assert {x.margin for x in wide.quantities if x.quantity == "forces"} == {0.0, 0.05}
    [table] = quantities_table(wide)
    assert "differs" in Result(wide, [table]).markdown
    with pytest.raises(UsageError, match="no such quantity; legal: forces, energy"):
        compared(margins={"force": 0.05})


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_float32_is_enough_where_the_metric_and_all_quantities_say_so(factor: float) -> None:
    made = [*runs("fp64", VALUES, 0.0), *runs("fp32", VALUES, 1e-6, factor)]
    sentences = headline(compare(made, margin=0.005, relative_margin=0.02))
    assert any("float32 is enough: keeps the" in x for x in sentences) == (factor == 1.0)


def test_other_samples_in_each_seed_leave_the_spread_unknown() -> None:
    made = [*runs("fp64", VALUES, 0.0), *runs("fp32", VALUES, 1e-6)]
    for run in made:
        run.summary.quantities["forces"].samples_crc = run.summary.seed
    table = compare(made, margin=0.005, relative_margin=0.02)
    assert "forces: what training leaves open is not known" in quantity_sentences(table)[0]


# ---- numerics, check, search-ops -----------------------------------------------------------------


def test_numerics_has_each_format_beside_the_spread(recipe: list[str]) -> None:
    assert main(["numerics", *recipe, "precision=bf16_mixed", "numerics.plots=false"]) == 0
    rows = json.loads(Path("out/numerics.json").read_text())["quantities"]
    assert [row["name"] for row in rows] == ["u", "slope", "mean"]
    for row in rows[:2]:  # not the mean: of two numbers, an error may be small by chance
        db = row["db"]
        assert db["bf16_mixed"] == db["bf16"]
        assert 100 < db["fp32"] < 170  # 24 bits and more: 2^-24 is 144 dB
        assert 25 < db["bf16"] < db["fp16"] - 10 < db["fp32"] - 40  # 8 bits, 11 and 24
        assert row["seeds"] == 3
        assert row["training_db"] < 30  # eight steps from three draws: other models


def test_check_warns_of_a_quantity_that_the_mode_drowns(
    recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = written('"change": change', "other.py")[:-1]
    assert main(["check", *words, "precision=fp32,bf16_true", "check.strict=false"]) == 0
    output = capsys.readouterr().out
    assert "warning in bf16_true: lost_quantity: the model: change has" in output
    assert "lost_quantity" not in output.partition("warning in bf16_true")[0]
    assert "quantity u against float64:" in output


def test_search_ops_keeps_what_a_quantity_needs_and_the_loss_does_not(recipe: list[str]) -> None:
    asked = ["precision=bf16_mixed", "search_ops.gradient_db=null", "search_ops.tolerance=0.1"]
    found: dict[str, Any] = {}
    for given in ('"slope": slope', '"change": change'):
        words = [*written(given, f"r{len(found)}.py")[:-1], f"run.dir=o{len(found)}"]
        assert main(["search-ops", *words, *asked]) == 0
        found[given] = json.loads(Path(f"o{len(found)}/search_ops.json").read_text())
    plain, fine = found.values()
    assert plain["answer"]["high"] == []
    assert "linear" in fine["answer"]["high"]
    assert fine["everything_lower"]["quantities_db"]["change"] < 20
    assert fine["answer"]["measure"]["quantities_db"]["change"] > 20


INSIDE = """

def forward(model, batch):
    return model(batch[0]) + torch.func.vmap(torch.func.jacfwd(model))(batch[0]).sum(2)
"""


def test_check_is_complete_where_the_model_runs_inside_of_torch_func(
    recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("inside.py").write_text(Path("waves.py").read_text() + INSIDE)
    assert main(["check", "recipe=inside.py", *recipe[1:3], "precision=fp32,bf16_mixed"]) == 0
    assert "passed: inside in fp32, bf16_mixed: no findings" in capsys.readouterr().out
