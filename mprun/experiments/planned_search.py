"""The plan of `mprun search-ops`: a mixed mode, the same run in float32, and validation data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mprun.assemble import make_plan
from mprun.config import Composed, compose
from mprun.config.settings import SEEDS, Settings
from mprun.errors import UsageError
from mprun.experiments.planned_run import PlannedRun, plan_run
from mprun.experiments.proof import Margins, SelectedCasts, prove
from mprun.experiments.search_ops import search_ops
from mprun.records.search_ops_record import OpSearch, Proof

SCHEMA_VERSION = 1
HELD_OUT = "data.validation_fraction"
"""Set to `SHARE` for a recipe without validation data."""
SHARE = 0.1
OF_THE_MODE = ("precision", "op_lists", "loss_scale", "execution")
"""Parts of a configuration that a mixed mode and fp32 do not share."""


@dataclass(frozen=True)
class PlannedSearch:
    """A search, before its first measurement."""

    low: PlannedRun
    float32: Composed
    held_out: tuple[str, ...]
    """The override that makes validation data, if one was added."""
    settings: Settings

    @property
    def seeds(self) -> int:
        """Pairs of trainings of the proof."""
        return self.settings.seeds or SEEDS["search-ops"]

    def notes(self) -> Iterator[str]:
        """What a user should know about the data and the times."""
        name, low = self.low.composed.config.recipe.name, self.low.plan
        for override in self.held_out:
            yield f"note: recipe={name} has no validation data of its own; {override} is set"
        if not len(low.splits.validation):
            yield f"note: recipe={name} has no validation data: measured on training data"
        if low.execution == "emulated":
            yield "note: no times are measured: emulated arithmetic does not show the hardware's"

    def measure(self, report: Callable[[str], None]) -> tuple[OpSearch, SelectedCasts]:
        """Search; the result, and the casts to prove.

        Raises:
            UsageError: the model cannot be measured.
            RunFailedError: the model's step cannot run.
        """
        reference = make_plan(self.float32.config, ())
        with self.low.executing():
            return search_ops(self.low.plan, reference, self.settings.search_ops, report)

    def content(self, search: OpSearch, proof: Proof | None) -> dict[str, Any]:
        """What search_ops.json holds."""
        return {
            "schema_version": SCHEMA_VERSION,
            **self.low.described(
                *("recipe", "precision", "seed", "execution"),
                *("hardware", "versions", "backend", "data"),
            ),
            "settings": {**asdict(self.settings.search_ops), "seeds": self.seeds},
            "proof": None if proof is None else asdict(proof),
            **asdict(search),
        }

    def prove(self, casts: SelectedCasts, report: Callable[[str], None]) -> Proof:
        """Train with the casts and in float32.

        Raises:
            RunFailedError: a training in float32 failed.
        """
        settings = self.settings.search_ops
        return prove(
            self.low.composed.config,
            self.float32.config,
            casts,
            seeds=self.seeds,
            warmup_steps=settings.warmup_steps,
            steps=settings.steps,
            margins=Margins(settings.margin, settings.relative_margin),
            timed=settings.timed_steps > 0,
            report=report,
        )


def plan_search(overrides: list[str], config_dir: Path | None, settings: Settings) -> PlannedSearch:
    """Plan the mixed mode and the same run in float32.

    Raises:
        UsageError: an override is not legal, or the mode casts no op.
    """
    low, held_out = _with_validation_data(overrides, config_dir)
    shared = [text for text in (*overrides, *held_out) if key_of(text) not in OF_THE_MODE]
    float32 = compose([*shared, "precision=fp32"], config_dir)
    return PlannedSearch(low, float32, held_out, settings)


def key_of(override: str) -> str:
    """The first part of an override's key."""
    return override.lstrip("+").partition("=")[0].partition(".")[0]


def _with_validation_data(
    overrides: list[str], config_dir: Path | None
) -> tuple[PlannedRun, tuple[str, ...]]:
    """The planned run, and the override that was added to hold validation data out."""
    low = plan_run(_composed(overrides, config_dir), "search-ops")
    own = len(low.plan.splits.validation) or HELD_OUT in low.composed.given
    if own or HELD_OUT in low.plan.recipe.ignores:
        return low, ()
    held_out = (f"{HELD_OUT}={SHARE}",)
    other = plan_run(_composed([*overrides, *held_out], config_dir), "search-ops")
    return (other, held_out) if len(other.plan.splits.validation) else (low, ())


def _composed(overrides: list[str], config_dir: Path | None) -> Composed:
    composed = compose(overrides, config_dir)
    precision = composed.config.precision
    if precision.casting.name == "none":
        raise UsageError(
            f"precision={precision.name} casts no op: mprun search-ops chooses between float32 and "
            "a 16-bit dtype; legal: precision=bf16_mixed, precision=fp16_mixed"
        )
    if precision.layers or precision.layers_file is not None:
        raise UsageError(
            "mprun search-ops searches the modules to keep in float32: leave out precision.layers "
            "and precision.layers_file"
        )
    return composed
