"""A clock of the tests' own: what depends on time is the same on an idle and on a busy machine."""

from __future__ import annotations


class Clock:
    """In place of `time.perf_counter`: each reading is one tick later than the one before."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """In place of `time.sleep`: takes so long by this clock, and no time at all."""
        self.now_s += seconds
