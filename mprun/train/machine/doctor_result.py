"""The results of `mprun doctor` on a machine: the content of its JSON, and its tables. No torch.

Names and meanings are fixed; `SCHEMA_VERSION` moves when one changes, not when a field is added.
What the system does not report is null, never a guess. docs/reference/doctor.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from mprun.records.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.console.formatting import counted, significant, size_text
from mprun.records.mode_names import SHORT_DTYPES
from mprun.records.policy_columns import Number
from mprun.records.run_record import Hardware, StepTimes

SCHEMA_VERSION = 3  # 3: rates are of matmuls alone

Format = Literal["float64", "float32", "tf32", "bfloat16", "float16"]
GpuUnused = Literal["cpu asked for", "no cuda in torch", "not usable"]
SpeedVerdict = Literal["worth trying", "no gain", "not for speed", "not known"]

FORMATS: tuple[Format, ...] = ("float32", "tf32", "bfloat16", "float16", "float64")


@dataclass
class DoctorSettings:
    """How a machine is examined."""

    json: bool = False
    """Whether one JSON object is printed instead of tables."""
    budget_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """About how many seconds rates are measured; at least six rounds are made."""
    steps: Number = 40
    """Steps of a recipe that are timed; 0: none, its least time is computed from counts alone."""


@dataclass(kw_only=True)
class Spread:
    """A quantity measured several times."""

    median: float
    p10: float
    p90: float
    n: int


@dataclass(kw_only=True)
class Ratio:
    """A speed-up, measured round by round."""

    median: float
    low: float
    high: float  # The median's 95 % interval is from `low` to `high`
    n: int


@dataclass(kw_only=True)
class Rate:
    """The speed of a matmul in one number format, at one size."""

    format: Format
    size: str
    flops: int  # Multiplications and additions of a call
    time_ms: Spread  # Of a call
    gflops: Spread  # 10^9 operations a second
    speedup: Ratio  # Over float32, same size


@dataclass(kw_only=True)
class OneDnn:
    """The library that computes matmuls and convolutions on CPUs."""

    version: str | None
    bfloat16: bool | None
    """Whether PyTorch passes it bfloat16 here; if not, PyTorch computes in its own loops."""
    float16: bool | None


@dataclass(kw_only=True)
class Cuda:
    """A GPU."""

    compute_capability: str
    tensor_cores: list[str] | None  # Formats its matrix units take; null if it is not NVIDIA's
    multiprocessors: int
    memory_free_bytes: int


@dataclass(kw_only=True)
class Machine:
    """Facts that need no measurement, except `hardware.accelerated`, which is measured."""

    system: str
    architecture: str
    hardware: Hardware  # The same as in the record of a run, with both 16-bit dtypes
    cores_total: int | None
    """Cores of the whole machine; `hardware.cores` are those this process may use."""
    cpu_quota: float | None  # How many cores' time a container may use; null without a limit
    threads: int  # PyTorch's threads in a run
    load_average: float | None  # Of the machine, over the minute before measuring
    instructions: dict[str, bool | None]
    """The instruction sets that matter for number formats; null if it is not known."""
    cpu_capability: str  # The vector instructions PyTorch's own CPU kernels use
    onednn: OneDnn
    variables: dict[str, str]  # Those set of the environment variables that change speed
    cuda: Cuda | None  # The GPU examined
    gpu_unused: GpuUnused | None
    """Why a GPU that seems to be present is not examined; null if none seems to be."""
    optimizer_kernels: str | None = None
    """Where the CPU kernels of optimizers and of rounding come from, or why there are none."""
    compiled_code: str | None = None
    """The folders in which PyTorch's compiler and Triton keep what they compiled."""


@dataclass(kw_only=True)
class Mode:
    """A precision mode on this machine."""

    name: str
    format: Format  # Of its matmuls
    execution: Literal["native", "emulated"]
    why_emulated: str | None
    accelerated: bool | None  # As in `hardware`, for native 16-bit modes; null for others
    substituted: list[str]  # Ops that a run computes in float32 and rounds (`speed=auto`)
    loss_scale: str  # The kind of `loss_scale=auto`
    products_of_8_bits: bool = False
    """Its native matmuls have factors of 8 bits: their rate is not among the measured ones."""


