"""Records a training by Lightning's Trainer.

    from mprun.integrations.lightning import MprunCallback

    watch = MprunCallback(out="runs/bf16")
    Trainer(precision="bf16-mixed", callbacks=[watch]).fit(module, loader)
    print(watch.run)

The folder gets the record of `mprun.observe`: step times, memory, dtypes, the audit, the loss that
`training_step` returns (else what it logs as `loss` or `train_loss`), and what a validation logs as
`val_...`. `mprun compare` reads it. No bit of the training changes, with automatic and manual
optimization and in each precision of Lightning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    raise ImportError(
        "mprun.integrations.lightning needs the package lightning; pip install 'mprun[lightning]'"
    ) from None

from mprun.train.observe.observe import TrainerRecord
from mprun.train.observe.observed_record import split_of

SEED = "PL_GLOBAL_SEED"  # Where `seed_everything` leaves the seed
# Usual names, and with the ending of Lightning's figures of a step beside those of an epoch
LOGGED_LOSSES = ("loss", "train_loss", "train_loss_step", "loss_step")


class MprunCallback(TrainerRecord, Callback):  # type: ignore[misc]
    """Observes the training; its arguments are those of `TrainerRecord`.

    Only the main process observes. The seed is that of `seed_everything`, if none is given.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._losses: list[Any] = []  # of the micro-batches since the last step
        self._steps = trainer.global_step
        if trainer.is_global_zero:
            seed = os.environ.get(SEED, "")
            self.begin(pl_module, [*trainer.optimizers], int(seed) if seed.isdigit() else None)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if (run := self.running) is not None:
            run.note_batch(batch)
            run.begin_call(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._losses += [] if loss is None else [loss]
        if trainer.global_step == self._steps:  # of a micro-batch that no step follows
            return
        self._steps = trainer.global_step
        self._log_loss(trainer, pl_module.automatic_optimization)
        self.report_audit()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if (run := self.running) is not None:
            run.on_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:  # the validation before training, of two batches
            scores = {
                k: v for k, v in trainer.callback_metrics.items() if split_of(k)[0] == "validation"
            }
            self.log_values(scores)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end(exception)

    def _log_loss(self, trainer: Any, automatic: bool) -> None:
        """Log the loss of the step: Lightning divides those of micro-batches by their number."""
        if self._losses:
            total = sum(self._losses[1:], self._losses[0])
            self.log_values({"loss": total if automatic else total / len(self._losses)})
            self._losses = []
            return
        logged = trainer.callback_metrics
        name = next((name for name in LOGGED_LOSSES if name in logged), None)
        if name is not None:
            self.log_values({"loss": logged[name]})
