"""What a recipe is: a model, its data, a loss and a metric. Never a loop.

The training loop owns everything a precision mode may change: casting, the backward pass, the
optimizer step, timing. A recipe only defines what is trained, so that any mode can train it.

A batch is what the data yield: a tensor, or tuples, mappings and dataclasses of them, nested, with
strings and numbers among them. `forward` gets it with floating tensors in the mode's input dtype;
`loss`, `correct` and metrics get it as it was, on the training device.

The fields of a recipe are the parameters a user sets as `recipe.model.<field>` and are checked
against the annotated types; `__post_init__` raises `ValueError` for a value out of range, with what
is legal. Your own recipe is a Python file with such a class, or with functions of these names
(`recipe=path/to/my.py`; `mprun new-recipe` writes one), or such a class in any importable module,
plus a YAML file that names it as `recipe.target`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mprun.train.data import DataRequest, Splits, TensorSet

# Defaults, compared by identity: a class that writes the same pair has set its own
BY_ACCURACY = ("accuracy", "max")
BY_LOSS = ("loss", "min")


class Recipe(ABC):
    """Model, data, loss and metric of one training task; its fields are its parameters.

        @dataclass
        class Digits(mprun.Recipe):
            units: int = 64  # recipe.model.units=32 sets it

    At least `model`, `data` and `loss` are written.
    """

    METRIC: ClassVar[tuple[str, str]] = BY_ACCURACY
    """What the task is judged by, and which values are better: "max" or "min".

    ("accuracy", "max") is the share of samples that `correct` counts, ("loss", "min") the mean
    loss, ("loss.NAME", "min") a named part of it. Other names are those of `metrics`. A class that
    sets none is judged by the accuracy if it defines `correct`, else by the loss.
    """

    ignores: ClassVar[frozenset[str]] = frozenset()
    """Configuration keys without effect in this recipe; a user who sets one gets a warning."""

    draws_data: ClassVar[bool] = True
    """Whether the samples depend on the run's seed; false lets runs of other seeds share them."""

    loss_reads_inputs: ClassVar[bool] = True
    """Whether loss or metrics read more of a batch than its last item.

    False lets inputs be stored and sent in the mode's dtype, without a copy in their own.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.METRIC is BY_ACCURACY or cls.METRIC is BY_LOSS:  # no class has set its own
            cls.METRIC = BY_LOSS if cls.correct is Recipe.correct else BY_ACCURACY

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, drawn in float32 on the CPU from torch's global generator."""

    @abstractmethod
    def data(self, request: DataRequest) -> Splits:
        """The samples, as `request` (folder, limits, seed) wants them.

        Raises:
            UsageError: the data are not available; the message names the remedies.
        """

    def sample(self) -> TensorSet | None:
        """A few samples like those of `data`, any number of them, or None.

        Only shapes and dtypes are used, to plan a step without the data (`mprun memory`), so
        `torch.empty` is enough. With None, planning loads the data.
        """
        return None

    def prepare(self, inputs: Any) -> Any:
        """The stored `inputs` [B, ...] as the model's: floating or, like token ids, integer.

        Unchanged unless overridden. It gets all but the last item of a batch that is a tuple (the
        first of a pair), else the whole batch. Integers are prepared on the training device,
        floating samples before they are sent there.
        """
        return inputs

    @property
    def prepares(self) -> bool:
        """Whether `prepare` does anything."""
        return type(self).prepare is not Recipe.prepare

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's output for a batch.

        Unless overridden, the last item of a tuple or list is the target, and the rest are the
        model's arguments; a mapping gives named arguments; anything else, or a tuple of one item,
        is the only argument.
        """
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, tuple | list):
            return model(*(batch[:-1] if len(batch) > 1 else batch))
        return model(batch)

    @property
    def forwards_target(self) -> bool:
        """Whether `forward` may read the last item of a batch that is a tuple."""
        return type(self).forward is not Recipe.forward

    def loss(self, output: Any, batch: Any) -> Any:
        """The batch's mean loss: a scalar, or a dict of named scalars, whose sum is trained.

        Unless overridden, it is the one that the output brings, as `output.loss` or
        `output["loss"]`. In evaluation it may be None if `METRIC` names a metric.
        """
        return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)

    def correct(self, output: Any, batch: Any) -> Tensor | None:
        """How many samples [B] of the batch `output` has right; None for a regression.

        An integer scalar from 0 to B; the run fails with one line at anything else, such as a
        mean, or a count of tokens: `mprun.metrics.Accuracy` of `metrics` has their share.
        """
        return None

    def metrics(self) -> dict[str, Any]:
        """Name to metric; each is recorded for every epoch and set, and `METRIC` may name one.

        A metric has `update(output, batch)` and `compute()`, or is a pair `(metric, select)`, where
        `select(output, batch)` returns the arguments of `metric.update`, or is the name of one that
        ships: see `mprun.metrics`. Each epoch and each evaluation starts with a copy of it.
        """
        return {}

    def quantities(self) -> dict[str, Any]:
        """Name to function of (model, batch): what is taken from the model besides its loss.

        Each returns a number or a tensor: forces, a residual, an eigenvalue of the Hessian.
        `batch` is that of `forward`, the model evaluates, and gradients are on. A pair
        `(function, truth)` has the exact answer too: `truth(batch)` of the batch as it was.

            {"forces": (lambda model, batch: forces(model, batch["x"]), lambda b: b["forces"])}

        After training they are computed in the mode and in float64, on validation samples (of the
        test without these): the arithmetic's share of the error, and a verdict of a comparison,
        with the margin `compare.margin.NAME`.
        """
        return {}

    def count(self, batch: Any) -> float:
        """How many items the loss of a batch averages over: samples, unless overridden.

        The micro-batches of a step, and the batches of an epoch, are weighted by it. A recipe whose
        loss is a mean over tokens returns their number. What counts 0 is not trained on.
        """
        raise NotImplementedError

    @property
    def counts(self) -> bool:
        """Whether the loss averages over something else than samples."""
        return type(self).count is not Recipe.count

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of a prepared model; unless overridden, `train.optimizer` decides.

        With 16-bit parameters `model` has float32 masters in their place while this is called.
        """
        raise NotImplementedError

    @property
    def makes_optimizer(self) -> bool:
        """Whether the recipe makes its own optimizer."""
        return type(self).optimizer is not Recipe.optimizer

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """The learning-rate schedule; unless overridden, `train.scheduler` decides.

        It is stepped after each optimizer step that is taken.
        """
        raise NotImplementedError

    @property
    def makes_schedule(self) -> bool:
        """Whether the recipe makes its own learning-rate schedule."""
        return type(self).schedule is not Recipe.schedule


class Classification(Recipe):
    """A recipe whose outputs [B, classes] are judged by their largest entry.

    A batch is a pair of inputs and classes [B]; the loss reads only the classes.
    """

    loss_reads_inputs: ClassVar[bool] = False

    def correct(self, output: Tensor, batch: tuple[Any, Tensor]) -> Tensor:
        """Samples whose largest output is the target class."""
        return output.argmax(1).eq(batch[1]).sum()
