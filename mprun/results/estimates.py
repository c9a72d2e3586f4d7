"""Estimates from data sheets: formats of 8 bits on other GPUs, a step on several processes.

Parts of the record of `mprun doctor recipe=NAME`, their computation and their tables. No torch.

Does a format of 8 bits or fewer pay for a linear layer? It depends on the layer's size. A product
of M x K and K x N takes 2 M K N operations, which halve their time in 8 bits. Before it, both
factors are rounded, which takes traffic in proportion to M K + K N and a launch of a kernel or two.
So small layers become slower: below about 1,000 to 4,000 features on an H100.

    product     max(2 M K N / (rate of the format), bytes / bandwidth) + launch
    rounding    bytes read and written / bandwidth + launches, for both factors of each product

Products and copies reach the shares of published rates that large kernels reach. A compiler that
fuses the rounding with the op before does better, a loop that launches kernels late does worse. The
method is that of torchao's float8 roofline.

Processes that train one model form a ring. With n of them, an all-gather or a reduce-scatter of B
bytes sends (n - 1) / n x B from each process, and an all-reduce, which is one of each, twice as
much:

    DDP      2 (n - 1) / n x gradients                            once in a step
    FSDP2    (n - 1) / n x (2 x parameters + gradients)           for each micro-batch

Parameters have the dtype of the computation, gradients that of the reduction. How much of it runs
beside the computation depends on model and machine, so the answer is a range: from all, as far as
the computation is long enough, to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.policy_columns import FORMAT_MODES, HIGH
from mprun.results.memory_result import ParallelKind

ELSEWHERE = "the output of doctor.json=true"


# ---- formats of 8 bits or fewer ------------------------------------------------------------------

PAYS_FROM = 1.05
"""How many times as fast as bfloat16's the products must be, rounding included."""
MATMUL_SHARE, BANDWIDTH_SHARE, LAUNCH_US = 0.75, 0.85, 4.0
"""Of the published rates, in large kernels; and the time of a launch, in microseconds."""
NO_FORMATS = (
    "formats of 8 bits or fewer: the step calls no linear layer whose features are multiples of 16"
)


class RoundedFactor(NamedTuple):
    """A factor of a product, by what shares a scale."""

    bits: float
    """Of a number, its share of the scale included; scales of rows are few."""
    passes: int
    """Over the bfloat16 numbers, to round them: a scale of the whole tensor needs a pass first."""


FACTORS = {
    "bfloat16": RoundedFactor(16, 0),
    "tensor": RoundedFactor(8, 2),
    "row": RoundedFactor(8, 1),
    "block": RoundedFactor(8.25, 1),
    "nvfp4": RoundedFactor(4.5, 2),
}


class GpuRates(NamedTuple):
    """Published rates of a GPU, dense."""

    name: str
    gigabytes_per_second: float
    teraflops: dict[str, float]
    """Key of `FACTORS` to 10^12 operations a second, for those that its units multiply."""


GPUS = {
    "rtx4090": GpuRates("NVIDIA RTX 4090", 1008, {"bfloat16": 165, "tensor": 330}),
    "l40s": GpuRates("NVIDIA L40S", 864, {"bfloat16": 362, "tensor": 733}),
    "h100": GpuRates("NVIDIA H100 SXM", 3350, {"bfloat16": 989, "tensor": 1979, "row": 1979}),
    "h200": GpuRates("NVIDIA H200 SXM", 4800, {"bfloat16": 989, "tensor": 1979, "row": 1979}),
    "b200": GpuRates(
        "NVIDIA B200",
        8000,
        {"bfloat16": 2250, "tensor": 4500, "row": 4500, "block": 4500, "nvfp4": 9000},
    ),
    "mi300x": GpuRates("AMD MI300X", 5300, {"bfloat16": 1307, "tensor": 2615, "row": 2615}),
}


class Shape(NamedTuple):
    """A linear layer's forward pass."""

    samples: int
    in_features: int
    out_features: int


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


