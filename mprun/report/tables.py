"""What is printed before a run and after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mprun.compare import substitutions
from mprun.records.run_record import PrecisionRow, Scores, Summary


def header(summary: Summary) -> list[str]:
    """What is about to run, in lines: mode and dtypes, data, batch, device, backend."""
    row, data, batch = summary.effective, summary.data, summary.batch
    hardware, backend = summary.hardware, summary.backend
    return [
        f"recipe {summary.recipe}, precision {summary.precision} "
        f"({summary.execution}), seed {summary.seed}",
        f"policy: {policy(row)}",
        f"data: {data_text(summary)}: {data.train_samples} training, "
        f"{data.validation_samples} validation, {data.test_samples} test samples",
        f"batch: {batch.micro} x {batch.accumulate} = {batch.effective}",
        f"device: {hardware.device}, {hardware.name}, {backend.threads} threads; "
        f"{backend.memory_format}, {backend.optimizer_impl} optimizer",
    ]


def policy(row: PrecisionRow) -> str:
    """A policy's dtypes in words (Keras: variable dtype and compute dtype)."""
    text = (
        f"parameters {row.param_dtype}, compute {row.compute_dtype}, "
        f"output {row.output_dtype}, casting {row.casting}"
    )
    of = {"update": "updates", "all": "every result"}[row.rounding_scope]
    unusual = {
        ", tf32": row.tf32,
        f", gradients {row.accum_dtype}": row.param_dtype != "float32",
        f", momentum {row.momentum_dtype}": row.momentum_dtype != "float32",
        f", variance {row.variance_dtype}": row.variance_dtype != "float32",
        f", partials {row.partials_dtype}": row.partials_dtype != "float32",
        f", {row.rounding} rounding of {of}": row.rounding != "nearest",
        ", saturating": row.overflow == "saturate",
    }
    return text + "".join(words for words, shown in unusual.items() if shown)


def layers(rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """The dtypes of a model's layers: name, kind, parameters, computation."""
    table = Table(title="layers", title_justify="left")
    for column in ("module", "kind", "parameters", "computes in"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    return table


def data_text(summary: Summary) -> str:
    """The data's name and source; generated data is never shown without the word."""
    data = summary.data
    return f"{data.name} ({data.source})"


def result(summary: Summary) -> Table:
    """The final table of one run."""
    table = Table(title=f"{summary.recipe} in {summary.variant}", title_justify="left")
    table.add_column("what")
    table.add_column("figure")
    for what, figure in _rows(summary):
        table.add_row(what, figure)
    return table


def _rows(summary: Summary) -> list[tuple[str, str]]:
    step, wait = summary.step_time_ms, summary.data_time_ms
    rows = [
        ("status", summary.status),
        ("data", data_text(summary)),
        ("steps", f"{summary.steps} ({summary.skipped_steps} skipped)"),
        ("step time", _step_time(summary)),
        ("data wait", "-" if wait.median is None else f"{wait.median:.2f} ms"),
        ("throughput", _figure(summary.samples_per_second, ".0f", " samples/s")),
        ("peak memory of a step", _mebibytes(summary.memory_bytes.peak)),
        *_fp_exceptions(summary),
        ("training loss", _figure(summary.train.loss, ".4f")),
        *_scores("validation", summary.history[-1].validation if summary.history else None),
        *_scores("test", summary.test),
        ("wall time", f"{summary.wall_time_s:.1f} s"),
    ]
    if step.median is None:
        few = "too few full-size steps to time: all were warm-up"
        watched = "steps are not timed while debug.fp_exceptions slows them"
        rows.append(("note", watched if summary.fp_exceptions else few))
    return rows


def _fp_exceptions(summary: Summary) -> list[tuple[str, str]]:
    row = summary.fp_exceptions
    if row is None:
        return []
    dropped = f"; {row.dropped_steps} steps dropped" if row.dropped_steps else ""
    counts = f"{row.finding} findings, {row.expected} expected, {row.absorbed} absorbed"
    return [("fp exceptions", counts + dropped)]


def _step_time(summary: Summary) -> str:
    step = summary.step_time_ms
    if step.median is None:
        return "-"
    text = (
        f"{step.median:.2f} ms median, {step.p10:.2f} to {step.p90:.2f} (p10 to p90), "
        f"n={step.n}, {step.warmup} warm-up"
    )
    if summary.execution == "emulated":
        return f"{text}, EMULATED: not comparable"
    return ", ".join(filter(None, (text, substitutions.label([summary]))))


def _scores(name: str, scores: Scores | None) -> list[tuple[str, str]]:
    if scores is None or scores.loss is None:
        return []
    rows = [(f"{name} loss", _figure(scores.loss, ".4f"))]
    if scores.accuracy is not None:
        rows.append((f"{name} accuracy", f"{scores.accuracy:.4f}"))
    return rows


def _figure(value: object, form: str, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{float(str(value)):{form}}{unit}"


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f} MiB"


def sweep_table(folder: Path, summaries: Mapping[str, Summary | None]) -> Table:
    """A row for each run of a sweep; None for one that ended before it had a record."""
    table = Table(title=f"sweep in {folder}", title_justify="left")
    for column in ("run", "recipe", "variant", "seed", "data", "step time", "result", "status"):
        table.add_column(column)
    for name, summary in summaries.items():
        table.add_row(name, *(_sweep_row(summary) if summary else [*["-"] * 6, "failed"]))
    return table


def _sweep_row(summary: Summary) -> list[str]:
    median = summary.step_time_ms.median
    emulated = summary.execution == "emulated"
    mark = "EMULATED" if emulated else substitutions.label([summary])
    return [
        summary.recipe,
        summary.variant,
        str(summary.seed),
        summary.data.source,
        _figure(median, ".2f", " ".join(filter(None, (" ms", mark)))),
        _result(summary),
        summary.status,
    ]


def _result(summary: Summary) -> str:
    """The figure a run is judged by; a recipe without a test set has its training loss."""
    test = summary.test
    if test.accuracy is not None:
        return f"accuracy {test.accuracy:.4f}"
    loss = test.loss if test.loss is not None else summary.train.loss
    return f"loss {_figure(loss, '.4f')}"


class PatientConsole(Console):
    """A console whose reader may leave (`mprun ... | head`): the run goes on, unseen."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(console: Console, text: str) -> None:
    """Print a line as it is: not folded, no word coloured, no bracket taken for markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on standard error; of two that say a field has no effect, the last."""
    console = stderr_console()
    for warning in {text.partition(" has no effect")[0]: text for text in warnings}.values():
        say(console, f"warning: {warning}")


def stdout_console() -> Console:
    """Where results go; colour, width and NO_COLOR are rich's."""
    return PatientConsole()


def stderr_console() -> Console:
    """Where warnings and errors go."""
    return Console(stderr=True)
