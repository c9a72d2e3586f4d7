"""Figures that others published for these recipes and modes.

They are shown beside the measured ones, with their hardware and source. No verdict uses them:
`mprun.compare` does not import this module.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

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
"""The measured figure that it is compared with; none for `other`."""

UNNAMED = "hardware not named"
PYTORCH = "PyTorch's blog on mixed precision"
KERAS = "Keras' mixed-precision guide"
GRAPHCORE = "Graphcore's tutorial on half and mixed precision"


@dataclass(frozen=True)
class Figure:
    """One published figure."""

    kind: Kind
    what: str
    """The quantity: `test accuracy`, `speed over fp32`."""
    text: str
    """The figure as published."""
    precisions: tuple[str, ...]
    """The modes of mprun that it is about."""
    hardware: str
    source: str
    recipe: str | None = None
    """The recipe it was measured with; None for a figure about a mode."""
    value: float | None = None
    """The figure as a number, if it is one."""
    epoch: int | None = None
    batch_size: int | None = None
    epochs: int | None = None


def figures(recipes: Collection[str], precisions: Collection[str]) -> list[Figure]:
    """The figures for these recipes, and those about a mode among these alone.

    Args:
        recipes: names of recipes.
        precisions: names of modes.
    """
    return [
        f
        for f in FIGURES
        if (f.recipe in recipes if f.recipe is not None else {*f.precisions} & {*precisions})
    ]


def _keras(kind: Kind, what: str, value: float, epoch: int | None = None) -> Figure:
    """A figure of the one run that the guide shows: batches of 8192, five epochs."""
    return Figure(
        kind,
        what if epoch is None else f"{what}, epoch {epoch}",
        f"{value:.4f}",
        ("bf16_mixed",),
        UNNAMED,
        KERAS,
        "mnist",
        value,
        epoch,
        batch_size=8192,
        epochs=5,
    )


def _keras_claim(text: str, hardware: str, place: str = "") -> Figure:
    source = f"{KERAS}, {place}" if place else KERAS
    return Figure(
        "speed", "speed over fp32", text, ("bf16_mixed",), hardware, source, recipe="mnist"
    )


def _graphcore(kind: Kind, what: str, text: str, value: float | None = None) -> Figure:
    return Figure(
        kind,
        what,
        text,
        ("half_sr",),
        "IPU",
        GRAPHCORE,
        "fashion_mnist",
        value,
        batch_size=12,
        epochs=None if kind == "memory" else 10,
    )


def _amp(kind: Kind, what: str, text: str, hardware: str) -> Figure:
    return Figure(kind, what, text, ("fp16_mixed", "bf16_mixed"), hardware, PYTORCH)


MEMORY_OF_HALF_SR = _graphcore("memory", "peak memory over fp32's", "about 26 % less", 0.74)

FIGURES = (
    _keras("test_accuracy", "test accuracy", 0.8749),
    _keras("test_loss", "test loss", 0.4217),
    *(
        _keras("train_accuracy", "training accuracy", value, epoch)
        for epoch, value in enumerate((0.5529, 0.7743, 0.8260, 0.8607, 0.8545), 1)
    ),
    *(
        _keras("validation_accuracy", "validation accuracy", value, epoch)
        for epoch, value in enumerate((0.7214, 0.7849, 0.8795, 0.8682, 0.8813), 1)
    ),
    Figure(
        "time_per_sample",
        "time per sample, after the first epoch",
        "about 12 us",
        ("bf16_mixed",),
        UNNAMED,
        KERAS,
        "mnist",
        12e-6,
        batch_size=8192,
        epochs=5,
    ),
    _keras_claim("more than 2 times", "HPU", "overview"),
    _keras_claim("up to 2 times", UNNAMED, "summary"),
    _keras_claim("60 % more", "CPUs with native instructions"),
    _keras_claim("significantly slower", "CPUs without native instructions"),
    _keras_claim("no benefit for toy models", "any hardware"),
    _graphcore("test_accuracy", "test accuracy", "about 0.84", 0.84),
    _graphcore("accuracy_difference", "test accuracy lost against fp32", "less than 1 point"),
    MEMORY_OF_HALF_SR,
    _amp("speed", "speed over fp32", "1.5 to 5.5 times", "V100"),
    _amp("other", "speed over AMP on a V100", "a further 1.3 to 2.5 times", "A100"),
    _amp("other", "peak rate of float16 matmuls over fp32's", "16 times", "A100"),
    _amp("other", "bytes that a bandwidth-bound kernel moves", "half", "any hardware"),
)
