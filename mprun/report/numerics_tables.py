"""The numbers of some training steps on the terminal: what `mprun numerics` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

KINDS = {
    "weights": "weights",
    "activations": "activ.",
    "activation_gradients": "act. grad",
    "weight_gradients": "wt. grad",
    "updates": "updates",
}
RULES = {"nearest": "nearest", "stochastic": "stoch.", "kahan": "kahan"}


def rows_table(found: Mapping[str, Any], top: int) -> Table:
    """The rows that float16 treats worst, those of another verdict than "either" first.

    Args:
        found: the content of numerics.json.
        top: how many rows.
    """
    rows = sorted((r for r in found["rows"] if r["verdict"] is not None), key=_badness)
    scale = found["loss_scale"]["in_use"]
    of = "as they are" if scale is None else f"gradients times the loss scale {number(scale)}"
    table = _table(
        f"what formats make of the numbers: {min(top, len(rows))} of {len(rows)} rows, the worst "
        f"first (shares: float16, {of})"
    )
    table.add_column("kind", no_wrap=True)
    table.add_column("of", overflow="fold", min_width=12)
    for column in ("zero", "lose\nbits", "to 0", "inf", "fp16\ndB", "bf16\ndB", "e4m3\ndB"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", min_width=6)
    for row in rows[:top]:
        table.add_row(*_cells(row))
    return table


def _badness(row: Mapping[str, Any]) -> tuple[bool, float]:
    return row["verdict"] == "either", _fp16_db(row)


def _fp16_db(row: Mapping[str, Any]) -> float:
    """In float16; of gradients at the recommended loss scale."""
    scaled = row["loss_scaled"]
    db = row["sqnr_db"].get("fp16", "inf") if scaled is None else scaled["fp16_db"]
    return float(db)


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    seen = row["histogram"]
    yield KINDS[row["kind"]]
    yield row["name"]
    total = sum(seen["exponents"].values()) + sum(seen[k] for k in ("zero", "infinite", "nan"))
    yield percent(seen["zero"] / total)
    in_run = (row["loss_scaled"] or {}).get("fp16", row["fp16"])
    for share in ("below_normal", "becoming_zero", "above_largest"):
        yield percent(in_run[share])
    yield f"{_fp16_db(row):.0f}"
    for name in ("bf16", "e4m3_scaled"):
        yield f"{float(row['sqnr_db'].get(name, 'inf')):.0f}"
    yield row["verdict"]


def scales_table(found: Mapping[str, Any]) -> Table:
    """What is to be said of some loss scales."""
    table = _table("loss scales, in float16")
    table.add_column("", no_wrap=True)
    table.add_column("scale", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for column in ("to 0", "lose bits"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why")
    for verdict in found["loss_scale"]["verdicts"]:
        shares = (percent(verdict[k]) for k in ("becoming_zero", "losing_bits"))
        scale = number(verdict["scale"])
        table.add_row(verdict["label"], scale, verdict["word"], *shares, verdict["reason"])
    return table


def lost_table(found: Mapping[str, Any], top: int) -> Table:
    """Updates lost if weights were kept in 16 bits: of all weights, and of the worst parameters."""
    lost = found["lost_updates"]
    table = _table("share of updates that would be lost with weights in 16 bits, by rounding")
    table.add_column("of", overflow="fold")
    for short in ("fp16", "bf16"):
        for rule in RULES:
            table.add_column(f"{short}\n{RULES[rule]}", justify="right", no_wrap=True)
    table.add_column("this\nrun", justify="right", no_wrap=True)
    worst = sorted(lost["by_parameter"].items(), key=lambda item: -_lost_most(item[1]))
    for name, row in [("all weights", lost["all"]), *worst[:top]]:
        shares = [row[short][rule] for short in ("fp16", "bf16") for rule in RULES]
        table.add_row(name, *(percent(s) for s in [*shares, row["really"]]))
    return table


def _lost_most(row: Mapping[str, Any]) -> float:
    return float(row["fp16"]["nearest"] or 0) + float(row["bf16"]["nearest"] or 0)


def sentences(found: Mapping[str, Any]) -> list[str]:
    """The verdicts in words."""
    verdict, scale = found["verdict"], found["loss_scale"]
    lines = [f"range or precision: {verdict['word']} ({verdict['reason']})"]
    if rows := verdict["made_by"]:
        lines.append(f"what says so: {_listed(rows)}")
    if others := verdict["rows_of_another_verdict"]:
        lines.append(f"of these in one of the formats alone: {_listed(others)}")
    lines += unjudged(verdict["undetermined"], verdict["zero_gradients"], verdict["reference"])
    if scale["needed"] is not None:
        lines.append(f"loss scale in float16: {scale['need']}")
    label = "the largest loss scale that fits" if scale["needed"] is False else RECOMMENDED
    lines.append(f"{label}: {scale['reason']}")
    if scale["best_tried"] is not None:
        lines.append(_tried(scale))
    return lines


RECOMMENDED = "recommended loss scale"


def unjudged(
    undetermined: Sequence[str], zero: Sequence[str], reference: Mapping[str, str]
) -> list[str]:
    """Which parameters were not judged, and why.

    Args:
        undetermined: those whose gradients are rounding errors.
        zero: those whose gradients are exactly zero.
        reference: what told them: `name`, and why it is not float64 in `reason`.
    """
    lines = []
    if undetermined:
        lines.append(
            f"not judged: {_listed(undetermined)}: zero but for rounding (the float32 gradient is "
            f"more than a tenth off {reference['name']}'s)"
        )
    if zero:
        lines.append(f"not judged: {_listed(zero)}: the gradient is exactly zero in float32")
    if reference["reason"]:
        lines.append(
            f"note: this model was not computed in float64 ({reference['reason']}); gradients that "
            f"are zero but for rounding were looked for in {reference['name']}"
        )
    return lines


def _tried(scale: Mapping[str, Any]) -> str:
    tried = {float(s): float(db) for s, db in scale["tried_db"].items()}
    best = scale["best_tried"]
    text = f"of {len(tried)} powers of two tried, {number(min(tried))} to {number(max(tried))}, "
    text += f"the best is {number(best)} ({tried[best]:.2f} dB)"
    recommended = tried.get(scale["recommended"])
    return text if recommended is None else f"{text}; the recommended has {recommended:.2f} dB"


def _listed(names: Sequence[str], shown: int = 5) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )


def percent(share: float | None) -> str:
    """A share in percent; none as "-", nothing as "0", and never nothing for something."""
    if share is None:
        return "-"
    if share == 0:
        return "0"
    if share < 1e-4:
        return "<0.01%"
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def number(scale: float) -> str:
    """A loss scale: 65,536 or 0.0625."""
    return f"{scale:,.0f}" if scale >= 1 and scale == int(scale) else f"{scale:.4g}"
