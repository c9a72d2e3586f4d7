"""Signals: deferred in the loop, at once elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from mprun.train.signals import SIGHUP, SIGNALS, SignalReceivedError, StopSignals


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """The tests themselves may have been started by `nohup`."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if SIGHUP is not None:
        signal.signal(SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("fail", [False, True])
def test_the_handlers_are_put_back(fail: bool) -> None:
    before = [signal.getsignal(s) for s in SIGNALS]
    try:
        with StopSignals():
            assert [signal.getsignal(s) for s in SIGNALS] != before
            if fail:
                raise RuntimeError
    except RuntimeError:
        assert fail
    assert [signal.getsignal(s) for s in SIGNALS] == before


@pytest.mark.parametrize(
    ("number", "name", "status"),
    [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)],
)
def test_in_the_loop_a_signal_sets_a_flag(number: signal.Signals, name: str, status: int) -> None:
    with StopSignals() as stop, stop.deferred():
        assert not stop.requested()
        signal.raise_signal(number)
        assert stop.requested()
    assert (stop.received, stop.name, stop.exit_status) == (number, name, status)


def test_in_the_loop_the_second_signal_raises() -> None:
    with StopSignals() as stop, stop.deferred():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SignalReceivedError):
            signal.raise_signal(signal.SIGTERM)
    assert stop.received == signal.SIGINT  # the first one is what stopped the run


@pytest.mark.parametrize("loop", ["none", "ended", "failed"])
@pytest.mark.parametrize("number", SIGNALS)
def test_elsewhere_a_signal_raises_at_once(number: signal.Signals, loop: str) -> None:
    with StopSignals() as stop:
        if loop != "none":
            with contextlib.suppress(ZeroDivisionError), stop.deferred():
                1 / (loop == "ended")
        with pytest.raises(SignalReceivedError):
            signal.raise_signal(number)
        assert stop.requested()


def test_no_handler_of_exceptions_takes_it() -> None:
    assert not issubclass(SignalReceivedError, Exception)


@pytest.mark.skipif(SIGHUP is None, reason="there is no SIGHUP")
def test_a_terminal_that_closes_is_a_signal_like_another() -> None:
    with StopSignals() as stop, stop.deferred():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # by the system and by the shell
        assert (stop.received, stop.name, stop.exit_status) == (signal.SIGHUP, "SIGHUP", 129)
        with pytest.raises(SignalReceivedError):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(SIGHUP is None, reason="there is no SIGHUP")
def test_a_process_started_by_nohup_goes_on() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.skipif(SIGHUP is None, reason="there is no SIGHUP")
def test_output_to_a_closed_terminal_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as terminal, StopSignals() as stop:
        monkeypatch.setattr("sys.stdout", terminal)
        print("before", flush=True)
        os.close(master)
        with stop.deferred():
            signal.raise_signal(signal.SIGHUP)
        print("stopped", flush=True)  # OSError: Input/output error, if it went to the terminal
