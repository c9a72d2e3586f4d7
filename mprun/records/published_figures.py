"""Figures that others published for these recipes and modes.

They are shown beside the measured ones, with their hardware and source. No verdict uses them:
`mprun.compare` does not import this module.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal

# The measured figure that it is compared with; none for `other`
Kind = Literal[
    "train_accuracy",
    "validation_accuracy",
    "test_accuracy",
    "test_loss",
    "accuracy_difference",
    "time_per_sample",
    "speed",
    "memory",
    "other",
]

UNNAMED = "hardware not named"
PYTORCH = "PyTorch's blog on mixed precision"
KERAS = "Keras' mixed-precision guide"
GRAPHCORE = "Graphcore's tutorial on half and mixed precision"


@dataclass(frozen=True)
class Figure:
    """One published figure."""

    kind: Kind
    what: str  # The quantity: `test accuracy`, `speed over fp32`
    text: str  # The figure as published
    precisions: tuple[str, ...]  # The modes of mprun that it is about
    hardware: str
    source: str
    recipe: str | None = None  # The recipe it was measured with; None for a figure about a mode
    value: float | None = None  # The figure as a number, if it is one
    epoch: int | None = None
    batch_size: int | None = None
    epochs: int | None = None


def figures(recipes: Collection[str], precisions: Collection[str]) -> list[Figure]:
    """The figures for these recipes and modes.

    Those about a mode alone stand beside mprun's own recipes only, which were made for them.
    """
    # no model of somebody else's is what the figures about a mode alone were measured with
    own = {f.recipe for f in FIGURES} - {None}
    return [
        f
        for f in FIGURES
        if ({f.recipe} if f.recipe is not None else own) & {*recipes}
        and {*f.precisions} & {*precisions}
    ]


_KERAS_EPOCHS: tuple[tuple[Kind, str, tuple[float, ...]], ...] = (
    ("train_accuracy", "training accuracy", (0.5529, 0.7743, 0.8260, 0.8607, 0.8545)),
    ("validation_accuracy", "validation accuracy", (0.7214, 0.7849, 0.8795, 0.8682, 0.8813)),
)
# Figures of the one run that the guide shows
_keras_run = partial(
    Figure,
    precisions=("bf16_mixed",),
    hardware=UNNAMED,
    source=KERAS,
    recipe="mnist",
    batch_size=8192,
    epochs=5,
)
_keras_claim = partial(
    Figure, "speed", "speed over fp32", precisions=("bf16_mixed",), recipe="mnist"
)
_graphcore = partial(
    Figure,
    precisions=("half_sr",),
    hardware="IPU",
    source=GRAPHCORE,
    recipe="fashion_mnist",
    batch_size=12,
)
_amp = partial(Figure, precisions=("fp16_mixed", "bf16_mixed"), source=PYTORCH)

MEMORY_OF_HALF_SR = _graphcore("memory", "peak memory over fp32's", "about 26 % less", value=0.74)

FIGURES = (
    _keras_run("test_accuracy", "test accuracy", "0.8749", value=0.8749),
    _keras_run("test_loss", "test loss", "0.4217", value=0.4217),
    *(
        _keras_run(kind, f"{what}, epoch {epoch}", f"{value:.4f}", value=value, epoch=epoch)
        for kind, what, values in _KERAS_EPOCHS
        for epoch, value in enumerate(values, 1)
    ),
    _keras_run(
        "time_per_sample", "time per sample, after the first epoch", "about 12 us", value=12e-6
    ),
    _keras_claim("more than 2 times", hardware="HPU", source=f"{KERAS}, overview"),
    _keras_claim("up to 2 times", hardware=UNNAMED, source=f"{KERAS}, summary"),
    _keras_claim("60 % more", hardware="CPUs with native instructions", source=KERAS),
    _keras_claim("significantly slower", hardware="CPUs without native instructions", source=KERAS),
    _keras_claim("no benefit for toy models", hardware="any hardware", source=KERAS),
    _graphcore("test_accuracy", "test accuracy", "about 0.84", value=0.84, epochs=10),
    _graphcore(
        "accuracy_difference", "test accuracy lost against fp32", "less than 1 point", epochs=10
    ),
    MEMORY_OF_HALF_SR,
    _amp("speed", "speed over fp32", "1.5 to 5.5 times", hardware="V100"),
    _amp("other", "speed over AMP on a V100", "a further 1.3 to 2.5 times", hardware="A100"),
    _amp("other", "peak rate of float16 matmuls over fp32's", "16 times", hardware="A100"),
    _amp("other", "bytes that a bandwidth-bound kernel moves", "half", hardware="any hardware"),
)
