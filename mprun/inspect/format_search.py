"""Which GEMMs of linear layers do not tolerate a mode's format of 8 bits or fewer.

A linear layer has three matrix products (GEMMs) in a training step: forward, grad_input and
grad_weight. An outlier in an input, a weight or a gradient does harm in two of them at most. So the
search asks for each GEMM; it can also keep whole layers together, which takes a third of the
measurements. It is the search of ops (`op_search.py`): *alone*, a candidate has the format and
everything else is float32; kept high, it is bfloat16 and the others have the format. It finds the
set with the fewest effective bits that keeps to the tolerance, or the set with the least harm
within a budget of them:

    effective bits = sum(multiply-adds x bits) / sum(multiply-adds)    over all GEMMs

where the bits of a GEMM are the mean over its two factors, shares of scales included. GEMMs that a
mode leaves high (the first and the last layer) count with the bits of their dtype, so bfloat16 is
16, and a mode of 4 bits is above 4.5. It ranks choices on any hardware, but it is no time. Ops
other than linear layers are not counted.

The tolerance is that of the dtypes of 16 bits, beside what weights of the format's precision cost
by themselves: with three bits of mantissa (E4M3) a weight is moved by up to 6 %, with one bit
(E2M1) by up to 25 %. A mode rounds inputs and gradients besides, which costs 2 to 5 dB more in
models without outliers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.inspect.cast_probe import CastProbe
from mprun.inspect.op_search import Candidates
from mprun.inspect.passes import CastPlan
from mprun.inspect.search_result import Deviation
from mprun.precision.caster import AutocastCaster, NoCaster
from mprun.precision.gemms import HIGH, Gemm, LinearGemms, linear_layers
from mprun.records.layer_values import PRODUCTS, with_high_products

# How much worse than moved weights a format may be: SQNR of a gradient. 10 dB, as for 16 bits,
# would leave nothing of NVFP4's gradients.
SLACK_DB = 6.0
BFLOAT16_BITS = 16.0


class GemmName(NamedTuple):
    """A GEMM of a model."""

    layer: str
    product: str  # forward, grad_input or grad_weight

    def __str__(self) -> str:
        return f"{self.layer}.{self.product}"


@dataclass(frozen=True)
class GemmSize:
    """The size of a GEMM."""

    operations: int  # Multiply-adds of a micro-batch
    summed: int  # Numbers that are summed for one of the result: a row of both factors


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


def gemm_bits(gemm: Gemm, summed: int) -> float:
    """Bits of a number, the mean over both factors.

    Args:
        gemm: the formats.
        summed: numbers in a row of the factors, which may share a scale.
    """
    own = BFLOAT16_BITS if gemm.dtype is None else 8.0 * gemm.dtype.itemsize
    factors = (gemm.left, gemm.right)
    return sum(own if x is None else x.bits_per_number(summed) for x in factors) / 2


class EffectiveBits:
    """The effective bits of a model, by the GEMMs that stay high.

    Args:
        sizes: of every GEMM.
        gemms: the formats of the layers that have some; other GEMMs are bfloat16.
    """

    def __init__(
        self, sizes: Mapping[GemmName, GemmSize], gemms: Mapping[str, LinearGemms]
    ) -> None:
        self._sizes = sizes
        formats = {name: getattr(gemms.get(name.layer), name.product, HIGH) for name in sizes}
        self._bits = {name: gemm_bits(gemm, sizes[name].summed) for name, gemm in formats.items()}
        self.formatted = [name for name, gemm in formats.items() if gemm.formats]
        """The GEMMs that have a format."""

    def of(self, high: Collection[GemmName]) -> float:
        """With these GEMMs high."""
        kept = {*high}
        bits = (
            size.operations * (BFLOAT16_BITS if name in kept else self._bits[name])
            for name, size in self._sizes.items()
        )
        return sum(bits) / sum(size.operations for size in self._sizes.values())


def with_high(
    gemms: Mapping[str, LinearGemms], high: Collection[GemmName]
) -> dict[str, LinearGemms]:
    """The formats of layers, without those of some GEMMs; layers without any are left out."""
    names = {*high}
    kept = {
        layer: of_layer._replace(
            **{p: HIGH for p in of_layer._fields if GemmName(layer, p) in names}
        )
        for layer, of_layer in gemms.items()
    }
    return {layer: of_layer for layer, of_layer in kept.items() if any(g.formats for g in of_layer)}


@dataclass(frozen=True)
class GemmGroups:
    """The GEMMs of a model's linear layers, by what stays high together.

    Args:
        gemms: the formats of each layer that the mode converts.
        bits: counts the effective bits of a choice.
        per: gemm for each by itself, layer for those of a layer together.
    """

    gemms: Mapping[str, LinearGemms]
    bits: EffectiveBits
    per: str = "gemm"

    @cached_property
    def own(self) -> dict[str, tuple[GemmName, ...]]:
        """Name to the GEMMs that stay high together."""
        found: dict[str, tuple[GemmName, ...]] = {}
        for name in self.bits.formatted:
            key = name.layer if self.per == "layer" else str(name)
            found[key] = (*found.get(key, ()), name)
        return found

    def of(self, names: Collection[str]) -> tuple[GemmName, ...]:
        """The GEMMs of these names."""
        return tuple(gemm for name in names for gemm in self.own[name])

    def candidates(self, device_type: str) -> Candidates:
        """They, as candidates for bfloat16; their cost is effective bits."""
        bfloat16 = AutocastCaster(device_type, torch.bfloat16)
        formatted = {*self.bits.formatted}
        return Candidates(
            "GEMM" if self.per == "gemm" else self.per,
            {name: len(gemms) for name, gemms in self.own.items()},
            alone=lambda name: CastPlan(
                NoCaster(), gemms=with_high(self.gemms, formatted - {*self.own[name]})
            ),
            kept=lambda names: CastPlan(bfloat16, gemms=with_high(self.gemms, self.of(names))),
            cost=lambda names: self.bits.of(self.of(names)),
        )

    def moved_weights(self, probe: CastProbe) -> Deviation:
        """Everything in float32, with weights of the format's precision."""
        weights = {f"{name}.weight" for name in self.gemms}
        steps = [of.forward.right.half_step for of in self.gemms.values() if of.forward.right]
        return probe.with_moved(weights, max(steps, default=0.0))

    def layers(self, mode: str, names: Collection[str]) -> dict[str, str]:
        """`precision.layers` of a run in the mode with these in bfloat16."""
        high = {*self.of(names)}
        low = {*self.bits.formatted} - high
        return {
            layer: with_high_products(
                mode, {product for product in PRODUCTS if GemmName(layer, product) not in low}
            )
            for layer in self.gemms
            if any(name.layer == layer for name in high)
        }
