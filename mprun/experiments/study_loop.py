"""The order in which the processes of a study take its trials.

Times are compared in pairs of equal seed on one machine. So a process first takes whole seeds that
no other process works on. Then it helps with trials of other processes' seeds, and at last it waits
until they have ended: if their process is killed, this one takes them over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mprun.errors import StoppedError
from mprun.experiments.budget import BudgetSignals, TrialBudget
from mprun.experiments.study_progress import StudyProgress
from mprun.experiments.trial_claims import TrialClaims
from mprun.experiments.trials import Outcome, Trial, Trials

POLL_S = 0.5
"""Seconds between two looks at the trials of other processes."""

Drop = Callable[[Sequence[Outcome]], Mapping[str, str]]
"""Maps the outcomes so far to the variants that need no more seeds, with the reason."""


@dataclass(frozen=True)
class StudyResult:
    """What a study carried out, and what its budget left out."""

    outcomes: list[Outcome]
    not_run: dict[str, list[int]]
    """Variant to seeds."""
    left_out_by: str = ""
    """What left them out; empty: the budget."""


class StudyLoop:
    """Carries out the open trials of a study, one after the other, beside other processes.

    Args:
        planned: all trials, seed by seed.
        baseline: the variant that the others are compared with.
        trials: carries out a trial.
        claims: the study's locks.
        stop: the signals and the budget, entered.
        progress: shows the trials.
        drop: returns the variants to drop, or None.
    """

    def __init__(
        self,
        planned: Sequence[Trial],
        baseline: str,
        trials: Trials,
        claims: TrialClaims,
        stop: BudgetSignals,
        progress: StudyProgress,
        drop: Drop | None,
    ) -> None:
        self._planned, self._baseline = planned, baseline
        self._trials, self._claims = trials, claims
        self._stop, self._progress, self._drop = stop, progress, drop
        self._budget = TrialBudget(stop.budget)
        self._outcomes: dict[Trial, Outcome] = {}
        self._left_out: set[Trial] = set()
        self._dropped: set[str] = set()

    def run(self) -> StudyResult:
        """Carry out all trials that the budget admits, except further seeds of dropped variants.

        Raises:
            StoppedError: a signal ended a trial.
        """
        seeds = list(dict.fromkeys(trial.seed for trial in self._planned))
        while True:
            for seed in filter(self._open, seeds):
                with self._claims.held(f"seed{seed}") as mine:
                    if mine:
                        self._run_seed(seed)
            for seed in seeds:
                self._run_seed(seed)
            waiting = [trial for seed in seeds for trial in self._open(seed)]
            if not waiting or self._stop.budget.is_over():
                break
            self._progress.wait_for([f"{trial.variant} seed {trial.seed}" for trial in waiting])
            time.sleep(POLL_S)
        for trial in [trial for trial, outcome in self._outcomes.items() if outcome.by_machine]:
            self._ended_elsewhere(trial)
        not_run = self._not_run(waiting)
        return StudyResult(list(self._outcomes.values()), not_run)

    def _open(self, seed: int) -> list[Trial]:
        """The trials of a seed that have no outcome yet, as far as this process knows."""
        return [
            trial
            for trial in self._planned
            if trial.seed == seed
            and trial.variant not in self._dropped
            and trial not in self._outcomes
            and trial not in self._left_out
        ]

    def _run_seed(self, seed: int) -> None:
        """Carry out the open trials of a seed, except those that other processes run."""
        trials = self._open(seed)
        is_partner_open = self._baseline in {trial.variant for trial in trials}
        for trial in trials:
            is_partner_open &= trial.variant != self._baseline
            self._take(trial, self._baseline if is_partner_open else None)
        if trials and self._drop is not None:
            self._dropped |= set(self._drop(list(self._outcomes.values())))
            self._progress.drop(self._dropped)

    def _take(self, trial: Trial, partner: str | None) -> None:
        """Carry out a trial, unless it is over, another process runs it, or the budget ends.

        Args:
            trial: the trial.
            partner: the variant it is paired with, if its trial of this seed is still to come.
        """
        if self._trials.has_ended(trial):
            self._run_in_budget(trial)
            return
        with self._claims.held(trial.name) as mine:
            if not mine or self._trials.has_ended(trial):  # a moment ago, in another process
                return
            if self._budget.admits(trial.variant, partner):
                self._claims.record_start(trial.name)
                self._run_in_budget(trial)
            else:
                self._left_out.add(trial)

    def _run_in_budget(self, trial: Trial) -> None:
        """Keep the outcome of a trial, unless the budget ends it.

        Raises:
            StoppedError: a signal ended it.
        """
        began_s = self._stop.budget.now_s
        try:
            outcome = self._trials.run(trial)
        except StoppedError:
            if self._stop.received is not None:
                raise
            self._left_out.add(trial)
            return
        earlier_s = 0.0 if outcome.summary is None else outcome.summary.wall_time_s
        self._budget.took(trial.variant, max(self._stop.budget.now_s - began_s, earlier_s))
        self._outcomes[trial] = outcome

    def _not_run(self, waiting: Sequence[Trial]) -> dict[str, list[int]]:
        """Variant to the seeds of trials that have not ended in any process."""
        missing: dict[str, list[int]] = {}
        for trial in self._planned:
            if trial not in self._left_out and trial not in waiting:
                continue
            if not self._ended_elsewhere(trial):
                missing.setdefault(trial.variant, []).append(trial.seed)
        return missing

    def _ended_elsewhere(self, trial: Trial) -> bool:
        """Whether another process has ended a trial by now; its outcome is kept."""
        if not self._trials.has_ended(trial):
            return False
        self._outcomes[trial] = self._trials.run(trial)
        return True
