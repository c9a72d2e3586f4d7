"""Effective bits: how many bits a multiply-add of a model's linear layers reads for a number.

A linear layer has three matrix products (GEMMs) in a training step: forward, grad_input and
grad_weight. A choice of their formats is summed up as

    effective bits = sum(multiply-adds x bits) / sum(multiply-adds)    over all GEMMs

where the bits of a GEMM are the mean over its two factors, shares of scales included. GEMMs that a
mode leaves high (the first and the last layer) count with the bits of their dtype, so bfloat16 is
16, and a mode of 4 bits is above 4.5.

It ranks choices on any hardware, but it is no time: that depends on rates, which `mprun doctor`
measures. Ops other than linear layers are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.precision.gemms import HIGH, Gemm, LinearGemms, linear_layers

BFLOAT16_BITS = 16.0


class GemmName(NamedTuple):
    """A GEMM of a model."""

    layer: str
    product: str
    """forward, grad_input or grad_weight."""

    def __str__(self) -> str:
        return f"{self.layer}.{self.product}"


@dataclass(frozen=True)
class GemmSize:
    """The size of a GEMM."""

    operations: int
    """Multiply-adds of a micro-batch."""
    summed: int
    """Numbers that are summed for one of the result: a row of both factors."""


def gemm_sizes(model: nn.Module, run: Callable[[], object]) -> dict[GemmName, GemmSize]:
    """The GEMMs that a step computes, in the order of the model's layers.

    Without layers that are not called, and without gradients that nothing needs.

    Args:
        model: its linear layers have their own forward.
        run: a forward pass with gradients; a layer that it calls twice counts twice.
    """
    layers, found = linear_layers(model), dict[GemmName, GemmSize]()
    with ExitStack() as stack:
        for name, layer in layers.items():

            def called(
                module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name
            ) -> None:
                for product, size in _sizes(module, args[0] if args else kwargs["input"]).items():
                    key = GemmName(name, product)
                    before = found[key].operations if key in found else 0
                    found[key] = GemmSize(before + size.operations, size.summed)

            hook = layer.register_forward_pre_hook(called, with_kwargs=True)
            stack.callback(hook.remove)
        run()
    names = (GemmName(name, product) for name in layers for product in LinearGemms._fields)
    return {name: found[name] for name in names if name in found}


def _sizes(layer: nn.Linear, x: Tensor) -> dict[str, GemmSize]:
    """The GEMMs of one call, by product."""
    m, k, n = x.numel() // layer.in_features, layer.in_features, layer.out_features
    trains = torch.is_grad_enabled()
    rows = {
        "forward": (k, True),
        "grad_input": (n, trains and x.requires_grad),
        "grad_weight": (m, trains and layer.weight.requires_grad),
    }
    return {name: GemmSize(m * k * n, summed) for name, (summed, needed) in rows.items() if needed}


def gemm_bits(gemm: Gemm, summed: int, high_bits: float = BFLOAT16_BITS) -> float:
    """Bits of a number, the mean over both factors.

    Args:
        gemm: the formats.
        summed: numbers in a row of the factors, which may share a scale.
        high_bits: of factors in the layer's dtype.
    """
    own = high_bits if gemm.dtype is None else 8.0 * gemm.dtype.itemsize
    factors = (gemm.left, gemm.right)
    return sum(own if x is None else x.bits_per_number(summed) for x in factors) / 2


class EffectiveBits:
    """The effective bits of a model, by the GEMMs that stay high.

    Args:
        sizes: of every GEMM.
        gemms: the formats of the layers that have some.
        high_bits: of GEMMs without a format.
    """

    def __init__(
        self,
        sizes: Mapping[GemmName, GemmSize],
        gemms: Mapping[str, LinearGemms],
        high_bits: float = BFLOAT16_BITS,
    ) -> None:
        self._sizes, self._high_bits = sizes, high_bits
        formats = {name: getattr(gemms.get(name.layer), name.product, HIGH) for name in sizes}
        self._bits = {
            name: gemm_bits(gemm, sizes[name].summed, high_bits) for name, gemm in formats.items()
        }
        self.formatted = [name for name, gemm in formats.items() if gemm.formats]
        """The GEMMs that have a format."""

    def of(self, high: Collection[GemmName]) -> float:
        """With these GEMMs high."""
        kept = {*high}
        bits = (
            size.operations * (self._high_bits if name in kept else self._bits[name])
            for name, size in self._sizes.items()
        )
        return sum(bits) / sum(size.operations for size in self._sizes.values())

    def share(self, names: Collection[GemmName]) -> float:
        """Of these GEMMs in the operations of all that have a format."""
        whole = sum(self._sizes[name].operations for name in self.formatted)
        return sum(self._sizes[name].operations for name in names) / whole
