"""`mprun search-ops`: which ops must stay in float32, and the op list that keeps them there.

    mprun search-ops recipe=mnist precision=fp16_mixed
    mprun search-ops recipe=mnist search_ops.budget_min=10    (what ten minutes can settle)

Takes the overrides of a run, and settings (`search_ops.tolerance=0.005`). Writes into the run's
folder `ops.yaml`, which `op_lists.lower_file` and `op_lists.fp32_file` read, or `layers.yaml` for
`precision.layers_file`, and `search_ops.json` with every measurement. Ctrl-C ends it with what was
measured. See docs/reference/search-ops.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import RunFailedError, UsageError
from mprun.inspect.numerics import unjudged
from mprun.inspect.question import Given, Measuring, Prepared, Question, of_run
from mprun.inspect.search_result import (
    FILE,
    LAYERS,
    OPS,
    OpSearch,
    SearchOpsSettings,
    answer_files,
    search_parts,
)
from mprun.records.console import print_line, stdout_console
from mprun.records.policy_columns import FORMAT_MODES
from mprun.records.result import Result
from mprun.study.budget import Budget, BudgetSignals, EndedEarlyError, LimitedParts
from mprun.train.signals import SignalReceivedError, StopSignals

if TYPE_CHECKING:
    from mprun.config import Composed
    from mprun.study.planned_run import PlannedRun
    from mprun.train.assemble import Plan

# 1 and 2 had times, trainings that proved the answer, and a record of its own for GEMMs
SCHEMA_VERSION = 3
HELD_OUT = "data.validation_fraction"  # Set to `SHARE` for a recipe without validation data
SHARE = 0.1
# Parts of a configuration that a mixed mode and fp32 do not share
OF_THE_MODE = ("precision", "op_lists", "loss_scale", "execution")


def prepare(given: Given) -> Prepared:
    """Plan the mixed mode, bf16_mixed unless another is named, and the same run in float32.

    Raises:
        UsageError: an override is not legal, or the mode casts no op.
    """
    overrides = given.overrides
    if not {"precision", "op_lists"} & set(map(key_of, overrides)):
        overrides = [*overrides, "precision=bf16_mixed"]
    planned = plan_search(overrides, given.config_dir, given.settings(SearchOpsSettings))

    def measure(m: Measuring) -> Result:
        stop = m.stop
        assert isinstance(stop, BudgetSignals)  # those of `_signals`
        with stop.deferred():  # a signal ends the search at the next part, with what was measured
            try:
                return planned.measure(LimitedParts(stop, m.report))
            except EndedEarlyError:
                raise _nothing_measured(stop) from None

    def show_use(result: Result, folder: Path | None) -> None:
        files = [name for name in result.files if name != FILE]
        if files and folder:
            own = [] if given.config_dir is None else ["--config-dir", str(given.config_dir)]
            use = planned.overrides(overrides, files, folder)
            print_line(stdout_console(), f"use it: {shlex.join(['mprun', *own, *use])}")

    return of_run(planned.low, measure, lines=planned.notes(), after=show_use)


def _signals(given: Given) -> StopSignals:
    budget_min = given.settings(SearchOpsSettings).budget_min
    return BudgetSignals(Budget("search_ops.budget_min", budget_min))


def _nothing_measured(stop: BudgetSignals) -> BaseException:
    if stop.received is not None:
        return SignalReceivedError()
    return RunFailedError(
        f"{stop.name} ended the search before its first result: give it more time"
    )


@dataclass(frozen=True)
class PlannedSearch:
    """A search, before its first measurement."""

    low: PlannedRun
    float32: Composed
    held_out: tuple[str, ...]  # The override that makes validation data, if one was added
    settings: SearchOpsSettings

    def notes(self) -> Iterator[str]:
        """Notes for the user about the data."""
        name = self.low.composed.config.recipe.name
        for override in self.held_out:
            yield f"note: recipe={name} has no validation data of its own; {override} is set"
        if self.low.plan.splits.validation.is_empty:
            yield f"note: recipe={name} has no validation data: measured on training data"

    def measure(self, parts: LimitedParts) -> Result:
        """Measure and search, as far as it gets.

        Raises:
            EndedEarlyError: `parts` ended it before its first result.
            UsageError: the model cannot be measured, or no choice keeps to the budget of bits.
            RunFailedError: the model's step cannot run.
        """
        from mprun.inspect.smallest_list import search_gemms, search_ops
        from mprun.train.assemble import make_plan

        low = self.low.plan
        with self.low.executing():
            search = search_ops if low.policy.gemms == "none" else search_gemms
            record = search(low, make_plan(self.float32.config, ()), self.settings, parts)
        names = ("recipe", "precision", "seed", "execution")
        described = self.low.described(*names, "hardware", "versions", "backend", "data")
        content = {
            "schema_version": SCHEMA_VERSION,
            **described,
            "settings": asdict(self.settings),
            **asdict(record),
        }
        config = low.config
        about = f"recipe {config.recipe.name}, precision {config.precision.name}"
        files = {FILE: Result(content).json, **answer_files(record, about)}
        return Result(content, [*search_parts(record), *_closing_lines(record)], files)

    def overrides(self, given: Sequence[str], files: Sequence[str], folder: Path) -> list[str]:
        """Those of a run that uses the files of a result."""
        replaced, added = ["run"], []
        if OPS in files:
            replaced.append("op_lists")
            added = ["op_lists=hmp"]  # for its third list: ops that join several tensors
            added += [f"op_lists.{kind}_file={folder / OPS}" for kind in ("lower", "fp32")]
        if LAYERS in files:
            added.append(f"precision.layers_file={folder / LAYERS}")
        return [*(text for text in given if key_of(text) not in replaced), *added]


def _closing_lines(search: OpSearch) -> Iterator[str]:
    """Which gradients do not count, and what is left open."""
    yield from unjudged(search.unjudged_parameters, search.zero_gradients, search.reference)
    for sentence in search.unsettled:
        yield f"left open, ended by {search.ended_by}: {sentence}"


def plan_search(
    overrides: list[str], config_dir: Path | None, settings: SearchOpsSettings
) -> PlannedSearch:
    """Plan the mixed mode and the same run in float32.

    Raises:
        UsageError: an override is not legal, or the mode casts no op.
    """
    from mprun.config import compose

    low, held_out = _with_validation_data(overrides, config_dir)
    _check_settings(low.plan, settings)
    shared = [text for text in (*overrides, *held_out) if key_of(text) not in OF_THE_MODE]
    float32 = compose([*shared, "precision=fp32"], config_dir)
    return PlannedSearch(low, float32, held_out, settings)


def _check_settings(low: Plan, settings: SearchOpsSettings) -> None:
    """Refuse settings of formats in a mode that has none.

    Raises:
        UsageError: there is one.
    """
    if low.policy.gemms != "none":
        return
    default = SearchOpsSettings()
    for name in ("effective_bits", "per"):
        value = getattr(settings, name)
        if value != getattr(default, name):
            raise UsageError(
                f"search_ops.{name}={value} has no effect with precision={low.policy.name}, which "
                f"has no format of 8 bits or fewer; legal: one of {', '.join(FORMAT_MODES)} with "
                "it, or leave it out"
            )


def key_of(override: str) -> str:
    """The first part of an override's key."""
    return override.lstrip("+").partition("=")[0].partition(".")[0]


