"""What is shown of runs: the header before one, its results, and the runs of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mprun.records.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.console.formatting import counted, size_text, substitution_label
from mprun.records.policy_columns import WIDE_DTYPES
from mprun.records.run_record import (
    AveragedScores,
    Number,
    ParallelRow,
    PrecisionRow,
    Scores,
    StepTimes,
    Summary,
    backend_text,
)

MIN_SHARE = 0.005  # A smaller share of the wall time is not shown: it would be printed as 0


def header(summary: Summary) -> list[str]:
    """Lines about a run that starts: mode and dtypes, data, batch, device, backend."""
    data, batch = summary.data, summary.batch
    hardware, backend = summary.hardware, summary.backend
    return [
        f"recipe {summary.recipe}, precision {summary.precision} "
        f"({summary.execution}), seed {summary.seed}",
        f"policy: {policy(summary.effective)}",
        f"data: {data_text(summary)}: {_count(data.train_samples)} training, "
        f"{_count(data.validation_samples)} validation, {_count(data.test_samples)} test samples",
        f"batch: {batch.micro} x {batch.accumulate}{_times(summary.parallel)} = {batch.effective}",
        f"device: {hardware.device}, {hardware.name}, {counted(backend.threads, 'thread')}; "
        f"{backend_text(backend)}",
    ]


def _times(row: ParallelRow) -> str:
    return f" x {row.world_size} processes ({row.kind})" if row.world_size > 1 else ""


def _count(samples: int | None) -> str:
    """A number of samples, as shown; a stream has none."""
    return "a stream of" if samples is None else str(samples)


def policy(row: PrecisionRow) -> str:
    """A policy in a line, without the columns that are as in float32 training."""
    scope = {"update": "updates", "all": "every result"}[row.rounding_scope]
    unusual = {
        "tf32": row.tf32,
        f"gradients {row.accum_dtype}": row.param_dtype not in WIDE_DTYPES,
        f"momentum {row.momentum_dtype}": row.momentum_dtype not in WIDE_DTYPES,
        f"variance {row.variance_dtype}": row.variance_dtype not in WIDE_DTYPES,
        f"partials {row.partials_dtype}": row.has_low_partials,
        f"{row.rounding} rounding of {scope}": row.rounding != "nearest",
        "saturating": row.overflow == "saturate",
    }
    parts = [
        f"parameters {row.param_dtype}, compute {row.compute_dtype}, output {row.output_dtype}, "
        f"casting {row.casting}",
        *(text for text, is_shown in unusual.items() if is_shown),
    ]
    return ", ".join(parts)


def data_text(summary: Summary) -> str:
    """The data's name and source, so that generated data is recognised."""
    return f"{summary.data.name} ({summary.data.source})"


