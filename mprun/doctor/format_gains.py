"""Does a format of 8 bits or fewer pay for a linear layer? It depends on the layer's size.

A product of M x K and K x N takes 2 M K N operations, which halve their time in 8 bits. Before it,
both factors are rounded, which takes traffic in proportion to M K + K N and a launch of a kernel or
two. So small layers become slower: below about 1,000 to 4,000 features on an H100.

    product     max(2 M K N / (rate of the format), bytes / bandwidth) + launch
    rounding    bytes read and written / bandwidth + launches, for both factors of each product

Without such hardware the rates are those that NVIDIA and AMD publish, and products and copies reach
the shares of them that large kernels reach. That is a prediction: a compiler that fuses the
rounding with the op before makes it better, a loop that launches kernels late makes it worse.

With the hardware, layers are timed: PyTorch's `nn.Linear` in bfloat16 against torchao's, compiled.

Sources: data sheets of the GPUs, dense rates; the method is that of torchao's float8 roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from mprun.precision.native_gemms import RECIPES, convert_natively, why_not_native
from mprun.precision.rates import warm
from mprun.records.format_record import PAYS_FROM, FormatGains, LayerGain, LayerGains


class GpuRates(NamedTuple):
    """Published rates of a GPU, dense."""

    name: str
    bfloat16: float
    """10^12 operations a second, as the next two."""
    float8: float
    nvfp4: float | None
    bandwidth: float
    """10^9 bytes a second."""
    block_scales: bool = False
    """Whether its units multiply blocks with scales (mxfp8)."""
    row_scales: bool = True
    """Whether they take a factor per row."""


GPUS = {
    "rtx4090": GpuRates("NVIDIA RTX 4090", 165, 330, None, 1008, row_scales=False),
    "l40s": GpuRates("NVIDIA L40S", 362, 733, None, 864, row_scales=False),
    "h100": GpuRates("NVIDIA H100 SXM", 989, 1979, None, 3350),
    "h200": GpuRates("NVIDIA H200 SXM", 989, 1979, None, 4800),
    "b200": GpuRates("NVIDIA B200", 2250, 4500, 9000, 8000, block_scales=True),
    "mi300x": GpuRates("AMD MI300X", 1307, 2615, None, 5300),
}
MATMUL_SHARE, BANDWIDTH_SHARE, LAUNCH_US = 0.75, 0.85, 4.0
"""Of the published rates, in large kernels; and the time of a launch, in microseconds."""


class RoundingWork(NamedTuple):
    """The work of rounding a bfloat16 factor."""

    bytes: float
    """Read and written for each number."""
    launches: int


ROUNDING = {
    "fp8_tensorwise": RoundingWork(2 + 2 + 1, 2),  # the largest number first, in a pass of its own
    "fp8_rowwise": RoundingWork(2 + 1, 1),
    "mxfp8": RoundingWork(2 + 1 + 1 / 32, 1),
    "nvfp4": RoundingWork(2 + 2 + 0.5 + 1 / 16, 2),  # it has a factor of the whole tensor too
}
STORED = {"fp8_tensorwise": 1.0, "fp8_rowwise": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes for each number of a rounded factor."""


class Shape(NamedTuple):
    """A linear layer's forward pass."""

    samples: int
    in_features: int
    out_features: int


def formats_of(gpu: GpuRates) -> list[str]:
    """The modes whose products a GPU has."""
    names = ["fp8_tensorwise"] + ["fp8_rowwise", "fp8_rowwise_hp"] * gpu.row_scales
    return names + ["mxfp8"] * gpu.block_scales + ["nvfp4"] * (gpu.nvfp4 is not None)


def predicted_us(shape: Shape, name: str | None, gpu: GpuRates) -> float:
    """Microseconds of a layer's three products.

    Args:
        shape: of the layer.
        name: a mode of `formats_of(gpu)`; None for bfloat16.
        gpu: the rates.
    """
    m, k, n = shape
    # samples x in, out x in, samples x out: which two are factors, and which is the result
    x, weight, gradient = m * k, n * k, m * n
    products = [(x, weight, gradient), (gradient, weight, x), (gradient, x, weight)]
    formats = [name] * 3
    if name == "fp8_rowwise_hp":
        formats = ["fp8_rowwise", "fp8_rowwise", None]
    return sum(
        _product_us(2.0 * m * k * n, *sizes, form, gpu)
        for sizes, form in zip(products, formats, strict=True)
    )