def _with_validation_data(
    overrides: list[str], config_dir: Path | None
) -> tuple[PlannedRun, tuple[str, ...]]:
    """The planned run, and the override that was added to split off validation data."""
    from mprun.study.planned_run import plan_run

    low = plan_run(_composed(overrides, config_dir), "search-ops")
    own = not low.plan.splits.validation.is_empty or HELD_OUT in low.composed.given
    if own or HELD_OUT in low.plan.recipe.ignores:
        return low, ()
    held_out = (f"{HELD_OUT}={SHARE}",)
    other = plan_run(_composed([*overrides, *held_out], config_dir), "search-ops")
    return (low, ()) if other.plan.splits.validation.is_empty else (other, held_out)


def _composed(overrides: list[str], config_dir: Path | None) -> Composed:
    from mprun.config import compose

    composed = compose(overrides, config_dir)
    precision = composed.config.precision
    if precision.casting == "none":
        raise UsageError(
            f"precision={precision.name} casts no op: mprun search-ops chooses between float32 and "
            "a 16-bit dtype, or between bfloat16 and a format; legal: precision=bf16_mixed, "
            "precision=fp16_mixed, precision=mxfp8 and its like"
        )
    if precision.layers or precision.layers_file is not None:
        raise UsageError(
            "mprun search-ops searches the modules to keep in float32: leave out precision.layers "
            "and precision.layers_file"
        )
    return composed


QUESTION = Question("search-ops", prepare, (SearchOpsSettings,), signals=_signals)
