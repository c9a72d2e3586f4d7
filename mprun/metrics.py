"""Metrics by name: accuracy and perplexity.

A metric has `update(output, batch)`, called once for each batch, and `compute()`, called at the end
of an epoch or of a data set:

    def metrics():
        return {"tokens": mprun.metrics.Accuracy(shift=True), "perplexity": "perplexity"}

    METRIC = ("tokens", "max")

Any object with these two methods is a metric. For one whose `update` takes something else, give a
pair `(metric, select)`: `select(output, batch)` returns the arguments of `update`. Metrics of
torchmetrics get the scores and the targets, and a `MetricCollection` is as many metrics, under its
names:

    {"auroc": torchmetrics.AUROC("multiclass", num_classes=10)}

The scores of an output are the output itself if it is a tensor, else its `logits`, its `out`, or
the first item of a tuple. The targets of a batch are the last item of a tuple, or the `labels`,
`label`, `targets`, `target` or `y` of a mapping.

Each is computed from sums over all batches, in float64 on the device of the output (on the CPU
where that has none), and only `compute` waits for the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mprun.errors import RunFailedError
from mprun.precision import devices
from mprun.train.loss_terms import shown

__all__ = ["SHIPPED", "Accuracy", "Perplexity", "SummedMetric"]

# Why not torchmetrics, which a recipe may use: its sums and quotients are float32, so a mean over a
# million batches would be off in the third digit; it wants the number of classes before the first
# batch; and its import takes 5.2 s of CPU time beside PyTorch's 2.3 s (1.9.0, n=2), since any part
# of it imports all, with Transformers and SciPy: the first step of every run would wait for it.

# `logits` of Hugging Face's models, `out` of torchvision's segmentation; batches of both, and of
# common data sets
SCORES = ("logits", "out")
TARGETS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # Targets with this value are left out, as in PyTorch's cross-entropy


def scores_and_targets(
    output: Any, batch: Any, metric: str = "a metric of torchmetrics"
) -> tuple[Tensor, Tensor]:
    """The scores of an output and the targets of a batch, where a model's usually are.

    Raises:
        RunFailedError: there are none; the message names `metric`.
    """
    scores = output
    if isinstance(output, Mapping):
        scores = next((output[name] for name in SCORES if name in output), None)
    elif not isinstance(output, Tensor):
        first = output[0] if isinstance(output, tuple | list) and output else None
        scores = getattr(output, SCORES[0], first)
    where = f"an output that is {shown(output)}"
    return _tensor(scores, "scores", where, metric), _targets(batch, metric)


def _targets(batch: Any, metric: str) -> Tensor:
    targets = batch
    if isinstance(batch, Mapping):
        targets = next((batch[name] for name in TARGETS if name in batch), None)
    elif isinstance(batch, tuple | list):
        targets = _targets(batch[-1], metric) if batch else None
    return _tensor(targets, "targets", f"a batch that is {shown(batch)}", metric)


def _tensor(value: Any, what: str, where: str, metric: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise RunFailedError(
        f"{metric} finds no {what} in {where}; give the pair (metric, select), where "
        "select(output, batch) returns the tensors (scores, targets)"
    )


class SummedMetric(ABC):
    """A metric that is computed from sums over all batches."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def reset(self) -> None:
        """Forget all batches."""
        self._sums = None

    def update(self, output: Any, batch: Any) -> None:
        """Add a batch.

        Raises:
            RunFailedError: scores or targets cannot be found, or their shapes do not fit.
        """
        with torch.no_grad():
            scores, targets = scores_and_targets(output, batch, type(self).__name__)
            if not devices.backend(scores.device).float64:  # MPS
                scores, targets = scores.cpu(), targets.cpu()
            new = self._terms(scores, targets)
            self._sums = new if self._sums is None else self._sums + new

    def compute(self) -> float:
        """The metric over all batches; NaN without any; waits for the device."""
        return math.nan if self._sums is None else self._value(self._sums.cpu())

    def merge_state(self, other: SummedMetric) -> None:
        """Add the batches of another one, such as another process's."""
        if other._sums is not None:
            own = self._sums
            self._sums = other._sums if own is None else own + other._sums.to(own.device)

    @abstractmethod
    def _terms(self, scores: Tensor, targets: Tensor) -> Tensor:
        """What a batch adds to the sums, in float64."""

    @abstractmethod
    def _value(self, sums: Tensor) -> float:
        """The metric of the sums, which are on the CPU."""

    def _refuse(self, scores: Tensor, targets: Tensor, legal: str) -> RunFailedError:
        return RunFailedError(
            f"{type(self).__name__}: scores of shape {list(scores.shape)} do not fit targets of "
            f"shape {list(targets.shape)}; {legal}; the pair (metric, select) can bring them there"
        )


