"""A limit on what a study may take: `study.max_time_s=600`, or `advise.budget_min=10`.

With a budget, a trial is not begun if it would end too late, judged by the longest one of its
variant so far. A training that is under way at the end is interrupted; it has a
checkpoint, so that a resumed study continues it. The study then answers with what it has, and
reports what it leaves open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from mprun.records.console.formatting import counted
from mprun.train.signals import StopSignals

REPORT_S = 10.0  # Seconds that are left at the end for the comparison and its plots
REPORT_SHARE = 0.1  # At most this share of a short budget is left for them


class Budget:
    """The time of a study, in minutes; None for no limit. It begins now."""

    def __init__(
        self,
        setting: str = "",
        minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,  # a clock that is set back must not add time
        per_minute: float = 1,  # Of the setting's unit
    ) -> None:
        self.setting = setting
        self.text = "" if minutes is None else f"{setting}={minutes * per_minute:g}"
        self._clock = clock
        limit_s = math.inf if minutes is None else 60 * minutes
        self._limit_ends_at = clock() + limit_s  # what the user allows; trials end before it
        self._ends_at = self._limit_ends_at - min(REPORT_S, REPORT_SHARE * limit_s)

    @property
    def now_s(self) -> float:
        """The clock's reading."""
        return self._clock()

    @property
    def minutes_left(self) -> float | None:
        """Of the limit; None without one."""
        if math.isinf(self._limit_ends_at):
            return None
        return max(0.0, self._limit_ends_at - self.now_s) / 60

    def is_over(self) -> bool:
        """Whether nothing more may run."""
        return self.now_s >= self._ends_at

    def has_room(self, expected_s: float) -> bool:
        """Whether a trial that takes so long may begin."""
        return not self.is_over() and self.now_s + expected_s <= self._ends_at


class BudgetSignals(StopSignals):
    """Signals, and the end of a budget: both end a run between two steps."""

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self.budget = budget

    def requested(self) -> bool:
        return super().requested() or self.budget.is_over()

    @property
    def name(self) -> str:
        """What ended the run, for the user."""
        return self.budget.text if self.received is None else super().name


class TrialBudget:
    """Decides which trials begin: one is expected to take the longest of its variant so far."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._longest_s: dict[str, float] = {}

    def admits(self, variant: str, partner: str | None = None) -> bool:
        """Whether a trial may begin, and that of `partner` in the same seed after it."""
        partner_s = 0.0 if partner is None else self._expected_s(partner)
        return self._budget.has_room(self._expected_s(variant) + partner_s)

    def _expected_s(self, variant: str) -> float:
        # A variant without a trial may be the slowest; with no trial at all, the first one begins
        return self._longest_s.get(variant, max(self._longest_s.values(), default=0.0))

    def took(self, variant: str, seconds: float) -> None:
        """A trial took so long."""
        self._longest_s[variant] = max(seconds, self._longest_s.get(variant, 0.0))


def not_run_text(not_run: Mapping[str, Sequence[int]], budget: str, trials: int) -> str:
    """`sweep.budget_min=5 left out 4 of 10 trials: fp32 seed 4, bf16_sr seeds 2 to 4`."""
    listed = ", ".join(f"{name} {seeds_text(seeds)}" for name, seeds in not_run.items())
    count = sum(len(seeds) for seeds in not_run.values())
    return f"{budget} left out {count} of {counted(trials, 'trial')}: {listed}"


def seeds_text(seeds: Sequence[int]) -> str:
    """`seed 4`, `seeds 2 to 4`, `seeds 1, 3`."""
    first, last = seeds[0], seeds[-1]
    if len(seeds) == 1:
        return f"seed {first}"
    if len(seeds) > 2 and list(seeds) == list(range(first, last + 1)):
        return f"seeds {first} to {last}"
    return f"seeds {', '.join(map(str, seeds))}"
