"""What a recipe is: a model, its data, a loss and a metric. Never a loop.

The training loop owns everything a precision mode may change: casting, the backward pass, the
optimizer step, timing. A recipe only defines what is trained, so that any mode can train it.

A recipe is a frozen dataclass. Its fields are the parameters a user sets as `recipe.model.<field>`
and are checked against the annotated types; `__post_init__` raises `ValueError` for a value out of
range, with what is legal. Your own recipe is such a class in any importable module, plus a YAML
file that names it as `recipe.target`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from mprun.data import DataRequest, Splits, TensorSet


class Recipe(ABC):
    """Model, data, loss and metric of one training task."""

    metric: ClassVar[str] = "accuracy"
    """What the task is judged by: "accuracy" (a fraction, higher is better) or "loss" (lower).

    Others are refused when the recipe is loaded.
    """

    ignores: ClassVar[frozenset[str]] = frozenset()
    """Configuration keys without effect in this recipe; a user who sets one gets a warning."""

    draws_data: ClassVar[bool] = True
    """Whether the samples depend on the run's seed; false lets runs of other seeds share them."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, drawn in float32 on the CPU from torch's global generator."""

    @abstractmethod
    def data(self, request: DataRequest) -> Splits:
        """The samples.

        Raises:
            UsageError: the data are not available; the message names the remedies.
        """

    def sample(self) -> TensorSet | None:
        """Samples like those of `data`, any number of them, or None.

        Only shapes and dtypes are used, to plan a step without the data (`mprun memory`), so
        `torch.empty` is enough. With None, planning loads the data.
        """
        return None

    def prepare(self, inputs: Tensor) -> Tensor:
        """A stored batch [B, ...] as the model's input, float32 or, like token ids, integer.

        Unchanged unless overridden. Floating inputs are then brought to the mode's dtype. Integers
        are prepared on the training device, floating samples before they are sent there.
        """
        return inputs

    @property
    def prepares(self) -> bool:
        """Whether `prepare` does anything."""
        return type(self).prepare is not Recipe.prepare

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The batch's mean loss, a scalar of the output's dtype."""

    def correct(self, output: Tensor, target: Tensor) -> Tensor | None:
        """How many samples [B] of the batch are right; None for a regression.

        An integer scalar from 0 to B; the run fails with one line at anything else, such as a
        count of tokens or a mean.
        """
        return None


class Classification(Recipe):
    """A recipe whose outputs [B, classes] are judged by their largest entry."""

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """Samples whose largest output is the target class."""
        return output.argmax(1).eq(target).sum()
