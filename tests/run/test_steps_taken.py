"""A run that took no step is not completed; one that skipped many says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mprun.cli.main import main
from mprun.records.run_record import Scores, read_summary
from mprun.train import checkpoint
from mprun.train.checks import check_steps_taken, page_fault_warning, skipped_warning
from mprun.train.machine.conditions import allocator, page_fault_us, page_faults
from tests.summaries import example

pytestmark = pytest.mark.usefixtures("quick_runs")

SMALL = ["recipe=linear", "recipe.model.in_features=8", "recipe.model.out_features=4"]
FP16 = [*SMALL, "precision=fp16_mixed", "run.dir=run"]


def steps(path: str = "run") -> tuple[str, int, int]:
    summary = read_summary(Path(path))
    return summary.status, summary.steps, summary.skipped_steps


def test_a_scale_too_high_for_every_step_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """2^60 is lowered to 2^49 in the last of 12 steps: gradients overflow in every one."""
    assert main([*FP16, f"loss_scale.value={2.0**60:.0f}", "train.max_steps=12"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no step was taken: all 12 were skipped" in line
    assert "at the dynamic loss scale (1.15292e+18 at first, 5.6295e+14 at the last step)" in line
    assert "a smaller loss_scale.value" in line
    assert steps() == ("failed", 12, 12)
    summary = read_summary(Path("run"))
    assert summary.test == Scores(loss=None, accuracy=None)  # nothing trained was tested
    assert summary.error is not None
    assert "no step was taken" in summary.error
    state = torch.load(checkpoint.path_in(Path("run")), weights_only=True)["trainer"]["model"]
    assert main([*SMALL, "run.dir=other", "train.max_steps=1", "train.lr=1e-30"]) == 0
    drawn = torch.load(checkpoint.path_in(Path("other")), weights_only=True)["trainer"]["model"]
    assert all(torch.equal(state[key], drawn[key]) for key in drawn)  # indeed untrained


def test_a_run_that_failed_so_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FP16, f"loss_scale.value={2.0**60:.0f}", "train.max_steps=12"]) == 1
    assert main(["run.resume=run", "train.max_steps=80"]) == 0
    status, taken, skipped = steps()
    assert (status, taken) == ("completed", 80)
    assert 12 < skipped < 80  # the scale has halved its way down
    assert f"warning: {skipped} of 80 steps" in capsys.readouterr().out


def test_a_run_whose_time_was_up_before_the_first_step_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*SMALL, "run.dir=run", "train.epochs=null", "train.max_time_s=1e-9"]
    assert main(words) == 1
    assert "no step was taken: train.max_time_s ended the run" in capsys.readouterr().err
    assert steps() == ("failed", 0, 0)


@pytest.mark.parametrize(("skipped", "warned"), [(0, False), (10, False), (11, True), (99, True)])
def test_from_a_tenth_of_the_steps_on_a_warning_counts_them(skipped: int, warned: bool) -> None:
    summary = example()
    summary.steps, summary.skipped_steps = 100, skipped
    check_steps_taken(summary)
    text = skipped_warning(summary)
    assert (text is not None) == warned
    if text is not None:
        assert text.startswith(f"{skipped} of 100 steps ({skipped}%) were skipped")


@pytest.mark.parametrize(
    ("faults", "price_us", "allocator", "ending"),
    [
        (1000.0, 0.6, "glibc", "speed=auto makes it keep its memory"),
        (1000.0, 0.6, "jemalloc", "set the allocator to keep its memory"),
        (1000.0, 0.5, "glibc", None),
        (None, 5.0, "glibc", None),
    ],
)
def test_page_faults_of_more_than_a_twentieth_of_a_step_get_a_warning(
    faults: float | None, price_us: float | None, allocator: str, ending: str | None
) -> None:
    summary = example()
    summary.step_time_ms.median = 10.0
    summary.page_faults_per_step, summary.hardware.page_fault_us = faults, price_us
    summary.backend.allocator = allocator
    text = page_fault_warning(summary)
    assert (text is None) == (ending is None)
    if text is not None and ending is not None:
        assert text.startswith(
            "about 6% of the time of a step goes into getting memory from the system (1,000 page "
            "faults a step, 0.6 us each)"
        )
        assert allocator in text
        assert text.endswith(ending)


def test_a_run_records_allocator_and_page_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "train.max_steps=10", "run.dir=run"]) == 0
    summary = read_summary(Path("run"))
    assert summary.backend.allocator == allocator()
    assert summary.backend.allocator != "glibc"  # speed=auto makes it steady
    assert summary.hardware.page_fault_us == page_fault_us()
    assert (summary.page_faults_per_step is None) == (page_faults() is None)
    assert "page faults per step" in capsys.readouterr().out
