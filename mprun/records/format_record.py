"""Whether formats of 8 bits or fewer pay for the linear layers of a recipe. No torch.

A part of the record of `mprun doctor recipe=NAME`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PAYS_FROM = 1.05
"""How many times as fast as bfloat16's the products must be, rounding included."""


@dataclass(kw_only=True)
class LayerGain:
    """A layer's three products in a format, with the rounding of their factors."""

    format: str
    """The mode that has it."""
    us: float
    """Microseconds of forward and backward pass."""
    speedup: float
    """bfloat16's time over it."""
    pays: bool
    """Whether the speedup is at least `PAYS_FROM`."""


@dataclass(kw_only=True)
class LayerGains:
    """Layers of one shape."""

    layers: list[str]
    """Their names."""
    samples: int
    """Rows of the input: samples of a micro-batch times the positions of each."""
    in_features: int
    out_features: int
    bfloat16_us: float
    """Microseconds of the three products of one layer."""
    gains: list[LayerGain]


@dataclass(kw_only=True)
class FormatGains:
    """The formats that one GPU multiplies, for each shape of a recipe's linear layers."""

    gpu: str
    source: Literal["measured", "predicted"]
    """predicted: from published rates, by a roofline."""
    basis: str
    """What it was measured or computed with."""
    shapes: list[LayerGains]
    speedup: dict[str, float]
    """Format to that of all layers that a mode converts, summed over them."""