def _product_us(
    operations: float, left: int, right: int, result: int, form: str | None, gpu: GpuRates
) -> float:
    bytes_per_us = gpu.bandwidth * 1e3 * BANDWIDTH_SHARE
    rate = gpu.bfloat16 if form is None else gpu.float8
    if form == "nvfp4" and gpu.nvfp4 is not None:
        rate = gpu.nvfp4
    stored = 2.0 if form is None else STORED[form]
    traffic_us = ((left + right) * stored + 2 * result) / bytes_per_us
    product_us = max(operations / (rate * 1e6 * MATMUL_SHARE), traffic_us) + LAUNCH_US
    if form is None:
        return product_us
    rounding = ROUNDING[form]
    rounding_us = (left + right) * rounding.bytes / bytes_per_us
    return product_us + rounding_us + 2 * rounding.launches * LAUNCH_US


def predicted(
    shapes: Mapping[Shape, list[str]], gpu: GpuRates, converted: Iterable[str]
) -> FormatGains:
    """The gains of a GPU that is not at hand.

    Args:
        shapes: of the recipe's linear layers, to their names.
        gpu: its rates.
        converted: the layers that a mode converts, which the sum is over.
    """

    def time_us(shape: Shape, name: str | None) -> float:
        return predicted_us(shape, name, gpu)

    basis = (
        f"published dense rates: bfloat16 {gpu.bfloat16:,.0f}, float8 {gpu.float8:,.0f} TFLOP/s, "
        f"{gpu.bandwidth:,.0f} GB/s; {MATMUL_SHARE:.0%} and {BANDWIDTH_SHARE:.0%} of them reached, "
        f"{LAUNCH_US:g} us a launch"
    )
    found = _gains(shapes, formats_of(gpu), time_us)
    speedup = _speedup(found, {*converted})
    return FormatGains(gpu=gpu.name, source="predicted", basis=basis, shapes=found, speedup=speedup)


def measured(
    shapes: Mapping[Shape, list[str]], device: torch.device, converted: Iterable[str]
) -> FormatGains | None:
    """The gains on this device; None where it multiplies none of the formats."""
    formats = [name for name in RECIPES if why_not_native(name, device) is None]
    if not formats:
        return None

    def time_us(shape: Shape, name: str | None) -> float:
        return layer_us(shape, name, device)

    found = _gains(shapes, formats, time_us)
    return FormatGains(
        gpu=torch.cuda.get_device_name(device),
        source="measured",
        basis="one layer at a time, compiled, forward and backward, the fastest of 20 passes",
        shapes=found,
        speedup=_speedup(found, {*converted}),
    )


PASSES = 20


def layer_us(shape: Shape, name: str | None, device: torch.device, native: bool = True) -> float:
    """Microseconds of a forward and a backward pass of a bfloat16 `nn.Linear`, the fastest.

    Args:
        shape: of the layer.
        name: a key of `RECIPES`, in whose products it is converted; None for bfloat16.
        device: where.
        native: compiled, with the device's units; else torchao's emulation, as it is.
    """
    layer = nn.Linear(shape.in_features, shape.out_features, bias=False)
    model: nn.Module = nn.Sequential(layer).to(device, torch.bfloat16)
    if name is not None:
        convert_natively(model, ["0"], name, emulate=not native)
    forward: Callable[..., torch.Tensor] = torch.compile(model) if native else model
    x = torch.randn(
        shape.samples, shape.in_features, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    gradient = torch.randn(shape.samples, shape.out_features, device=device, dtype=torch.bfloat16)

    def step() -> None:
        forward(x).backward(gradient)

    timer = warm(step, device)
    return min(timer.time_s() for _ in range(PASSES)) * 1e6


def _gains(
    shapes: Mapping[Shape, list[str]],
    formats: list[str],
    time_us: Callable[[Shape, str | None], float],
) -> list[LayerGains]:
    rows = []
    for shape, names in shapes.items():
        base = time_us(shape, None)
        gains = []
        for name in formats:
            us = time_us(shape, name)
            pays = base / us >= PAYS_FROM
            gains.append(LayerGain(format=name, us=us, speedup=base / us, pays=pays))
        rows.append(LayerGains(layers=names, **shape._asdict(), bfloat16_us=base, gains=gains))
    return rows


def _speedup(rows: list[LayerGains], converted: set[str]) -> dict[str, float]:
    """Of the converted layers together."""
    base, times = 0.0, dict[str, float]()
    for row in rows:
        count = len(converted.intersection(row.layers))
        base += count * row.bfloat16_us
        for gain in row.gains:
            times[gain.format] = times.get(gain.format, 0.0) + count * gain.us
    return {name: base / us for name, us in times.items() if us}