@dataclass(kw_only=True)
class MachineFinding:
    """A fact that affects timed runs on this machine."""

    level: Literal["warning", "note"]
    about: str
    text: str


@dataclass(kw_only=True)
class Conclusion:
    """The use of the modes of one format on this machine."""

    format: Format
    modes: list[str]
    verdict: SpeedVerdict
    text: str


# ---- a recipe's step: its share of the roof, and whether formats of 8 bits pay -------------------


@dataclass(kw_only=True)
class Roofline:
    """The least time of a step's products, and the share of the step that it is."""

    recipe: str
    precision: str
    variant: str
    execution: str  # native or emulated
    batch_size: int
    flops: int  # Multiplications and additions of a step
    gflops: dict[str, float]
    """The mode's number format to its best measured rate, 10^9 operations a second."""
    least_ms: float  # The FLOPs over the rate
    step_time_ms: StepTimes
    share: float | None  # `least_ms` over the median step; null where no step was timed
    notes: list[str]  # What limits the figures, a sentence each


PAYS_FROM = 1.05  # a smaller gain is within the noise of a step, and no reason to risk accuracy
NO_LAYERS = (
    "formats of 8 bits or fewer: the step calls no linear layer whose features are multiples of 16"
)
NO_UNITS = "formats of 8 bits or fewer: none pays here, {}"


class Shape(NamedTuple):
    """A linear layer's forward pass."""

    samples: int
    in_features: int
    out_features: int


@dataclass(kw_only=True)
class LayerGain:
    """A layer's three products in a format, with the rounding of their factors."""

    format: str  # The mode that has it
    us: float  # Microseconds of forward and backward pass
    speedup: float  # bfloat16's time over it
    pays: bool  # Whether the speedup is at least `PAYS_FROM`


@dataclass(kw_only=True)
class LayerGains:
    """Layers of one shape."""

    layers: list[str]  # Their names
    samples: int  # Rows of the input: samples of a micro-batch times the positions of each
    in_features: int
    out_features: int
    bfloat16_us: float  # Microseconds of the three products of one layer
    gains: list[LayerGain]


@dataclass(kw_only=True)
class FormatGains:
    """The formats that a GPU multiplies, for each shape of a recipe's linear layers."""

    gpu: str
    basis: str  # What it was measured with
    shapes: list[LayerGains]
    speedup: dict[str, float]  # Format to that of all layers that a mode converts, summed over them


@dataclass(kw_only=True)
class Examination:
    """The whole result of `mprun doctor`."""

    machine: Machine
    versions: dict[str, str | None]
    """Those of a record, and of cuda and cudnn; null for a missing one."""
    threads: int  # Threads of the CPU rates: fewer than PyTorch's if other processes use the cores
    rates: list[Rate]
    modes: list[Mode]
    schema_version: int
    examined_at: str
    mprun_version: str
    git_commit: str | None
    budget_s: float
    measured_s: float  # How long the rates took
    findings: list[MachineFinding] = field(default_factory=list)
    conclusions: list[Conclusion] = field(default_factory=list)
    roofline: Roofline | None = None  # Of a recipe's step, where a recipe was named
    formats: list[FormatGains] | None = None
    """Whether formats of 8 bits or fewer pay for a recipe's linear layers; null without a recipe,
    empty where the device multiplies none."""


# ---- the tables of the machine -------------------------------------------------------------------


TERA = 10_000  # From this many GFLOP/s, rates are shown in TFLOP/s

ELSEWHERE = "the output of doctor.json=true"


def renderables(examination: Examination) -> Iterator[FittedTable | str]:
    """The parts in the order they are shown."""
    yield machine_table(examination)
    on_cpu = examination.machine.cuda is None
    yield rates_table(examination.rates, examination.threads if on_cpu else None)
    yield modes_table(examination.modes, examination.rates)
    for finding in examination.findings:
        yield f"{finding.level}: {finding.text}"
    yield "what the modes are good for here:"
    for conclusion in examination.conclusions:
        yield f"  {conclusion.text}"