class _OfClasses(SummedMetric):
    """A metric of predicted classes.

    Args:
        ignore_index: targets with this value are left out.
        class_dim: the dimension of the scores with an entry for each class; None: the last or the
            second one, whichever fits the targets.
        shift: whether the scores at a position predict the target of the next one, as those of a
            causal language model do whose labels are its inputs.
    """

    def __init__(
        self, ignore_index: int = IGNORED, class_dim: int | None = None, shift: bool = False
    ) -> None:
        super().__init__()
        self._ignore_index, self._class_dim, self._shift = ignore_index, class_dim, shift

    def _by_class(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [n, classes] and targets [n], of all positions."""
        dim = self._dim_of_classes(scores, targets)
        scores = scores.movedim(dim, -1)
        if self._shift:
            scores, targets = scores[:, :-1], targets[:, 1:]  # the last one predicts no target
        return scores.reshape(-1, scores.shape[-1]), targets.reshape(-1)

    def _dim_of_classes(self, scores: Tensor, targets: Tensor) -> int:
        shape, dims = scores.shape, set[int]()
        if scores.dim() == targets.dim() + 1:
            last = scores.dim() - 1
            dims = {1, last} if self._class_dim is None else {self._class_dim % scores.dim()}
        # [batch, classes, ...] of PyTorch's losses, or [batch, ..., classes] of language models
        fitting = {d for d in dims if shape[:d] + shape[d + 1 :] == targets.shape}
        if len(fitting) == 1:
            return fitting.pop()
        legal = "scores have one dimension more than targets, with an entry for each class"
        if fitting:
            legal = "both dimension 1 and the last may be of classes: give class_dim"
        raise self._refuse(scores, targets, legal)


class Accuracy(_OfClasses):
    """The share of targets whose class has the largest score: right / counted.

    Scores of the shape of the targets are those of class 1 against class 0: logits, whose limit is
    0, or, if they are integers, the predicted classes.
    """

    def _terms(self, scores: Tensor, targets: Tensor) -> Tensor:
        predicted, true = self._predicted(scores, targets)
        counted = true.ne(self._ignore_index)
        return torch.stack((predicted.eq(true).logical_and(counted).sum(), counted.sum())).double()

    def _predicted(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted and true classes [n]."""
        if scores.shape == (*targets.shape, 1):
            scores = scores.squeeze(-1)
        if scores.shape != targets.shape:
            by_class, true = self._by_class(scores, targets)
            return by_class.argmax(1), true.long()
        if self._shift:
            raise self._refuse(scores, targets, "with shift, scores have a dimension of classes")
        classes = scores.gt(0) if scores.is_floating_point() else scores
        return classes.long().reshape(-1), targets.long().reshape(-1)

    def _value(self, sums: Tensor) -> float:
        right, counted = sums.tolist()
        return right / counted if counted else math.nan


class Perplexity(_OfClasses):
    """exp(sum of the cross-entropies of all tokens / their number).

    It is not the mean of the perplexities of batches, which would be larger.
    """

    def _terms(self, scores: Tensor, targets: Tensor) -> Tensor:
        by_class, true = self._by_class(scores, targets)
        losses = functional.cross_entropy(
            # float32 per token, as the loss is; only their sum, of a million, needs float64
            by_class.float(),
            true,
            ignore_index=self._ignore_index,
            reduction="none",
        )
        return torch.stack((losses.sum(dtype=torch.float64), true.ne(self._ignore_index).sum()))

    def _value(self, sums: Tensor) -> float:
        loss, tokens = sums.tolist()
        if not tokens:
            return math.nan
        try:
            return math.exp(loss / tokens)
        except OverflowError:  # a mean loss above 709
            return math.inf


# The metrics that a recipe may give by name
SHIPPED: dict[str, type[SummedMetric]] = {
    "accuracy": Accuracy,
    "perplexity": Perplexity,
}
