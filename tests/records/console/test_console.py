"""The terminal: streams, and progress as a bar or as a plain line now and then."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from rich.console import Console

from mprun.records import console as progress
from mprun.records.console import Moment, RunProgress, duration, stderr_console, stdout_console

MOMENT = Moment(epoch=2, step=30, loss=0.12345, step_time_ms=4.567, fraction=0.25, elapsed_s=41.0)
COLOUR = re.compile(r"\x1b\[[\d;]*\b(3[0-8]|4[0-8]|9[0-7]|10[0-7])\b[\d;]*m")


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


def test_durations_as_text() -> None:
    short = [duration(seconds) for seconds in (0, 0.4, 45.3, 59.4, 59.6, 125)]
    assert short == ["0 s", "0 s", "45 s", "59 s", "1:00", "2:05"]
    long = [duration(seconds) for seconds in (3599.6, 3725, 360_000)]
    assert long == ["1:00:00", "1:02:05", "100:00:00"]


def test_the_time_left_assumes_the_same_rate() -> None:
    assert MOMENT.eta_s == 123.0
    assert Moment(1, 1, 0.0, 0.0, fraction=1.0, elapsed_s=5.0).eta_s == 0
    assert Moment(1, 1, 0.0, 0.0, fraction=0.0, elapsed_s=5.0).eta_s is None


def test_a_moment_in_a_line() -> None:
    figures = "loss 0.1235  4.57 ms/step"
    assert MOMENT.text(5, 120) == f"epoch 2/5  step 30/120  {figures}  ETA 2:03"
    assert MOMENT.text(None, None) == f"epoch 2  step 30  {figures}  ETA 2:03"
    assert "ETA" not in Moment(1, 1, 0.5, 1.0, fraction=0.0, elapsed_s=5.0).text(5, 120)
    assert "loss nan" in Moment(1, 1, float("nan"), 1.0, 0.5, 5.0).text(None, None)


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


def test_a_line_is_always_printed_and_postpones_the_next_status(
    clock: SimpleNamespace,
) -> None:
    console = file()
    view = RunProgress(console, 5, 120)
    view.start()
    clock.now += 9
    view.line("line 1")
    view.line("line 2")
    clock.now += 9
    view.update(MOMENT)
    assert written(console) == "line 1\nline 2\n"
    clock.now += 1
    view.update(MOMENT)
    assert MOMENT.text(5, 120) in written(console)


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


def test_a_long_line_fits_80_columns() -> None:
    late = Moment(epoch=5, step=49_999, loss=0.5, step_time_ms=12.5, fraction=0.5, elapsed_s=3725)
    assert late.text(5, 50_000).endswith("ETA 1:02:05")
    assert late.text(5, 50_000) in drawn(terminal(width=80), late, steps=50_000)


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COLOUR.search(drawn(terminal()))
    monkeypatch.setenv("NO_COLOR", "1")
    text = drawn(terminal())
    assert not COLOUR.search(text)
    assert MOMENT.text(5, 120) in text


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


def test_the_part_is_counted_and_the_time_left_estimated() -> None:
    assert progress.counted_part(0, 12, 0.0) == " (1 of 12)"
    assert progress.counted_part(3, 12, 30.0) == " (4 of 12, about 1:30 left)"
    assert progress.counted_part(3, None, 30.0) == ""


def test_a_terminal_shows_each_part_of_a_job(clock: SimpleNamespace) -> None:
    console = terminal()
    with progress.JobProgress(console) as job:
        for done, name in enumerate(("soft[max]", "linear", "relu")):
            job.begin(f"op {name}", done, 3)
            clock.now += 40
    shown = COLOUR.sub("", written(console))
    for text in (
        "op soft[max] (1 of 3)",
        "op linear (2 of 3, about 1:20 left)",
        "op relu (3 of 3, about 40 s left)",
    ):
        assert text in shown


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