def machine_table(examination: Examination) -> FittedTable:
    """A row for each property of the machine."""
    machine, hardware = examination.machine, examination.machine.hardware
    load, fault_us, cuda = machine.load_average, hardware.page_fault_us, machine.cuda
    rows = {
        "device": f"{hardware.device}, {hardware.name}",
        "system": f"{machine.system}, {machine.architecture}",
        "memory": _size(hardware.memory_bytes),
        "cores": _cores(machine),
        "page fault": "-" if fault_us is None else f"{fault_us:.2f} us",
        "load before": "unknown" if load is None else f"{load:.2f}",
        "CPU instructions": _instructions(machine),
        "oneDNN": _onednn(machine.onednn),
        "optimizer kernels": machine.optimizer_kernels or "-",
        "compiled code": machine.compiled_code or "-",
    }
    if cuda is not None:
        units = cuda.tensor_cores
        rows["GPU"] = (
            f"compute capability {cuda.compute_capability}, {cuda.multiprocessors} "
            f"multiprocessors, {_size(cuda.memory_free_bytes)} free"
        )
        rows["tensor cores"] = "unknown" if units is None else ", ".join(units) or "none"
    versions = {"mprun": examination.mprun_version, **examination.versions}
    rows |= {
        "environment": ", ".join(f"{k}={v}" for k, v in machine.variables.items()) or "-",
        "faster than float32": f"{_yes_no(hardware.accelerated)} (as runs record it)",
        "versions": ", ".join(f"{name} {version or '-'}" for name, version in versions.items()),
        "examined": f"{examination.examined_at}, rates in {examination.measured_s:.1f} s",
    }
    return FittedTable(
        "machine",
        text_column("property", cell=itemgetter(0)),
        text_column("value", cell=itemgetter(1)),
        rows=rows.items(),
    )


def rates_table(rates: Sequence[Rate], threads: int | None) -> FittedTable:
    """Medians by size and format, with percentiles; `threads` is None for a GPU."""
    by = "" if threads is None else f" in {counted(threads, 'thread')}"
    unit, factor = "GFLOP/s", 1
    if max(r.gflops.median for r in rates) >= TERA:
        unit, factor = "TFLOP/s", 1000
    return FittedTable(
        f"measured rates of matmuls{by}: median (10th-90th percentile)",
        text_column("size", cell=lambda rate: rate.size),
        text_column("in", cell=lambda rate: SHORT_DTYPES.get(rate.format, rate.format)),
        figure_column(unit, cell=lambda rate: _spread(rate.gflops, factor)),
        figure_column("over fp32", cell=_speedup),
        figure_column("n", 1, lambda rate: str(rate.gflops.n)),
        rows=rates,
        elsewhere=ELSEWHERE,
        caption="over fp32: median [its 95 % interval], round by round",
    )


def modes_table(modes: Sequence[Mode], rates: Sequence[Rate]) -> FittedTable:
    """A row for each mode: how it runs here, and its matmul's rate over float32's."""
    speedups = {r.format: r.speedup.median for r in rates}  # the larger size last

    def matmul(mode: Mode) -> str:
        if mode.execution != "native" or mode.products_of_8_bits:
            return "-"
        if mode.format == "float32":
            return "1"
        if "matmul" in mode.substituted:
            return "in float32"
        return _figure(speedups[mode.format]) if mode.format in speedups else "-"

    return FittedTable(
        "precision modes: rates over float32's, at the largest size measured",
        text_column("mode", cell=lambda mode: mode.name),
        text_column("runs", cell=lambda mode: mode.execution),
        figure_column("matmul", cell=matmul),
        text_column("loss scale", 1, cell=lambda mode: mode.loss_scale),
        rows=modes,
        elsewhere=ELSEWHERE,
    )


def _figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{digits}f}"


def _spread(spread: Spread, unit: float = 1) -> str:
    values = (spread.median, spread.p10, spread.p90)
    median, low, high = (_figure(value / unit) for value in values)
    return f"{median} ({low}-{high})"