def layers(rows: Iterable[tuple[str, str, str, str]]) -> FittedTable:
    """The dtypes of a model's layers: name, kind, parameters, computation."""
    table = FittedTable(
        "layers",
        text_column("module"),
        text_column("kind", 1),
        text_column("parameters", 2),
        text_column("computes in"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def result(summary: Summary) -> FittedTable:
    """The final table of one run."""
    title = f"{summary.recipe} in {summary.variant}"
    table = FittedTable(title, text_column("quantity"), text_column("value"))
    step, wait_ms = summary.step_time_ms, summary.data_time_ms.median
    peak, mean = summary.memory_bytes.peak, summary.averaged
    # of the last epoch, whose mean loss is shown, if it was not finished
    seen = summary.history[-1].train.samples if summary.history else None
    cut_off = "" if seen is None else f" (epoch cut off after {seen:,} samples)"
    rows = {
        "status": summary.status,
        "data": data_text(summary),
        "steps": f"{summary.steps} ({summary.skipped_steps} skipped)",
        "step time": _step_time(summary, step),
        **_processes(summary.parallel),
        "data wait": _figure(wait_ms, ".2f", " ms"),
        "page faults per step": _figure(summary.page_faults_per_step, ",.0f"),
        "throughput": _figure(summary.samples_per_second, ".0f", " samples/s"),
        "peak memory of a step": "-" if peak is None else size_text(peak),
        **_fp_exceptions(summary),
        "training loss": _figure(summary.train.loss, ".4f") + cut_off,
        **(_scores("validation", summary.history[-1].validation, mean) if summary.history else {}),
        **_scores("test", summary.test, mean),
        "wall time": f"{summary.wall_time_s:.1f} s",
    }
    if step.median is None:
        rows["note"] = (
            "steps are not timed while debug.fp_exceptions slows them"
            if summary.fp_exceptions
            else "too few full-size steps to time: all were warm-up"
        )
    for row in rows.items():
        table.add_row(*row)
    return table


def _processes(row: ParallelRow) -> dict[str, str]:
    """How long the processes of a run computed, and what they spent on communication."""
    if row.world_size == 1:
        return {}
    text = f"{row.world_size} ({row.kind})"
    if row.fastest_ms is not None and row.slowest_ms is not None:
        text += f"; {row.fastest_ms:.2f} to {row.slowest_ms:.2f} ms a step without communication"
    if row.communication_share is not None:
        text += f", which takes {row.communication_share:.0%} of a step"
    return {"processes": text}


def _fp_exceptions(summary: Summary) -> dict[str, str]:
    row = summary.fp_exceptions
    if row is None:
        return {}
    dropped = f"; {row.dropped_steps} steps dropped" if row.dropped_steps else ""
    counts = f"{row.finding} findings, {row.expected} expected, {row.absorbed} absorbed"
    return {"fp exceptions": counts + dropped}


def _step_time(summary: Summary, step: StepTimes) -> str:
    if step.median is None:
        return "-"
    text = (
        f"{step.median:.2f} ms median, {step.p10:.2f} to {step.p90:.2f} (p10 to p90), n={step.n}"
        if step.n > 1
        else f"{step.median:.2f} ms, one step"
    )
    text += f", {step.warmup} warm-up"
    if summary.execution == "emulated":  # rounding in software takes most of the time
        return f"{text}, EMULATED: not comparable"
    return ", ".join(filter(None, (text, substitution_label([summary]))))


def _scores(name: str, scores: Scores, averaged: AveragedScores | None) -> dict[str, str]:
    """Scores by name: of the last weights, and in brackets of averaged ones, where there are."""
    part = "" if scores.samples is None else f" (PARTIAL: the first {scores.samples:,} samples)"
    beside = {} if averaged is None else getattr(averaged, name).named
    return {
        f"{name} {x}": f"{float(value):.4f}{part}"
        + (f" (averaged weights: {float(beside[x]):.4f})" if x in beside else "")
        for x, value in scores.named.items()
    }


def time_line(summary: Summary) -> str:
    """What the wall time was spent on, without what took less than half a percent of it."""
    wall_s, budget = summary.wall_time_s, summary.time_budget_s
    digits = 1 if wall_s >= 10 else 2
    total = f"time: {wall_s:.{digits}f} s"
    if budget is None:
        return total
    texts = [
        f"{name.replace('_', '-')} {seconds:.{digits}f}"
        for name, seconds in vars(budget).items()
        if seconds >= MIN_SHARE * wall_s and seconds > 0
    ]
    return f"{total} = {', '.join(texts)}" if texts else total


def _figure(value: Number | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{float(value):{form}}{unit}"


def closing(summary: Summary) -> list[FittedTable | str]:
    """What a run ends with: its table and its times."""
    return [result(summary), time_line(summary)]


def sweep_table(folder: Path, summaries: Mapping[str, Summary | None]) -> FittedTable:
    """A row for each run of a sweep; a run without a record has None."""
    table = FittedTable(
        f"sweep in {folder}",
        text_column("run", 4),
        text_column("recipe", 1),
        text_column("variant"),
        figure_column("seed", 5),
        text_column("data", 2),
        text_column("step time", 6),
        text_column("result"),
        text_column("status"),
        elsewhere="the summary.json of each run",
    )
    for name, summary in summaries.items():
        table.add_row(name, *(_sweep_row(summary) if summary else [*["-"] * 6, "failed"]))
    return table


def _sweep_row(summary: Summary) -> list[str]:
    emulated = summary.execution == "emulated"
    label = "EMULATED" if emulated else substitution_label([summary])
    return [
        summary.recipe,
        summary.variant,
        str(summary.seed),
        summary.data.source,
        _figure(summary.step_time_ms.median, ".2f", f" ms {label}".rstrip()),
        _result(summary),
        summary.status,
    ]


def _result(summary: Summary) -> str:
    """What the run is judged by, of the test; the training loss of a recipe without a test set."""
    test = summary.test
    part = "" if test.samples is None else f" (PARTIAL: {test.samples:,} samples)"
    if (value := test.value(summary.metric.name)) is not None:
        return f"{summary.metric.name} {float(value):.4f}{part}"
    return f"loss {_figure(summary.train.loss if test.loss is None else test.loss, '.4f')}{part}"