def modes_of(gpu: GpuRates) -> list[str]:
    """The modes whose products a GPU has."""
    return [
        mode
        for mode, products in FORMAT_MODES.items()
        if all(factor in gpu.teraflops for product in products for factor in product)
    ]


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
    sizes = [(x, weight, gradient), (gradient, weight, x), (gradient, x, weight)]
    bytes_per_us = gpu.gigabytes_per_second * 1e3 * BANDWIDTH_SHARE
    total_us = 0.0
    products = FORMAT_MODES.get(mode or "", [HIGH] * 3)
    for (*counts, result), names in zip(sizes, products, strict=True):
        factors = [(count, FACTORS[name]) for count, name in zip(counts, names, strict=True)]
        rate = min(gpu.teraflops[name] for name in names) * 1e6 * MATMUL_SHARE
        traffic = sum(count * factor.bits / 8 for count, factor in factors) + 2 * result
        total_us += max(2.0 * m * k * n / rate, traffic / bytes_per_us) + LAUNCH_US
        for count, (bits, passes) in factors:
            moved = count * (2 * passes + bits / 8) if passes else 0
            total_us += moved / bytes_per_us + passes * LAUNCH_US
    return total_us


def format_gains(
    shapes: Mapping[Shape, list[str]],
    formats: Sequence[str],
    converted: Collection[str],
    time_us: Callable[[Shape, str | None], float],
    **about: str,
) -> FormatGains:
    """The gains of formats, from the times of layers.

    Args:
        shapes: of the recipe's linear layers, to their names.
        formats: the modes.
        converted: the layers that a mode converts, which the sum is over.
        time_us: microseconds of a layer in a mode, or in bfloat16 (None).
        about: gpu, source and basis of a `FormatGains`.
    """
    rows, base, whole = [], 0.0, dict.fromkeys(formats, 0.0)
    for shape, names in shapes.items():
        count, own = len({*converted}.intersection(names)), time_us(shape, None)
        times = {name: time_us(shape, name) for name in formats}
        gains = [
            LayerGain(format=name, us=us, speedup=own / us, pays=own / us >= PAYS_FROM)
            for name, us in times.items()
        ]
        rows.append(LayerGains(layers=names, **shape._asdict(), bfloat16_us=own, gains=gains))
        base += count * own
        whole = {name: us + count * times[name] for name, us in whole.items()}
    speedup = {name: base / us for name, us in whole.items() if us}
    return FormatGains(shapes=rows, speedup=speedup, **about)  # type: ignore[arg-type]


def predicted(
    shapes: Mapping[Shape, list[str]], gpu: GpuRates, converted: Collection[str]
) -> FormatGains:
    """The gains of a GPU that is not at hand; arguments as those of `format_gains`."""
    rates = gpu.teraflops
    basis = (
        f"published dense rates: bfloat16 {rates['bfloat16']:,.0f}, float8 {rates['tensor']:,.0f} "
        f"TFLOP/s, {gpu.gigabytes_per_second:,.0f} GB/s; {MATMUL_SHARE:.0%} and "
        f"{BANDWIDTH_SHARE:.0%} of them reached, {LAUNCH_US:g} us a launch"
    )
    return format_gains(
        shapes,
        modes_of(gpu),
        converted,
        lambda shape, mode: predicted_us(shape, mode, gpu),
        gpu=gpu.name,
        source="predicted",
        basis=basis,
    )


def format_parts(found: FormatGains) -> Iterator[FittedTable | str]:
    """The table, and a sentence for each format."""
    yield FittedTable(
        f"linear layers on {found.gpu}, {found.source.upper()}: speedup over bfloat16",
        text_column("layer", cell=lambda row: row.layers[0] or "(model)"),
        figure_column("number", 3, lambda row: str(len(row.layers))),
        figure_column("samples", 2, lambda row: f"{row.samples:,}"),
        figure_column("in", cell=lambda row: f"{row.in_features:,}"),
        figure_column("out", cell=lambda row: f"{row.out_features:,}"),
        figure_column("bfloat16 us", cell=lambda row: f"{row.bfloat16_us:.3g}"),
        *(
            figure_column(gain.format, cell=lambda row, n=n: f"{row.gains[n].speedup:.2f}x")  # type: ignore[misc]
            for n, gain in enumerate(found.shapes[0].gains)
        ),
        rows=found.shapes,
        elsewhere=ELSEWHERE,
        caption=f"forward, backward and rounding of one layer; {found.basis}",
    )
    yield from verdicts(found)


def verdicts(found: FormatGains) -> Iterator[str]:
    """A sentence for each format: for how many layers it pays, and what that makes of all."""
    layers = sum(len(row.layers) for row in found.shapes)
    for n, gain in enumerate(found.shapes[0].gains):
        paying = sum(len(row.layers) for row in found.shapes if row.gains[n].pays)
        text = (
            f"{gain.format} pays for {paying} of {layers} linear layers on {found.gpu} "
            f"(at least {PAYS_FROM:g} times as fast), {found.source}"
        )
        if (whole := found.speedup.get(gain.format)) is not None:
            change = f"{whole:.2f} times as fast"
            if whole < 1:
                change = f"slower, by {1 / whole:.2f} times"
            text += f"; precision={gain.format} makes the layers that it converts {change}"
        yield text


