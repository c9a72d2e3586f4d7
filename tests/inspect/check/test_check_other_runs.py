"""Checks of observed loops."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import mprun
from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.inspect.check.check_baseline import read_baseline
from mprun.inspect.check.check_other_runs import check_observed
from mprun.inspect.check.check_result import CheckSettings
from mprun.inspect.rounding_oracle import chance_of_fall


def observed(
    folder: Path, lr: float = 0.05, dtype: torch.dtype = torch.float32, steps: int = 64
) -> Path:
    """The record of a small loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(8 * steps, 8, dtype=dtype)
    with mprun.observe(model, optimizer, out=folder, memory=True) as run:
        for part in x.split(8):
            optimizer.zero_grad()
            loss = (model(part) - part.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    return folder


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a loop that learns; a check of it writes nothing there."""
    return observed(tmp_path_factory.mktemp("learned") / "a")


def found(folder: Path, settings: CheckSettings | None = None, update: bool = False) -> list[str]:
    record = check_observed(folder, settings or CheckSettings(), update).record
    return [x.kind for _, x in record.findings]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_loop_agrees_with_its_baseline_and_another_learning_rate_is_a_change(
    learned: Path, tmp_path: Path
) -> None:
    assert found(learned) == []
    assert found(learned, update=True) == []
    assert found(learned) == []
    assert found(observed(tmp_path / "again")) == []
    assert "changed" in found(observed(tmp_path / "b", lr=0.06))


def test_on_another_machine_losses_may_differ_by_their_scatter(learned: Path) -> None:
    folder, path = learned, Path("mprun-baseline.json")
    found(folder, update=True)
    base = read_baseline(path)
    assert base is not None
    ((label, mode),) = base.modes.items()
    for by, kinds in ((0.5, []), (2.0, ["changed"])):
        losses = [x._replace(value=x.value + by * x.explained) for x in mode.losses]
        moved = replace(base, machine="another", modes={label: replace(mode, losses=losses)})
        path.write_text(moved.text)
        assert found(folder) == kinds
    assert mode.losses[0].explained < 10 * mode.losses[0].value


@pytest.mark.parametrize(
    ("lr", "steps", "kind", "text"),
    [
        (0.0, 64, "loss_does_not_fall", "over 64 steps, by chance"),
        (0.05, 3, "loss_does_not_fall", "logged losses: 3, needed: 6; run.log(loss=loss)"),
        (1e30, 64, "not_finite", ""),
    ],
)
def test_a_loop_that_does_not_learn_fails(
    tmp_path: Path, lr: float, steps: int, kind: str, text: str
) -> None:
    folder = observed(tmp_path / "a", lr=lr, steps=steps)
    (finding,) = check_observed(folder, CheckSettings(), False).record.modes[0].findings
    assert finding.kind == kind
    assert text in finding.text


def test_16_bit_weights_are_found_by_the_audit_of_the_record(tmp_path: Path) -> None:
    kinds = found(observed(tmp_path / "a", lr=1e-4, dtype=torch.bfloat16))
    assert "stored_in_16_bits" in kinds
    assert "lost_update" in kinds


def test_the_memory_of_an_observed_step_is_limited(learned: Path) -> None:
    assert found(learned, CheckSettings(memory_gib=1e-9)) == ["over_memory"]


def test_losses_without_a_trend_rarely_count_as_falling() -> None:
    numbers = random.Random(0)
    chances = [chance_of_fall([numbers.gauss(0, 1) for _ in range(24)]) for _ in range(2000)]
    assert sum(x <= 0.05 for x in chances) / 2000 == pytest.approx(0.05, abs=0.02)  # 4 deviations
    assert chance_of_fall([2.0, 1.9, 1.5, 1.4, 1.1, 1.0]) < 0.05
    assert chance_of_fall([1.0, 1.0]) == 1.0
    assert chance_of_fall([1.0] * 6) == 1.0
    assert chance_of_fall([2.0] * 3 + [1.0] * 3) == 0.0


def test_a_run_of_mprun_is_no_observed_loop(tmp_path: Path) -> None:
    mprun.run("recipe=linear", "train.max_steps=2", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(UsageError, match="mprun check recipe="):
        check_observed(tmp_path / "run", CheckSettings(), update=False)


@pytest.mark.parametrize(
    "args",
    [
        ["--observed", "folder", "recipe=linear"],
        ["--observed", "folder"],
    ],
)
def test_options_that_do_not_fit_together_are_refused(args: list[str]) -> None:
    assert main(["check", *args]) == 2
