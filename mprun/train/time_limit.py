"""When a run ends, and how its learning rate moves until then.

`train.max_time_s` limits what the user waits: a run from its start-up to its last score. Evaluation
can take as long as training, so the time for it is set aside before training begins. A few batches
are evaluated first, which gives the seconds per sample; every full validation replaces this
estimate by its own rate.

    training ends at   limit - reserve
    reserve            1.25 x (validation + test, estimated), at most half of the limit,
                       + 2 % of the limit, for the checkpoint and the record

An estimate may be too small, and half of the limit may be too little. So each evaluation ends at
the limit too, with the samples it has (one batch at least), and the scores carry their number. A
run that ended at its limit takes no further step when it is resumed with the same limit, and its
evaluation is not limited then.
"""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from mprun.precision._torch import is_fake
from mprun.train.stopwatch import Stopwatch

CAUTION = 1.25  # Evaluation is expected to take longer than its first batches by this factor
EVALUATION_SHARE = 0.5  # Evaluation after training gets at most this share of the time
SPARE_SHARE = 0.02  # This share of the limit is left for the last checkpoint and the record
# Timing the first batches of evaluation ends when it took this share of the limit
TRIAL_SHARE = 0.05


class TimeLimit:
    """When training and evaluation end.

    Args:
        limit_s: seconds for the whole run; None for no limit.
        watch: the run's.
        validation_samples: samples of a validation.
        test_samples: samples of the test.
    """

    def __init__(
        self, limit_s: float | None, watch: Stopwatch, validation_samples: int, test_samples: int
    ) -> None:
        self.step_s = 0.0
        """Seconds of the last step: another one must fit in."""
        self.training_until = self.validation_until = self.test_until = math.inf
        """Readings of `time.perf_counter`."""
        self._spent_before_s = 0.0
        self._limit_s = math.inf if limit_s is None else limit_s
        self._watch = watch
        self._validation_samples, self._test_samples = validation_samples, test_samples
        self._ends_at = self._room_s = math.inf

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return math.isfinite(self._limit_s)

    @property
    def trial_s(self) -> float:
        """Seconds for timing the first batches of evaluation; 0 if there is nothing to plan."""
        is_needed = math.isfinite(self._limit_s) and self._spent_before_s < self._limit_s
        return TRIAL_SHARE * self._limit_s if is_needed else 0.0

    @property
    def spent_s(self) -> float:
        """Seconds of the limit that are spent: all of them when training ended by it."""
        spent_s = self._spent_before_s + self._watch.elapsed_here_s
        return max(spent_s, self._limit_s) if self.is_training_over() else spent_s

    def begin(self, spent_before_s: float) -> None:
        """Start-up is over: set the end of the run.

        Args:
            spent_before_s: `spent_s` of the run that is resumed; 0 for a new one.
        """
        self._spent_before_s = spent_before_s
        if math.isinf(self._limit_s):
            return
        left_s = self._limit_s - spent_before_s
        # a long start-up cannot use up the limit: half of it stays for training and evaluation
        self._room_s = max(left_s - self._watch.elapsed_here_s, left_s / 2)
        now = time.perf_counter()
        self._ends_at = now + self._room_s
        self.training_until = self._ends_at
        if left_s > 0:
            self.validation_until = self.test_until = self._ends_at

    def reserve(self, seconds_per_sample: float) -> None:
        """Set the end of training by the time that an evaluated sample takes."""
        if math.isinf(self._limit_s) or math.isinf(self.test_until):
            return
        validation_s, test_s = (
            CAUTION * seconds_per_sample * n for n in (self._validation_samples, self._test_samples)
        )
        needed_s = validation_s + test_s
        share = min(1.0, EVALUATION_SHARE * self._room_s / needed_s) if needed_s else 0.0
        self.validation_until = self._ends_at - share * test_s
        spare_s = min(SPARE_SHARE * self._limit_s, self._room_s / 4)
        self.training_until = self._ends_at - share * needed_s - spare_s

    def is_training_over(self) -> bool:
        """Whether the time for training is up."""
        return time.perf_counter() + self.step_s >= self.training_until


class Schedule:
    """Moves the learning rate after each step that the optimizer takes.

    Steps that dynamic loss scaling skips do not count: a run whose first steps overflow would warm
    up without training.

    Args:
        scheduler: torch's; None for a constant learning rate.
    """

    def __init__(self, scheduler: LRScheduler | None = None) -> None:
        self._scheduler = scheduler

    def step(self, skipped: Tensor | None) -> None:
        """A step was attempted; `skipped` is 1 if it was not taken, None if none ever is."""
        if self._scheduler is None:
            return
        # on an accelerator the host waits for the flag; fake tensors have no value
        if skipped is None or is_fake(skipped) or not skipped.item():
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue.

        Raises:
            KeyError: it is the state of no schedule.
        """
        if self._scheduler is not None:
            if "_schedulers" not in state:  # a chain counts in its members
                self._scheduler.last_epoch = state["last_epoch"]
            self._scheduler.load_state_dict(state)
