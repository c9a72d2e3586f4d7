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

from mprun.precision.formats import E2M1, BlockFormat
from mprun.precision.gemms import (
    GEMMS,
    RECIPES,
    Gemm,
    LinearGemms,
    convert_natively,
    why_not_native,
)
from mprun.precision.rates import warm
from mprun.records.data_sheets import GpuRates
from mprun.results.estimates import PAYS_FROM, FormatGains, LayerGain, LayerGains

MATMUL_SHARE, BANDWIDTH_SHARE, LAUNCH_US = 0.75, 0.85, 4.0
"""Of the published rates, in large kernels; and the time of a launch, in microseconds."""
LARGE = 2**20
"""Numbers in a row whose scale takes no memory to speak of."""


class Shape(NamedTuple):
    """A linear layer's forward pass."""

    samples: int
    in_features: int
    out_features: int


def modes_of(gpu: GpuRates) -> list[str]:
    """The modes whose products a GPU has."""
    return [name for name, gemms in GEMMS.items() if all(_has(gpu, gemm) for gemm in gemms)]


def _has(gpu: GpuRates, gemm: Gemm) -> bool:
    return all(_rate(gpu, form) is not None for form in gemm.formats)


def _rate(gpu: GpuRates, form: BlockFormat) -> float | None:
    """10^12 operations a second of products of a format; None where a GPU has none."""
    if form.element == E2M1:
        return gpu.nvfp4
    if form.block == "row":
        return gpu.float8 if gpu.row_scales else None
    return gpu.float8 if form.block == "tensor" or gpu.block_scales else None


def predicted_us(shape: Shape, mode: str | None, gpu: GpuRates) -> float:
    """Microseconds of a layer's three products.

    Args:
        shape: of the layer.
        mode: one of `modes_of(gpu)`; None for bfloat16.
        gpu: the rates.
    """
    m, k, n = shape
    # samples x in, out x in, samples x out: which two are factors, and which is the result
    x, weight, gradient = m * k, n * k, m * n
    products = [(x, weight, gradient), (gradient, weight, x), (gradient, x, weight)]
    gemms = LinearGemms() if mode is None else GEMMS[mode]
    return sum(
        _product_us(2.0 * m * k * n, left, right, result, gemm, gpu)
        for (left, right, result), gemm in zip(products, gemms, strict=True)
    )


def _product_us(
    operations: float, left: int, right: int, result: int, gemm: Gemm, gpu: GpuRates
) -> float:
    bytes_per_us = gpu.bandwidth * 1e3 * BANDWIDTH_SHARE
    rates = [gpu.bfloat16 if form is None else _rate(gpu, form) for form in (gemm.left, gemm.right)]
    rate = min(rate for rate in rates if rate is not None)
    factors = [(left, gemm.left), (right, gemm.right)]
    read = sum(count * _stored_bytes(form) for count, form in factors)
    traffic_us = (read + 2 * result) / bytes_per_us
    rounding_us = sum(
        _rounding_us(n, form, bytes_per_us) for n, form in factors if form is not None
    )
    return max(operations / (rate * 1e6 * MATMUL_SHARE), traffic_us) + LAUNCH_US + rounding_us


def _stored_bytes(form: BlockFormat | None) -> float:
    """Bytes of each number of a factor; the scales of rows are few."""
    return 2.0 if form is None else form.bits_per_number(LARGE) / 8


def _rounding_us(count: int, form: BlockFormat, bytes_per_us: float) -> float:
    """Time to round a bfloat16 factor.

    A factor of the whole tensor needs its largest number first: a pass of its own.
    """
    passes = 2 if form.block == "tensor" or form.scale == "e4m3" else 1
    return count * (2 * passes + _stored_bytes(form)) / bytes_per_us + passes * LAUNCH_US


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
    found = _gains(shapes, modes_of(gpu), time_us)
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