# ---- several processes ---------------------------------------------------------------------------


class LinkBandwidth(NamedTuple):
    """A kind of link."""

    gigabytes_per_second: float
    """10^9 bytes a second, of one process in one direction, which is what a ring uses: half of the
    total that vendors state for both directions."""
    source: str
    """Who publishes it, and how it follows."""


_PCIE = "PCI-SIG, PCI Express Base Specification {}: {} GT/s x 16 lanes x 128/130 / 8"
_ETHERNET = "IEEE {}: {} Gbit/s / 8"
_INFINIBAND = "InfiniBand Trade Association, roadmap: {} Gbit/s of a 4x port / 8"
_NVLINK = "NVIDIA, data sheet of the {}: {} GB/s in both directions / 2"

LINK_BANDWIDTHS = {
    "nvlink3": LinkBandwidth(300.0, _NVLINK.format("A100 SXM", 600)),
    "nvlink4": LinkBandwidth(450.0, _NVLINK.format("H100 SXM", 900)),
    "nvlink5": LinkBandwidth(900.0, _NVLINK.format("HGX B200", 1800)),
    "pcie3": LinkBandwidth(15.754, _PCIE.format("3.0", 8)),
    "pcie4": LinkBandwidth(31.508, _PCIE.format("4.0", 16)),
    "pcie5": LinkBandwidth(63.015, _PCIE.format("5.0", 32)),
    "ethernet_1g": LinkBandwidth(0.125, _ETHERNET.format("802.3ab", 1)),
    "ethernet_10g": LinkBandwidth(1.25, _ETHERNET.format("802.3ae", 10)),
    "ethernet_25g": LinkBandwidth(3.125, _ETHERNET.format("802.3by", 25)),
    "ethernet_100g": LinkBandwidth(12.5, _ETHERNET.format("802.3ba", 100)),
    "ethernet_400g": LinkBandwidth(50.0, _ETHERNET.format("802.3bs", 400)),
    "infiniband_hdr": LinkBandwidth(25.0, _INFINIBAND.format(200)),
    "infiniband_ndr": LinkBandwidth(50.0, _INFINIBAND.format(400)),
    "infiniband_xdr": LinkBandwidth(100.0, _INFINIBAND.format(800)),
}
"""Name to bandwidth."""

ENOUGH = 0.2
"""The share of a sequential step that communication may take."""
ASSUMPTIONS = (
    "links reach their published rates, without latency; each process has a link of its own and "
    "computes as {compute} here; a ring sends {formula}; from full overlap of communication and "
    "computation to none"
)
COMPUTE = {"measured step": "measured", "least time": "fast as the roofline allows"}
FORMULAS: dict[ParallelKind, str] = {
    "ddp": "2(n-1)/n x gradients",
    "fsdp2": "(n-1)/n x (2 x parameters + gradients) for each micro-batch",
}


@dataclass(kw_only=True)
class LinkEstimate:
    """A step where all processes are connected by one kind of link."""

    link: str
    gigabytes_per_second: float
    """10^9 bytes a second, of a process in one direction."""
    source: str
    communication_ms: float
    overlapped_ms: float
    """A step whose communication runs beside the computation as far as possible."""
    sequential_ms: float
    """A step whose communication and computation run one after the other."""
    share: float
    """Of communication in the sequential step."""


@dataclass(kw_only=True)
class ScalingEstimate:
    """A step of each of several processes, each with its own batch."""

    estimate: bool = True
    """True: these times were computed, not measured."""
    world_size: int
    parallel: ParallelKind
    compute_ms: float
    compute_from: Literal["measured step", "least time"]
    """What `compute_ms` is: the median step measured here, or the roofline's least time."""
    gather_dtype: str | None
    """Of gathered parameters; null for ddp."""
    reduce_dtype: str
    """Of gradients that are averaged."""
    sent_bytes: int
    """What each process sends in a step."""
    links: list[LinkEstimate]
    enough_gigabytes_per_second: float
    """With this bandwidth, communication takes a fifth of a sequential step."""
    enough_link: str | None
    """The slowest link of the table that has it; null if none has."""
    assumptions: str


