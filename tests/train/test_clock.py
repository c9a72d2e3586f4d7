"""Step times: measured from batch to update."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from mprun.precision import devices
from mprun.train import clock as timing
from mprun.train.clock import Clock, EventClock, clock_for


def test_the_host_clock_times_from_start_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 1.5, 10.0, 10.25, 20.0, 20.125])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    clock = Clock()
    for _ in range(2):
        clock.start()
        clock.stop()
    assert [x.ms for x in clock.take()] == [500.0, 250.0]
    assert clock.take() == []
    clock.pause()
    clock.start()
    clock.stop()
    assert [x.ms for x in clock.take()] == [125.0]


def test_the_host_clock_counts_the_page_faults_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COUNTED_FROM_MS", 0.0)
    clock, pages = Clock(), 1000
    with mmap.mmap(-1, 2 * pages * mmap.PAGESIZE) as block:
        touched = [slice(0, pages), slice(0, pages), slice(pages, 2 * pages)]
        for part in touched:
            clock.start()
            for page in range(part.start, part.stop):
                block[page * mmap.PAGESIZE] = 1
            clock.stop()
            block[-1] = 0  # between two steps
    first, again, other = (x.page_faults for x in clock.take())
    if first is None:
        pytest.skip("this system does not count page faults")
    # Huge pages make fewer faults. Python and other threads may add a few.
    assert first >= pages / 512
    assert again is not None
    assert other is not None
    assert again < min(first, other)


@pytest.mark.parametrize(("step_ms", "counted"), [(0.0, [0, 8, 16]), (3.0, [*range(17)])])
def test_of_short_steps_every_eighth_is_counted(
    step_ms: float, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(timing, "page_faults", lambda: 7)
    clock = Clock()
    for _ in range(17):
        clock.start()
        now[0] += step_ms / 1e3
        clock.stop()
    times = clock.take()
    assert [n for n, x in enumerate(times) if x.page_faults == 0] == counted
    assert [x.ms for x in times] == pytest.approx([step_ms] * 17)


class Event:
    """A CUDA event of a device that needs a millisecond between events."""

    now = 0.0

    def __init__(self) -> None:
        Event.now += 1
        self.at, self.awaited = Event.now, False

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at

    def synchronize(self) -> None:
        self.awaited = True


def test_the_event_clock_takes_differences_of_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []

    def event(device: torch.device) -> Event:
        made.append(Event())
        return made[-1]

    monkeypatch.setattr(devices, "event", event)
    clock = EventClock(torch.device("cuda"))
    assert clock.take() == []
    for _ in range(3):
        clock.start()
        clock.stop()
    assert len(made) == 4  # the first start, then an event per step
    assert not any(e.awaited for e in made)
    assert [x.ms for x in clock.take()] == [1.0, 1.0, 1.0]
    assert [e.awaited for e in made] == [False, False, False, True]
    Event.now += 100
    clock.start()
    clock.stop()
    assert [x.ms for x in clock.take()] == [101.0]
    clock.pause()
    Event.now += 100  # validation
    clock.start()
    clock.stop()
    assert [x.ms for x in clock.take()] == [1.0]


def test_each_device_has_its_clock() -> None:
    assert type(clock_for(torch.device("cpu"))) is Clock
    assert isinstance(clock_for(torch.device("cuda")), EventClock)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_cuda_clock_times_a_kernel() -> None:
    clock = EventClock(torch.device("cuda"))
    a = torch.ones(1024, 1024, device="cuda")
    for _ in range(3):
        clock.start()
        a = a @ a
        clock.stop()
    times = clock.take()
    assert len(times) == 3
    assert all(t.ms > 0 for t in times)
