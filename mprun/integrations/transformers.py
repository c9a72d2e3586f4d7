"""Records a training by Hugging Face's Trainer.

    from mprun.integrations.transformers import MprunCallback

    trainer = Trainer(model, args, train_dataset=..., callbacks=[MprunCallback(out="runs/bf16")])
    trainer.train()
    print(trainer.pop_callback(MprunCallback).run)

The folder gets the record of `mprun.observe`: step times, memory, dtypes, the audit, the losses
that the Trainer logs and the metrics of its evaluations. `mprun compare` reads it. No bit of the
training changes.

The Trainer calls no callback where its training fails. The record then ends with the program, with
the next training, or with `close(error)`.
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ImportError:
    raise ImportError(
        "mprun.integrations.transformers needs the packages transformers and accelerate; "
        "pip install 'mprun[transformers]'"
    ) from None

from mprun.train.observe.observe import TrainerRecord

# Ends of the names that the Trainer logs beside scores
NOT_SCORES = ("_runtime", "_per_second", "_time", "_flos")


class MprunCallback(TrainerRecord, TrainerCallback):
    """Observes the training; its arguments are those of `TrainerRecord`.

    Only the main process observes. The seed is that of the `TrainingArguments`, if none is given.
    """

    def close(self, error: BaseException | None = None) -> None:
        """End the record of a training that failed by `error`, which the program goes on after."""
        self.end(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.begin(kwargs["model"], [kwargs["optimizer"]], args.seed)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report_audit()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        values = logs or {}
        if "train_loss" in values:  # the training is over; beside it are speeds, no scores
            self.log_training_loss(values["train_loss"])
            return
        left_out = ("epoch", "learning_rate", "num_input_tokens_seen")  # numbers, but no scores
        self.log_values(
            {
                name: value
                for name, value in values.items()
                if name not in left_out and not name.endswith(NOT_SCORES)
            }
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()