def sent_bytes(
    parallel: ParallelKind,
    world_size: int,
    parameter_bytes: int,
    gradient_bytes: int,
    micro_batches: int = 1,
) -> int:
    """Bytes that each process sends in a step.

    Args:
        parallel: how the processes share the step.
        world_size: their number n.
        parameter_bytes: of all parameters as they are gathered.
        gradient_bytes: of all gradients as they are reduced.
        micro_batches: of a step.
    """
    if parallel == "ddp":
        return 2 * (world_size - 1) * gradient_bytes // world_size
    gathered = 2 * parameter_bytes + gradient_bytes
    return micro_batches * (world_size - 1) * gathered // world_size


def estimate_scaling(
    *,
    parallel: ParallelKind,
    compute_ms: float,
    compute_from: Literal["measured step", "least time"],
    sent_bytes: int,
    links: Sequence[str],
    **about: object,
) -> ScalingEstimate:
    """The estimate for each of `links`, names in `LINK_BANDWIDTHS`.

    The other arguments are fields of `ScalingEstimate`; `about` has world_size, gather_dtype and
    reduce_dtype.
    """
    # share = c / (c + compute) = ENOUGH, for the time c of the communication
    enough = sent_bytes / 1e6 / (compute_ms * ENOUGH / (1 - ENOUGH))
    fast = {
        link.gigabytes_per_second: name
        for name, link in LINK_BANDWIDTHS.items()
        if link.gigabytes_per_second >= enough
    }
    return ScalingEstimate(
        parallel=parallel,
        compute_ms=compute_ms,
        compute_from=compute_from,
        sent_bytes=sent_bytes,
        links=[_link(name, sent_bytes, compute_ms) for name in dict.fromkeys(links)],
        enough_gigabytes_per_second=enough,
        enough_link=fast[min(fast)] if fast else None,
        assumptions=ASSUMPTIONS.format(compute=COMPUTE[compute_from], formula=FORMULAS[parallel]),
        **about,  # type: ignore[arg-type]
    )


def _link(name: str, nbytes: int, compute_ms: float) -> LinkEstimate:
    bandwidth, source = LINK_BANDWIDTHS[name]
    communication_ms = nbytes / (bandwidth * 1e6)
    sequential_ms = compute_ms + communication_ms
    return LinkEstimate(
        link=name,
        gigabytes_per_second=bandwidth,
        source=source,
        communication_ms=communication_ms,
        overlapped_ms=max(compute_ms, communication_ms),
        sequential_ms=sequential_ms,
        share=communication_ms / sequential_ms,
    )


def scaling_parts(scaling: ScalingEstimate) -> Iterator[FittedTable | str]:
    """The parts in the order they are shown."""

    def speedup(step_ms: float) -> str:
        return f"{scaling.world_size * scaling.compute_ms / step_ms:.3g}"

    yield FittedTable(
        f"ESTIMATE: a step on {scaling.world_size} processes, {scaling.parallel}",
        text_column("link", cell=lambda x: x.link),
        figure_column("GB/s", 3, lambda x: f"{x.gigabytes_per_second:.4g}"),
        figure_column("communication ms", cell=lambda x: f"{x.communication_ms:.3g}"),
        figure_column("share", 1, lambda x: f"{100 * x.share:.0f} %"),
        figure_column(
            "step ms", cell=lambda x: _between(f"{x.overlapped_ms:.3g}", f"{x.sequential_ms:.3g}")
        ),
        figure_column(
            "speedup", 2, lambda x: _between(speedup(x.sequential_ms), speedup(x.overlapped_ms))
        ),
        rows=scaling.links,
        elsewhere=ELSEWHERE,
    )
    dtypes = f"gradients in {scaling.reduce_dtype}"
    if scaling.gather_dtype is not None:
        dtypes = f"parameters in {scaling.gather_dtype}, {dtypes}"
    enough = scaling.enough_link or "no link of the table"
    yield (
        f"each process computes {scaling.compute_ms:.3g} ms ({scaling.compute_from}) and sends "
        f"{scaling.sent_bytes / 1e6:,.3g} MB a step ({dtypes}); without overlap, communication "
        f"takes less than 20 % of a step above {scaling.enough_gigabytes_per_second:.3g} GB/s "
        f"({enough})"
    )
    yield f"ESTIMATE, not measured: {scaling.assumptions}"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low}-{high}"
