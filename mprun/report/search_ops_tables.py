"""A search for ops on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mprun.records.run_record import number

MOST_ROWS = 20


def rows_table(found: Mapping[str, Any], what: str) -> Table:
    """What each op or module does, the most harmful first.

    Args:
        found: the content of search_ops.json.
        what: ops or modules.
    """
    low = SHORT[found["dtype"]]
    table = _table(f"{what}, one at a time")
    table.add_column(what.removesuffix("s"), overflow="fold")
    for column in ("calls", f"only it {low}: loss", "worst gradient", "", "all but it: loss"):
        table.add_column(column, justify="right")
    table.add_column("worst gradient", justify="right")
    timed = any(row["time_ratio"] is not None for row in found[what])
    if timed:
        table.add_column("time", justify="right")
    rows = sorted(found[what], key=lambda r: -number(r["harm_alone"]))
    for row in rows[:MOST_ROWS]:
        alone, kept = row["alone"], row["kept"]
        table.add_row(
            row["name"],
            str(row["calls"]),
            *(loss(alone), decibels(alone["worst_db"])),
            "" if number(row["harm_alone"]) <= 1 else "harmful",
            *(loss(kept), decibels(kept["worst_db"])),
            *([times(row["time_ratio"])] if timed else []),
        )
    if (more := len(rows) - MOST_ROWS) > 0:
        table.caption = f"and {more} more, none more harmful, in search_ops.json"
    return table


def outcome_table(found: Mapping[str, Any]) -> Table:
    """Everything lower, what the configuration has, and what was found, side by side."""
    table = _table("outcome")
    table.add_column("in float32", overflow="fold")
    for column in ("loss", "gradients", "worst"):
        table.add_column(column, justify="right")
    table.add_column("of", overflow="fold")
    table.add_column("fp32 numbers", justify="right")
    timed = found["float32"]["time_ratio"] is not None
    if timed:
        table.add_column("time", justify="right")
    for name, row in _outcomes(found):
        measure, share = row["measure"], row.get("float32_share")
        table.add_row(
            name,
            *(loss(measure), decibels(measure["gradients_db"])),
            *(decibels(measure["worst_db"]), measure["worst_parameter"]),
            "" if share is None else f"{share:.0%}",
            *([times(row.get("time_ratio"))] if timed else []),
        )
    if timed:
        table.add_row("everything", *[""] * 4, "100%", times(found["float32"]["time_ratio"]))
    return table


def _outcomes(found: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "all, weights rounded", found["unavoidable"]
    yield "nothing", found["everything_lower"]
    yield f"as in {found['given']['name']}", found["given"]
    for what, row in found["search"].items():
        if row is not None and (what == "ops" or row["is_within"]):
            names = ", ".join((*found["always"], *row["fp32"])) or "nothing"
            mark = " <-" if found["answer"] == what else ""
            yield f"{what}: {names}{mark}", row


def proof_lines(proof: Mapping[str, Any]) -> Iterator[str]:
    """The verdict of the paired trainings, and what it rests on."""
    unit = " %" if proof["is_relative"] else " points"
    mean, interval = 100 * number(proof["difference"]), proof["interval"]
    said = f"{mean:+.2f}{unit}" if abs(mean) < float("inf") else "not finite"
    if interval is not None:
        low, high = (100 * number(x) for x in interval)
        said += f" (95 %: {low:+.2f} to {high:+.2f})"
    more = f", about {proof['more_seeds']} more seeds" if proof["more_seeds"] else ""
    yield (
        f"proof: {len(proof['values'])} pairs of trainings of {proof['steps']} steps, "
        f"{proof['split']} {proof['metric']} less float32's: {said}, margin "
        f"{100 * proof['margin']:g}{unit}: {proof['verdict']}{more}; {proof['reason']}"
    )
    for seed, failure in enumerate(proof["failures"]):
        if failure is not None:
            yield f"seed {seed}: {failure}"
    if any(proof["skipped_steps"]):
        counts = ", ".join(map(str, proof["skipped_steps"]))
        yield f"steps skipped because a gradient overflowed, by seed: {counts}"
    if proof["step_time_ratio"] is not None:
        yield f"step time in these trainings: {proof['step_time_ratio']:.3f} of float32's"


SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def measured(measure: Mapping[str, Any]) -> str:
    """A measurement in words."""
    if measure["failure"]:
        return f"fails ({measure['failure']})"
    if not number(measure["loss_difference"]) < float("inf"):
        return "the loss is not finite"
    gradients, worst = decibels(measure["gradients_db"]), decibels(measure["worst_db"])
    name = measure["worst_parameter"]
    return f"loss {loss(measure)} off, gradients {gradients}, worst {worst} ({name or 'none'})"


def loss(measure: Mapping[str, Any]) -> str:
    """The relative difference of the loss in per cent."""
    if measure["failure"]:
        return "fails"
    value = 100 * number(measure["loss_difference"])
    return f"{value:.2g} %" if value < float("inf") else "not finite"


def decibels(value: Any) -> str:
    """An SQNR."""
    db = number(value)
    if db == float("inf"):
        return "exact"
    return f"{db:.0f} dB" if db == db else "not finite"


def times(value: float | None) -> str:
    """A ratio of times."""
    return "" if value is None else f"x{value:.2f}"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
