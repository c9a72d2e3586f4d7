"""Figures that others published for these recipes and modes.

They are shown beside the measured ones, with their hardware and source. No verdict uses them:
`mprun.compare` does not import this module.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

UNNAMED = "hardware not named"
PYTORCH = "PyTorch's blog on mixed precision"
KERAS = "Keras' mixed-precision guide"
GRAPHCORE = "Graphcore's tutorial on half and mixed precision"


@dataclass(frozen=True)
class Figure:
    """One published figure."""

    what: str  # The quantity: `test accuracy`, `speed over fp32`
    text: str  # The figure as published
    precisions: tuple[str, ...]  # The modes of mprun that it is about
    hardware: str
    source: str
    recipe: str | None = None  # The recipe it was measured with; None for a figure about a mode
    epoch: int | None = None  # None: of the whole training
    batch_size: int | None = None


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


_KERAS_EPOCHS = {
    "training accuracy": (0.5529, 0.7743, 0.8260, 0.8607, 0.8545),
    "validation accuracy": (0.7214, 0.7849, 0.8795, 0.8682, 0.8813),
}
_keras = partial(Figure, precisions=("bf16_mixed",), source=KERAS, recipe="mnist")
_keras_run = partial(_keras, hardware=UNNAMED)  # The one run that the guide shows
_keras_claim = partial(_keras, "speed over fp32")
_graphcore = partial(
    Figure,
    precisions=("half_sr",),
    hardware="IPU",
    source=GRAPHCORE,
    recipe="fashion_mnist",
    batch_size=12,
)
_amp = partial(Figure, precisions=("fp16_mixed", "bf16_mixed"), source=PYTORCH)

MEMORY_OF_HALF_SR = _graphcore("peak memory over fp32's", "about 26 % less")
RATIO_OF_HALF_SR = 0.74  # The same as a number

FIGURES = (
    _keras_run("test accuracy", "0.8749"),
    _keras_run("test loss", "0.4217"),
    *(
        _keras_run(f"{what}, epoch {epoch}", f"{value:.4f}", epoch=epoch)
        for what, values in _KERAS_EPOCHS.items()
        for epoch, value in enumerate(values, 1)
    ),
    _keras_run("time per sample, after the first epoch", "about 12 us"),
    _keras_claim("more than 2 times", hardware="HPU", source=f"{KERAS}, overview"),
    _keras_claim("up to 2 times", hardware=UNNAMED, source=f"{KERAS}, summary"),
    _keras_claim("60 % more", hardware="CPUs with native instructions"),
    _keras_claim("significantly slower", hardware="CPUs without native instructions"),
    _keras_claim("no benefit for toy models", hardware="any hardware"),
    _graphcore("test accuracy", "about 0.84"),
    _graphcore("test accuracy lost against fp32", "less than 1 point"),
    MEMORY_OF_HALF_SR,
    _amp("speed over fp32", "1.5 to 5.5 times", hardware="V100"),
    _amp("speed over AMP on a V100", "a further 1.3 to 2.5 times", hardware="A100"),
    _amp("peak rate of float16 matmuls over fp32's", "16 times", hardware="A100"),
    _amp("bytes that a bandwidth-bound kernel moves", "half", hardware="any hardware"),
)
