"""The results of `mprun doctor` on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.doctor_record import (
    Cuda,
    Examination,
    Format,
    Machine,
    Mode,
    OpName,
    Rate,
    Ratio,
    Spread,
)
from mprun.records.format_names import SHORT_DTYPES

OP_NAMES: dict[OpName, str] = {
    "matmul": "matmul",
    "convolution": "conv",
    "convolution_backward": "conv backward",
}

TERA = 10_000
"""From this many GFLOP/s, rates are shown in TFLOP/s."""

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
    table = FittedTable("machine", text_column("property"), text_column("value"))
    machine, copy = examination.machine, examination.copy
    hardware, load = machine.hardware, machine.load_average
    rows = {
        "device": f"{hardware.device}, {hardware.name}",
        "system": f"{machine.system}, {machine.architecture}",
        "memory": _gibibytes(hardware.memory_bytes),
        "cores": _cores(machine),
        "page fault": _page_fault(hardware.page_fault_us),
        "load before": "unknown" if load is None else f"{load:.2f}",
        "CPU instructions": _instructions(machine),
        "oneDNN": _onednn(machine),
        "optimizer kernels": machine.optimizer_kernels or "-",
        **_gpu(machine.cuda),
        "environment": ", ".join(f"{k}={v}" for k, v in machine.variables.items()) or "-",
        "faster than float32": f"{_yes_no(hardware.accelerated)} (as runs record it)",
        "copying memory": f"{_spread(copy.gigabytes_per_second)} GB/s, "
        f"{copy.bytes / 2**20:.0f} MiB",
        "versions": _versions(examination),
        "examined": f"{examination.examined_at}, rates in {examination.measured_s:.1f} s",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def _page_fault(price_us: float | None) -> str:
    return "-" if price_us is None else f"{price_us:.2f} us"


def rates_table(rates: Sequence[Rate], threads: int | None) -> FittedTable:
    """Medians by op, size and format, with percentiles; `threads` is None for a GPU."""
    by = "" if threads is None else f" in {threads} thread{'s' if threads > 1 else ''}"
    is_tera = max(r.gflops.median for r in rates) >= TERA
    table = FittedTable(
        f"measured rates{by}: median (10th-90th percentile)",
        text_column("op"),
        text_column("in"),
        figure_column("TFLOP/s" if is_tera else "GFLOP/s"),
        figure_column("over fp32"),
        figure_column("n", 1),
        elsewhere=ELSEWHERE,
    )
    table.caption = "over fp32: median [its 95 % interval], round by round; 3x3 convolutions"
    previous = ""
    for rate in sorted(rates, key=lambda r: list(OP_NAMES).index(r.op)):
        name = f"{OP_NAMES[rate.op]} {rate.size.partition(',')[0]}"
        base = rate.format == "float32"
        table.add_row(
            "" if name == previous else name,
            SHORT_DTYPES.get(rate.format, rate.format),
            _spread(rate.gflops, 1000 if is_tera else 1),
            "1" if base else _ratio(rate.speedup),
            str(rate.gflops.n),
        )
        previous = name
    return table


def modes_table(modes: Sequence[Mode], rates: Sequence[Rate]) -> FittedTable:
    """A row for each mode: how it runs here, and its ops' rates over float32's."""
    table = FittedTable(
        "precision modes: rates over float32's, at the largest size measured",
        text_column("mode"),
        text_column("runs"),
        *(figure_column(name) for name in OP_NAMES.values()),
        text_column("loss scale", 1),
        elsewhere=ELSEWHERE,
    )
    speedups = {(r.op, r.format): r.speedup.median for r in rates}  # larger ones later
    for mode in modes:
        native = mode.execution == "native"
        cells = [_cell(mode, op, speedups) if native else "-" for op in OP_NAMES]
        table.add_row(mode.name, mode.execution, *cells, mode.loss_scale)
    return table


def _cell(mode: Mode, op: OpName, speedups: Mapping[tuple[OpName, Format], float]) -> str:
    if mode.format == "float32":
        return "1"
    if op in mode.substituted:
        return "in float32"
    if op == "matmul" and mode.products_of_8_bits:
        return "-"
    speedup = speedups.get((op, mode.format))
    return "-" if speedup is None else _figure(speedup)


def _figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{digits}f}"


def _spread(spread: Spread, unit: float = 1) -> str:
    values = (spread.median, spread.p10, spread.p90)
    median, low, high = (_figure(value / unit) for value in values)
    return f"{median} ({low}-{high})"


def _ratio(ratio: Ratio) -> str:
    low, high = _figure(ratio.low), _figure(ratio.high)
    return f"{_figure(ratio.median)} [{low}-{high}]"


def _gibibytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 2**30:.1f} GiB"


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


def _onednn(machine: Machine) -> str:
    onednn = machine.onednn
    taken = _yes_no({"bfloat16": onednn.bfloat16, "float16": onednn.float16})
    limit = f", {onednn.limit_by}={onednn.limit}" if onednn.limit else ""
    return f"{onednn.version or 'unknown version'}; takes {taken}{limit}"


def _gpu(cuda: Cuda | None) -> dict[str, str]:
    if cuda is None:
        return {}
    units = cuda.tensor_cores
    return {
        "GPU": f"compute capability {cuda.compute_capability}, "
        f"{cuda.multiprocessors} multiprocessors, "
        f"{_gibibytes(cuda.memory_free_bytes)} free",
        "tensor cores": "unknown" if units is None else ", ".join(units) or "none",
    }


def _versions(examination: Examination) -> str:
    versions = {"mprun": examination.mprun_version, **examination.versions}
    return ", ".join(f"{name} {version or '-'}" for name, version in versions.items())
