"""`mprun diff`: where two runs of the same recipe part, module by module.

    mprun diff outputs/DATE/fp32 outputs/DATE/bf16
    mprun diff outputs/DATE/bf16 --save here.json      (one side in a file: two machines, versions)
    mprun diff here.json there.json

Loads the last checkpoint of each run, in its own mode, and takes one step of both on one batch,
forward and backward. Prints how far the weights are apart, each module's own error, relative to
float64, and the first one that is larger than rounding to its dtype makes. Writes diff.json beside
the second side. Nothing is trained. `--save` writes the errors of one run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mprun.errors import UsageError
from mprun.inspect.question import Given, Prepared, Question
from mprun.records.files import json_text
from mprun.records.listing import RUNS
from mprun.records.result import Result

if TYPE_CHECKING:
    from mprun.inspect.divergence.difference import Difference
    from mprun.records.console.fitted_table import FittedTable

USAGE = "mprun diff RUN_A RUN_B, or mprun diff RUN --save FILE"
SHOWN = 5  # Weights furthest apart that are shown; diff.json has all


def prepare(given: Given) -> Prepared:
    """Two runs or saved sides of one recipe, or one run to save.

    Raises:
        UsageError: there are others.
    """
    paths, save = [Path(x) for x in given.overrides], given.options.save
    if len(paths) != (2 if save is None else 1):
        raise UsageError(f"mprun diff takes two runs, or one to save: {USAGE}")
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}: {USAGE}")
    if save is not None:
        if not paths[0].is_dir():
            raise UsageError(f"{paths[0]} is not a run's folder: {USAGE}")
        return Prepared(lambda _: saved_side(paths[0], save.name), folder=save.parent)
    folder = paths[1] if paths[1].is_dir() else paths[1].parent
    return Prepared(lambda _: diff_paths(*paths), folder=folder)


def saved_side(path: Path, name: str) -> Result:
    """One side of a comparison, as a file of this name.

    Raises:
        UsageError: `path` is no run with a checkpoint.
        RunFailedError: its step raises an error.
    """
    from mprun.inspect.divergence.difference import bounded
    from mprun.inspect.divergence.runs import capture_run, load_run

    record = bounded(msgspec.to_builtins(capture_run(load_run(path))))
    return Result(record, files={name: json_text(record)})


def diff_paths(a: Path, b: Path) -> Result:
    """Where two runs, or saved sides, part; `diff.json` has all rows.

    Raises:
        UsageError: one is neither, or they are of other recipes, data or batches.
        RunFailedError: a step raises an error.
    """
    from mprun.inspect.divergence.difference import bounded
    from mprun.inspect.divergence.runs import (
        capture_run,
        diff_captures,
        load_run,
        read_capture,
        weight_differences,
    )

    runs = [load_run(path) if path.is_dir() else None for path in (a, b)]
    sides = [
        read_capture(path) if run is None else capture_run(run)
        for path, run in zip((a, b), runs, strict=True)
    ]
    difference = diff_captures(*sides)
    first, second = runs
    weights: list[tuple[str, float]] = []
    if first is not None and second is not None:
        weights = weight_differences(first.model, second.model)
    parts: list[FittedTable | str] = [
        f"{name}: {path} ({side.precision}, step {side.step})"
        for name, path, side in zip("ab", (a, b), sides, strict=True)
    ]
    if weights:
        parts.append("weights furthest apart (rms of the difference over rms of a):")
    parts += [f"  {name}  {relative:.1e}" for name, relative in weights[:SHOWN]]
    record = bounded(
        {
            "sides": [str(a), str(b)],
            "weights": [{"name": name, "relative": relative} for name, relative in weights],
            **difference_values(difference),
        }
    )
    parts += difference.parts()
    return Result(record, parts, {"diff.json": json_text(record)})


def difference_values(difference: Difference) -> dict[str, Any]:
    """Plain values for JSON."""
    from mprun.inspect.divergence.difference import SCHEMA_VERSION

    return {
        "schema_version": SCHEMA_VERSION,
        "losses": list(difference.losses),
        "rows": [
            {**vars(row), "a": vars(row.a), "b": vars(row.b), "explained": row.is_explained}
            for row in difference.rows
        ],
        "first": None if difference.first is None else difference.first.module,
        "notes": list(difference.notes),
    }


QUESTION = Question("diff", prepare, takes_run=False, folders_of=RUNS)
