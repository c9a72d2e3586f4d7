"""Trials: real runs, one after the other, in this process."""

from __future__ import annotations

import io
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mprun.errors import StoppedError
from mprun.records.run_record import AveragedScores, Scores, Summary, read_lines, read_summary
from mprun.study.trials import StudyProgress, Trial, Trials, score_of
from mprun.train import data
from mprun.train.assemble import DataCache
from mprun.train.assemble.recipe_loading import load_recipe
from mprun.train.data import DataRequest
from mprun.train.signals import StopSignals
from tests.summaries import example

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

LINEAR = ("recipe=linear", "train.max_steps=4")


class ProgressLog(StudyProgress):
    """Keeps what it is notified of."""

    def __init__(self, verbose: bool = False) -> None:
        super().__init__(Console(quiet=True), [], seeds=1, verbose=verbose)
        self.lines: list[str] = []
        self.ended: list[tuple[str, str | None, str | None]] = []
        self.fractions: list[float] = []

    def update(self, text: str, fraction: float) -> None:
        self.fractions.append(fraction)

    def end(self, variant: str, summary: Summary | None, error: str | None) -> None:
        self.ended.append((variant, summary.status if summary else None, error))

    def line(self, text: str) -> None:
        self.lines.append(text)


def carry_out(view: ProgressLog, *trials: Trial, load: DataCache | None = None) -> list[Any]:
    with StopSignals() as stop:
        runner = Trials(Path("study"), None, stop, view, load or DataCache())
        return [runner.run(trial) for trial in trials]


def test_a_trial_is_a_run_like_any_other() -> None:
    view = ProgressLog()
    (outcome,) = carry_out(view, Trial("fp32", 3, (*LINEAR, "precision=fp32")))
    summary = read_summary(Path("study/fp32-seed3"))
    assert (summary.status, summary.seed, summary.steps) == ("completed", 3, 4)
    assert outcome.summary == summary
    assert outcome.error is None
    assert view.ended == [("fp32", "completed", None)]
    assert view.fractions[-1] == 1.0


def test_what_fails_is_kept_and_the_rest_goes_on() -> None:
    view = ProgressLog()
    bad = Trial("bad", 0, (*LINEAR, "train.lr=1e30"))
    wrong = Trial("wrong", 0, (*LINEAR, "execution=emulated"))
    good = Trial("good", 0, LINEAR)
    outcomes = carry_out(view, bad, wrong, good)
    assert outcomes[0].summary.status == "failed"
    assert outcomes[0].error.startswith("the loss became")
    assert outcomes[1].summary is None
    assert "execution=emulated" in outcomes[1].error
    assert [status for _, status, _ in view.ended] == ["failed", None, "completed"]


def test_what_is_done_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [Trial("a", 0, LINEAR), Trial("b", 0, (*LINEAR, "train.lr=1e30"))]
    first = carry_out(ProgressLog(), *trials)
    monkeypatch.setattr("mprun.study.trials.run", lambda *a, **k: pytest.fail("run again"))
    again = carry_out(ProgressLog(), *trials)
    assert [o.summary for o in again] == [o.summary for o in first]
    assert [o.error for o in again] == [o.error for o in first]


def test_what_was_stopped_goes_on_and_what_was_killed_begins_anew() -> None:
    long = ("recipe=linear", "train.max_steps=40", "train.checkpoint_every_steps=5")

    class Stopping(ProgressLog):
        def update(self, text: str, fraction: float) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError) as stopped:
        carry_out(Stopping(), Trial("a", 0, long))
    assert stopped.value.status == 143
    stopped_at = read_summary(Path("study/a-seed0")).steps
    assert 0 < stopped_at <= 40
    killed = Path("study/b-seed0")
    killed.mkdir()
    (killed / "metrics.jsonl").write_text("", encoding="utf-8")
    carry_out(ProgressLog(), Trial("a", 0, long), Trial("b", 0, long))
    for name in "ab":
        folder = Path(f"study/{name}-seed0")
        assert read_summary(folder).status == "completed"
        steps = [line["loss"] for line in read_lines(folder) if line["kind"] == "step"]
        assert len(steps) == 40
    assert read_lines(Path("study/a-seed0"))[-1]["loss"] == read_lines(killed)[-1]["loss"]
    assert (Path("study") / "b-seed0.abandoned-1").is_dir()


@pytest.mark.parametrize("verbose", [False, True])
def test_a_warning_is_told_once(verbose: bool) -> None:
    view = ProgressLog(verbose)
    words = (*LINEAR, "loss_scale.growth_interval=7")
    carry_out(view, Trial("a", 0, words), Trial("a", 1, words))
    assert len(view.lines) == verbose  # in short at the end
    view.stop()
    (line,) = view.lines
    assert line.startswith("warning: loss_scale.growth_interval has no effect")
    assert line.endswith(" (in 2 runs)") != verbose


def test_samples_are_loaded_once_where_the_seed_does_not_change_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = []

    def counted(name: str, request: DataRequest) -> data.Splits:
        loads.append(request.seed)
        return splits(name, request)

    splits = data.image_splits
    monkeypatch.setattr("mprun.recipes.mnist.image_splits", counted)
    words = ("recipe=mnist", "preset=smoke", "data.source=generated", "train.max_steps=3")
    load = DataCache()
    trials = [
        Trial(mode, seed, (*words, "preset.loss_must_fall=false", f"precision={mode}"))
        for seed in (0, 1)
        for mode in ("fp32", "bf16_true")
    ]
    outcomes = carry_out(ProgressLog(), *trials, load=load)
    assert [o.error for o in outcomes] == [None] * 4
    assert loads == [0]


def test_samples_drawn_from_the_seed_are_drawn_for_each() -> None:
    recipe = load_recipe(
        "mprun.recipes.linear.Linear", {"in_features": 2, "out_features": 1, "samples": 3}
    )
    load = DataCache()
    first, same, other = (load(recipe, DataRequest(seed=s)) for s in (0, 0, 1))
    assert first is same
    assert not first.train.inputs.equal(other.train.inputs)


def test_a_recipe_is_judged_by_what_it_has() -> None:
    summary = example()
    assert score_of(summary) == ("accuracy", 0.9219)
    half = Scores(loss=1, accuracy=0.5)
    summary.averaged = AveragedScores(places=5, validation=half, test=half)
    assert score_of(summary) == ("accuracy", 0.5)  # what is judged
    summary.averaged = None
    summary.test = Scores(loss=None, accuracy=None)
    assert score_of(summary) == ("accuracy", 0.9375)
    summary.history[0].validation = summary.test
    assert score_of(summary) == ("accuracy", 0.875)
    summary.history = []
    assert score_of(summary) == ("accuracy", None)


@pytest.mark.parametrize("live", [True, False])
def test_the_views_show_every_run(live: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=live, width=120)
    view = StudyProgress(console, ["fp32", "half_sr_full"], seeds=1)
    emulated = replace(example(), execution="emulated")
    view.start()
    for name, summary in (("fp32", example()), ("half_sr_full", emulated)):
        view.begin(name, 0)
        view.update("epoch 1", 0.5)
        view.end(name, summary, None)
    view.begin("fp32", 1)
    view.end("fp32", None, "[red]it failed")
    view.stop()
    shown = text.getvalue()
    assert "fp32 seed 1 failed: [red]it failed" in shown
    assert "12.50 ms EMULATED" in shown
    assert "accuracy 0.9219" in shown
