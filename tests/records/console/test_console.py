"""The terminal: streams, and progress as a bar or as a plain line now and then."""

from __future__ import annotations

import io
from itertools import pairwise
from types import SimpleNamespace

import pytest
from rich.console import Console

from mprun.records import console as progress
from mprun.records.console import Moment, RunProgress, stderr_console, stdout_console

MOMENT = Moment(epoch=2, step=30, loss=0.12345, step_time_ms=4.567, fraction=0.25, elapsed_s=41.0)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A colour terminal, and nothing that tells rich otherwise."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width)


def file() -> Console:
    return Console(file=io.StringIO(), width=40)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Texts


# Off a terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that progress sees, in `now`."""
    fake = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


def test_quiet_lines_come_at_most_every_ten_seconds(clock: SimpleNamespace) -> None:
    console = file()
    view = RunProgress(console, 5, 120)
    view.start()
    shown_at = []
    for _ in range(1000):
        clock.now += 0.1
        before = written(console)
        view.update(MOMENT)
        if written(console) != before:
            shown_at.append(clock.now)
    view.stop()
    gaps = [b - a for a, b in pairwise(shown_at)]
    # Sums of 0.1 are rounded, so that a line may come one update late.
    assert all(10 <= gap < 10.2 for gap in gaps)
    assert len(shown_at) in (9, 10)
    assert written(console).splitlines() == [MOMENT.text(5, 120)] * len(shown_at)


# On a terminal


def drawn(console: Console, moment: Moment = MOMENT, steps: int = 120) -> str:
    view = RunProgress(console, 5, steps)
    view.start()
    view.update(moment)
    view.line("epoch 1: [not markup]")
    view.stop()
    return written(console)


def test_the_live_line_shows_loss_step_time_and_time_left() -> None:
    text = drawn(terminal())
    assert MOMENT.text(5, 120) in text
    assert "epoch 1: [not markup]" in text
    assert "\r" in text  # redrawn in place


def test_the_bar_is_shown_only_where_a_line_can_be_redrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "\x1b" in drawn(terminal())
    assert drawn(file()) == "epoch 1: [not markup]\n"
    monkeypatch.setenv("TERM", "dumb")  # a terminal that cannot redraw a line
    assert drawn(terminal()) == "epoch 1: [not markup]\n"


# Streams


def test_results_go_to_stdout_and_warnings_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    stdout_console().print("result")
    stderr_console().print("warning")
    assert capsys.readouterr() == ("result\n", "warning\n")


# Jobs in parts


def test_a_log_has_a_line_of_a_job_every_ten_seconds(clock: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), width=200)
    with progress.JobProgress(console) as job:
        for done in range(10):
            job.begin("op", done, 10)
            clock.now += 4
    assert written(console).splitlines() == [
        "op (4 of 10, about 28 s left)",
        "op (7 of 10, about 16 s left)",
        "op (10 of 10, about 4 s left)",
    ]
