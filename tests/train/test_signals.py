"""Signals: deferred in the loop, at once elsewhere."""

from __future__ import annotations

import signal

import pytest

from mprun.train.signals import SIGNALS, SignalReceivedError, StopSignals


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


@pytest.mark.parametrize("second", SIGNALS)
def test_in_the_loop_the_second_signal_raises(second: signal.Signals) -> None:
    with StopSignals() as stop, stop.deferred():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SignalReceivedError):
            signal.raise_signal(second)
    assert stop.received == signal.SIGINT  # the first one is what stopped the run


@pytest.mark.parametrize("number", SIGNALS)
def test_elsewhere_a_signal_raises_at_once(number: signal.Signals) -> None:
    with StopSignals() as stop:
        with pytest.raises(SignalReceivedError):
            signal.raise_signal(number)
        assert stop.requested()


@pytest.mark.parametrize("number", SIGNALS)
def test_after_the_loop_a_signal_raises_at_once(number: signal.Signals) -> None:
    with StopSignals() as stop:
        with stop.deferred():
            pass
        with pytest.raises(SignalReceivedError):
            signal.raise_signal(number)


def test_the_loop_ended_by_an_error_defers_no_longer() -> None:
    with StopSignals() as stop:
        with pytest.raises(ZeroDivisionError), stop.deferred():
            raise ZeroDivisionError
        with pytest.raises(SignalReceivedError):
            signal.raise_signal(signal.SIGINT)


def test_no_handler_of_exceptions_takes_it() -> None:
    assert not issubclass(SignalReceivedError, Exception)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_deferred_signal_is_raised_by_a_check(number: signal.Signals) -> None:
    with StopSignals() as stop:
        stop.check()
        with stop.deferred():
            signal.raise_signal(number)
        with pytest.raises(SignalReceivedError):
            stop.check()
