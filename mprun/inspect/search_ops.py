"""`mprun search-ops`: which ops must stay in float32, and the op list that keeps them there.

    mprun search-ops recipe=mnist precision=fp16_mixed

Takes the overrides of a run, and settings (`search_ops.tolerance=0.005`). Writes into the run's
folder `ops.yaml`, which `op_lists.lower_file` and `op_lists.fp32_file` read, or `layers.yaml` for
`precision.layers_file`, and `search_ops.json` with every measurement. See
docs/reference/search-ops.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import UsageError
from mprun.inspect.numerics import unjudged
from mprun.inspect.question import Given, Measuring, Prepared, Question, of_run
from mprun.inspect.search_result import (
    FILE,
    LAYERS,
    SearchOpsSettings,
    answer_files,
    answer_sentence,
    outcome_table,
    rows_table,
)
from mprun.records.console import print_line, stdout_console
from mprun.records.result import Result

if TYPE_CHECKING:
    from mprun.config import Composed
    from mprun.records.console import ReportPart
    from mprun.study.planned_run import PlannedRun

SCHEMA_VERSION = 4  # Until 3 modules were searched too, and a budget of bits could be asked for
# Parts of a configuration that a mixed mode and fp32 do not share
OF_THE_MODE = ("precision", "op_lists", "loss_scale", "execution")


def prepare(given: Given) -> Prepared:
    """Plan the mixed mode, bf16_mixed unless another is named, and the same run in float32.

    Raises:
        UsageError: an override is not legal, or the mode casts no op.
    """
    from mprun.config import compose
    from mprun.study.planned_run import plan_run

    overrides, settings = given.overrides, given.settings(SearchOpsSettings)
    if not {"precision", "op_lists"} & set(map(key_of, overrides)):
        overrides = [*overrides, "precision=bf16_mixed"]
    low = plan_run(_composed(overrides, given.config_dir), "search-ops")
    if low.plan.policy.gemms == "none" and settings.per != "gemm":
        raise UsageError(
            f"search_ops.per={settings.per}: precision={low.plan.policy.name} has no format of 8 "
            "bits or fewer; legal: a mode with one, such as precision=mxfp8, or search_ops.per=gemm"
        )
    shared = [text for text in overrides if key_of(text) not in OF_THE_MODE]
    float32 = compose([*shared, "precision=fp32"], given.config_dir)

    def measure(m: Measuring) -> Result:
        return _searched(low, float32, settings, m.report)

    def show_use(result: Result, folder: Path | None) -> None:
        files = [name for name in result.files if name != FILE]
        if files and folder:
            own = [] if given.config_dir is None else ["--config-dir", str(given.config_dir)]
            use = ["mprun", *own, *overrides_with(overrides, folder / files[0])]
            print_line(stdout_console(), f"use it: {shlex.join(use)}")

    lines = []
    if low.plan.splits.validation.is_empty:
        name = low.composed.config.recipe.name
        lines.append(f"note: recipe={name} has no validation data: measured on training data")
    return of_run(low, measure, lines=lines, after=show_use)


def _composed(overrides: Sequence[str], config_dir: Path | None) -> Composed:
    from mprun.config import compose

    composed = compose([*overrides], config_dir)
    precision = composed.config.precision
    if precision.casting == "none":
        raise UsageError(
            f"precision={precision.name} casts no op, so there is none to search; legal: "
            "precision=bf16_mixed, precision=fp16_mixed, precision=mxfp8 and its like"
        )
    if precision.layers or precision.layers_file is not None:
        raise UsageError(
            "mprun search-ops takes neither precision.layers nor precision.layers_file: leave them "
            "out"
        )
    return composed


def _searched(
    planned: PlannedRun, float32: Composed, settings: SearchOpsSettings, report: ReportPart
) -> Result:
    """Measure and search."""
    from mprun.inspect.op_search import search
    from mprun.train.assemble import make_plan

    with planned.executing():
        record = search(planned.plan, make_plan(float32.config, ()), settings, report)
    names = ("recipe", "precision", "seed", "execution")
    described = planned.described(*names, "hardware", "versions", "backend", "data")
    own = {"settings": asdict(settings), **asdict(record)}
    content = {"schema_version": SCHEMA_VERSION, **described, **own}
    about = f"recipe {planned.plan.config.recipe.name}, precision {planned.plan.policy.name}"
    lines = unjudged(record.unjudged_parameters, record.zero_gradients, record.reference)
    files = {FILE: Result(content).json, **answer_files(record, about)}
    tables = [rows_table(record), outcome_table(record)]
    return Result(content, [answer_sentence(record), *tables, *lines], files)


def overrides_with(given: Sequence[str], file: Path) -> list[str]:
    """Those of a run that uses the file of an answer."""
    kept = [text for text in given if key_of(text) != "run"]
    if file.name == LAYERS:
        return [*kept, f"precision.layers_file={file}"]
    lists = [f"op_lists.{kind}_file={file}" for kind in ("lower", "fp32")]
    kept = [text for text in kept if key_of(text) != "op_lists"]
    return [*kept, "op_lists=hmp", *lists]  # for its third list: ops that join several tensors


def key_of(override: str) -> str:
    """The first part of an override's key."""
    return override.lstrip("+").partition("=")[0].partition(".")[0]


QUESTION = Question("search-ops", prepare, (SearchOpsSettings,))
