"""Whether a batch fits: a few real steps, with what they need from the device's memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import torch

from mprun.assemble import DataCache, Plan, build_parts, make_plan
from mprun.config import compose
from mprun.precision import backend_flags
from mprun.train.loop import Limits, Trainer


class BatchTrials:
    """Tries batches of one configuration.

    Args:
        words: its overrides.
        config_dir: a further folder of configs, or None.
        load: gives the samples, and keeps them.
    """

    def __init__(self, words: Sequence[str], config_dir: Path | None, load: DataCache) -> None:
        self._words, self._config_dir, self._load = tuple(words), config_dir, load
        self.told: list[str] = []
        """A line for each batch tried."""
        self.last_steps = 0

    def fits(self, batch: int, steps: int) -> bool:
        """Whether `steps` steps with micro-batches of `batch` samples end without an overflow."""
        words = [*self._words, f"train.batch_size={batch}"]
        composed = compose(words, self._config_dir)
        chosen = make_plan(composed.config, composed.given, load=self._load)
        torch.cuda.reset_peak_memory_stats(chosen.device)
        fits = self._steps(chosen, steps)
        peak = torch.cuda.max_memory_allocated(chosen.device) / 2**20
        gc.collect()
        torch.cuda.empty_cache()
        self.last_steps = steps
        outcome = f"peak {peak:.0f} MiB" if fits else "out of memory"
        self.told.append(f"batch {batch}, {steps} steps: {outcome}")
        return fits

    @staticmethod
    def _steps(chosen: Plan, steps: int) -> bool:
        try:
            with backend_flags(chosen.policy, chosen.native_tf32):
                limits = Limits(None, steps, None)
                Trainer(build_parts(chosen), limits).fit()
        except torch.OutOfMemoryError:
            return False
        return True