def _speedup(rate: Rate) -> str:
    if rate.format == "float32":
        return "1"
    ratio = rate.speedup
    return f"{_figure(ratio.median)} [{_figure(ratio.low)}-{_figure(ratio.high)}]"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size_text(nbytes)


def _yes_no(has: Mapping[str, bool | None]) -> str:
    texts = {True: "yes", False: "no", None: "unknown"}
    return ", ".join(f"{name} {texts[value]}" for name, value in has.items())


def _cores(machine: Machine) -> str:
    total = machine.cores_total
    text = f"{machine.hardware.cores} usable of {'unknown' if total is None else total}"
    if machine.cpu_quota is not None:
        text += f", of which {machine.cpu_quota:g} by the container's quota"
    return f"{text}; threads by default {machine.threads}"


def _instructions(machine: Machine) -> str:
    names = _yes_no(machine.instructions) or "unknown on this architecture"
    return f"{names}; PyTorch's own kernels: {machine.cpu_capability}"


def _onednn(onednn: OneDnn) -> str:
    taken = _yes_no({"bfloat16": onednn.bfloat16, "float16": onednn.float16})
    return f"{onednn.version or 'unknown version'}; takes {taken}"


# ---- the tables of a recipe ----------------------------------------------------------------------


def roofline_parts(roof: Roofline) -> Iterator[str]:
    """The bound and the share of it that is reached, and what limits them."""
    rates = ", ".join(f"{rate:,.0f} GFLOP/s ({name})" for name, rate in roof.gflops.items())
    least = f"at least {significant(roof.least_ms)} ms, for {roof.flops / 1e9:.3g} GFLOP at {rates}"
    times, reached = roof.step_time_ms, ""
    if times.median is not None and roof.share is not None:
        spread = f"median of {times.n} steps, 80 % of them {significant(times.p10)} to "
        reached = f"; here {significant(times.median)} ms ({spread}{significant(times.p90)}), "
        reached += f"{100 * roof.share:.0f} % of the roof"
    yield f"{roof.recipe}, {roof.variant}, batch {roof.batch_size}: a step takes {least}{reached}"
    yield from roof.notes


def format_parts(gains: FormatGains) -> Iterator[FittedTable | str]:
    """The table, and a sentence for each format."""
    yield FittedTable(
        f"linear layers on {gains.gpu}: speedup over bfloat16",
        text_column("layer", cell=lambda row: row.layers[0] or "(model)"),
        figure_column("number", 3, lambda row: str(len(row.layers))),
        figure_column("samples", 2, lambda row: f"{row.samples:,}"),
        figure_column("in", cell=lambda row: f"{row.in_features:,}"),
        figure_column("out", cell=lambda row: f"{row.out_features:,}"),
        figure_column("bfloat16 us", cell=lambda row: f"{row.bfloat16_us:.3g}"),
        *(
            figure_column(gain.format, cell=lambda row, n=n: f"{row.gains[n].speedup:.2f}x")  # type: ignore[misc]
            for n, gain in enumerate(gains.shapes[0].gains)
        ),
        rows=gains.shapes,
        elsewhere=ELSEWHERE,
        caption=f"forward, backward and rounding of one layer; {gains.basis}",
    )
    yield from format_verdicts(gains)


def format_verdicts(gains: FormatGains) -> Iterator[str]:
    """A sentence for each format: for how many layers it pays, and what that makes of all."""
    layers = sum(len(row.layers) for row in gains.shapes)
    for n, gain in enumerate(gains.shapes[0].gains):
        paying = sum(len(row.layers) for row in gains.shapes if row.gains[n].pays)
        text = (
            f"{gain.format} pays for {paying} of {layers} linear layers on {gains.gpu} "
            f"(at least {PAYS_FROM:g} times as fast)"
        )
        if (whole := gains.speedup.get(gain.format)) is not None:
            text += (
                f"; precision={gain.format} makes the layers that it converts {whole:.2f} times as "
                "fast"
            )
        yield text
