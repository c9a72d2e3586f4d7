"""A search for the ops of a recipe that must stay in float32.

1  train a few steps in float32, so that weights and gradients are those of a training
2  take a few batches of validation data
3  measure each op and module, search the smallest list (`mprun.numerics.sensitivity`)
4  keep modules apart instead of ops, if that leaves less in float32
5  train with the result and in float32, in pairs (`proof.py`)

In a mode with formats of 8 bits or fewer, step 3 is that of `search_formats.py`: which GEMMs of
linear layers must stay in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mprun.assemble import (
    Plan,
    build_arithmetic,
    build_caster,
    build_loss_scale,
    build_parts,
    make_plan,
)
from mprun.config import Composed, compose
from mprun.config.schema import Config
from mprun.config.settings import SEEDS, SearchOpsSettings, Settings
from mprun.console.fitted_table import FittedTable
from mprun.console.formatting import counted, listed
from mprun.errors import UsageError
from mprun.experiments.budget import EndedEarlyError, LimitedParts
from mprun.experiments.plan_answer import search_answer
from mprun.experiments.planned_run import PlannedRun, plan_run
from mprun.experiments.proof import SelectedCasts, prove, weights_after
from mprun.inspect.search_formats import batches_of, measure_formats
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.op_candidates import op_candidates
from mprun.numerics.op_search import Fp32List, Sensitivity
from mprun.numerics.passes import FLOAT32, CastPlan, Passes
from mprun.numerics.set_search import CandidateSearch, Effect
from mprun.numerics.tolerance import Tolerance
from mprun.precision import backend_flags
from mprun.precision.policy import dtype_name, torch_dtype
from mprun.records.policy_columns import FORMAT_MODES
from mprun.report.snippets import snippets
from mprun.results import Result
from mprun.results.search_result import (
    CastResult,
    Float32Time,
    FormatSearch,
    Fp32Selection,
    GivenCasts,
    OpSearch,
    Proof,
    RoundedWeights,
    Selections,
    SensitivityRow,
)
from mprun.results.search_tables import (
    ALL_LOWER,
    LAYERS,
    OPS,
    comments,
    conclusion,
    layers_text,
    op_search_conclusion,
    op_search_parts,
    search_parts,
    texts,
)
from mprun.train.loss_terms import LossTerms

FILE = "search_ops.json"
SCHEMA_VERSION, FORMATS_SCHEMA_VERSION = 1, 2
HELD_OUT = "data.validation_fraction"
"""Set to `SHARE` for a recipe without validation data."""
SHARE = 0.1
OF_THE_MODE = ("precision", "op_lists", "loss_scale", "execution")
"""Parts of a configuration that a mixed mode and fp32 do not share."""
SCALE_STEP = 16.0
"""Loss scales that are tried are this factor apart."""
NAMED = 5
"""Up to this many ops that were not measured are named."""


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
        """Notes for the user about the data and the times."""
        name, low = self.low.composed.config.recipe.name, self.low.plan
        for override in self.held_out:
            yield f"note: recipe={name} has no validation data of its own; {override} is set"
        if low.splits.validation.is_empty:
            yield f"note: recipe={name} has no validation data: measured on training data"
        if low.execution == "emulated":
            yield "note: no times are measured: emulated arithmetic does not show the hardware's"

    def measure(self, parts: LimitedParts) -> FoundOps | FoundFormats:
        """Measure and search, as far as it gets.

        Raises:
            EndedEarlyError: `parts` ended it before its first result.
            UsageError: the model cannot be measured.
            RunFailedError: the model's step cannot run.
        """
        if self.low.plan.policy.gemms != "none":
            settings = self.settings.search_ops
            found = measure_formats(self.low, self.float32, settings, parts)
            return FoundFormats(self, found)
        reference = make_plan(self.float32.config, ())
        with self.low.executing():
            return FoundOps(
                self, *_search(self.low.plan, reference, self.settings.search_ops, parts)
            )

    def described(self) -> dict[str, Any]:
        """What was searched, and with which settings."""
        settings = self.settings.search_ops
        own = {**asdict(settings), "per": settings.per}
        return {
            **self.low.described(
                *("recipe", "precision", "seed", "execution"),
                *("hardware", "versions", "backend", "data"),
            ),
            "settings": {**own, "seeds": self.seeds},
        }

    def prove(self, low: Config, casts: SelectedCasts, parts: LimitedParts) -> Proof | None:
        """Train with the casts and in float32; None if `parts` ended it before the first pair.

        Raises:
            RunFailedError: a training in float32 failed.
        """
        settings = self.settings.search_ops
        return prove(low, self.float32.config, casts, settings, self.seeds, parts)


def plan_search(overrides: list[str], config_dir: Path | None, settings: Settings) -> PlannedSearch:
    """Plan the mixed mode and the same run in float32.

    Raises:
        UsageError: an override is not legal, or the mode casts no op.
    """
    low, held_out = _with_validation_data(overrides, config_dir)
    _check_settings(low.plan, settings.search_ops)
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
            text = getattr(value, "name", value)
            raise UsageError(
                f"search_ops.{name}={text} has no effect with precision={low.policy.name}, which "
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
    low = plan_run(_composed(overrides, config_dir), "search-ops")
    own = not low.plan.splits.validation.is_empty or HELD_OUT in low.composed.given
    if own or HELD_OUT in low.plan.recipe.ignores:
        return low, ()
    held_out = (f"{HELD_OUT}={SHARE}",)
    other = plan_run(_composed([*overrides, *held_out], config_dir), "search-ops")
    return (low, ()) if other.plan.splits.validation.is_empty else (other, held_out)


def _composed(overrides: list[str], config_dir: Path | None) -> Composed:
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


# ---- the search ----------------------------------------------------------------------------------


def _search(
    low: Plan, reference: Plan, settings: SearchOpsSettings, parts: LimitedParts
) -> tuple[OpSearch, SelectedCasts | None]:
    """Measure and search; the result, and its answer as trainings take it.

    Args:
        low: the plan of a mixed mode, without `precision.layers`.
        reference: the same in fp32.
        settings: of the search.
        parts: is called before each measurement.

    Raises:
        EndedEarlyError: before the first op was measured.
    """
    parts(f"training {settings.warmup_steps} steps in float32")
    weights = weights_after(reference, settings.warmup_steps)
    with backend_flags(low.policy, low.native_tf32):
        parts("measuring float32")
        built = build_parts(low)
        built.model.load_state_dict(weights)
        samples, batches = batches_of(built, settings.batches, low.batch.micro)
        arithmetic = build_arithmetic(low)
        native = low.execution == "native"  # times of emulation are not the hardware's
        passes = Passes(built.model, LossTerms(low.recipe), batches, forward=low.recipe.forward)
        probe = CastProbe(passes, loss_scales(low))
        dtype, inputs = torch_dtype(low.policy.compute_dtype), batches[0][0]
        candidates = op_candidates(
            *(built.model, inputs, dtype, settings.always, arithmetic), low.recipe.forward
        )
        timed_steps = settings.timed_steps if native else 0
        measured = Sensitivity(probe, candidates, settings.modules, timed_steps, parts)
        parts("measuring the casts of the configuration")
        given = CastPlan(build_caster(low), arithmetic=arithmetic)
        given_casts = GivenCasts(
            low.config.op_lists.name if low.op_lists is not None else low.policy.casting,
            measured.probe.measure(given),
            measured.time_ratio(given),
        )
        float32 = Float32Time(measured.time_ratio(FLOAT32))
        asked = Tolerance(settings.tolerance, settings.gradient_db)
        lists = _search_lists(measured, asked, settings.modules)
        answer = lists.answer
        tolerance = asked.beside(measured.unavoidable)
        result = OpSearch(
            dtype=dtype_name(measured.candidates.dtype),
            measured_on=samples,
            tolerance=tolerance,
            unjudged_parameters=list(measured.probe.rounding.undetermined),
            zero_gradients=list(measured.probe.rounding.zero),
            reference=measured.probe.rounding.reference,
            unavoidable=RoundedWeights(measured.unavoidable),
            everything_lower=CastResult(measured.lower, time_ratio=1.0),
            given=given_casts,
            float32=float32,
            ops=[_row(effect, tolerance) for effect in measured.ops],
            modules=[_row(effect, tolerance) for effect in measured.modules],
            search=lists.selections(measured),
            always=list(measured.candidates.always),
            lower=list(measured.candidates.lower),
            answer="none" if answer is None else lists.answer_name,
            ended_by=parts.ended_by,
            unsettled=list(_unsettled(measured, lists)),
        )
    if answer is None:
        return result, None
    layers = dict.fromkeys(answer.fp32, "fp32") if lists.by_modules else {}
    return result, SelectedCasts(answer.lists, layers, answer.measure.loss_scale)


@dataclass
class _Lists:
    """The smallest lists; None for those that were not needed, or not reached."""

    ops: Fp32List | None = None
    modules: Fp32List | None = None
    is_complete: bool = False

    @property
    def by_modules(self) -> bool:
        """Whether the modules are the better answer."""
        ops, modules = self.ops, self.modules
        return (
            ops is not None
            and modules is not None
            and modules.is_within
            and modules.cost < ops.cost
        )

    @property
    def answer(self) -> Fp32List | None:
        return self.modules if self.by_modules else self.ops

    @property
    def answer_name(self) -> str:
        return "modules" if self.by_modules else "ops"

    def selections(self, measured: Sensitivity) -> Selections | None:
        """The lists as the record has them, timed."""
        if self.ops is None:
            return None
        plan = measured.candidates.plan
        ops, modules = self.ops, self.modules
        return Selections(
            _selection(ops, measured.time_ratio(plan(ops.fp32))),
            _selection(modules, measured.time_ratio(plan(modules=modules.fp32)))
            if modules
            else None,
        )


def _search_lists(measured: Sensitivity, tolerance: Tolerance, with_modules: bool) -> _Lists:
    """Measure ops and modules and search the smallest lists, as far as it gets."""
    lists = _Lists()
    with suppress(EndedEarlyError):
        measured.of_ops.measure()
        lists.ops = measured.smallest_ops(tolerance)
        measured.of_modules.measure()
        if lists.ops.fp32 and with_modules:
            lists.modules = measured.smallest_modules(tolerance)
        lists.is_complete = True
    return lists


def _unsettled(measured: Sensitivity, lists: _Lists) -> Iterator[str]:
    """What a search that ended early leaves open."""
    if lists.is_complete:
        return
    if text := _not_measured(measured.of_ops):
        yield text
    if lists.ops is None:
        yield "the smallest list of ops was not searched to its end: there is no list"
        return
    if text := _not_measured(measured.of_modules):
        yield text
    if lists.ops.fp32:
        yield "whether modules in float32 are a better answer than ops was not searched to its end"


def _not_measured(search: CandidateSearch) -> str | None:
    calls, effects = search.candidates.names, search.effects
    names = list(calls)[len(effects) :]
    if not names:
        return None
    of = counted(len(calls), search.candidates.kind)
    return f"{len(effects)} of {of} measured, not {listed(names, NAMED)}"


def _row(effect: Effect, tolerance: Tolerance) -> SensitivityRow:
    return SensitivityRow(harm_alone=tolerance.harm(effect.alone), **effect._asdict())


def _selection(smallest: Fp32List, time_ratio: float | None) -> Fp32Selection:
    return Fp32Selection(
        fp32=list(smallest.fp32),
        is_within=smallest.is_within,
        harm=smallest.harm,
        measure=smallest.measure,
        float32_share=smallest.cost,
        time_ratio=time_ratio,
        steps=list(smallest.steps),
    )


def loss_scales(plan: Plan) -> tuple[float, ...]:
    """The loss scales that a plan's may take, the largest first."""
    scale = build_loss_scale(plan.config, {}, torch.device("cpu"))
    if scale.tensor is None:
        return (1.0,)
    scales = [scale.tensor.item()]
    while scale.kind == "dynamic" and scales[-1] >= SCALE_STEP:
        scales.append(scales[-1] / SCALE_STEP)
    return tuple(scales)


# ---- the results ---------------------------------------------------------------------------------


@dataclass
class FoundOps:
    """The ops, or modules, that must stay in float32."""

    planned: PlannedSearch
    search: OpSearch
    casts: SelectedCasts | None
    """The answer as trainings take it; None if the search did not get as far."""
    proof: Proof | None = None

    def prove(self, parts: LimitedParts) -> None:
        """Train with the answer and in float32, in pairs.

        Raises:
            RunFailedError: a training in float32 failed.
        """
        if self.casts is None:
            return
        self.proof = self.planned.prove(self.planned.low.composed.config, self.casts, parts)
        if parts.ended_by is not None:
            pairs = 0 if self.proof is None else len(self.proof.values)
            text = f"{pairs} of {counted(self.planned.seeds, 'pair')} of trainings of the proof"
            unsettled = [*self.search.unsettled, f"{text} were made"]
            self.search = replace(self.search, ended_by=parts.ended_by, unsettled=unsettled)

    def measured(self) -> Result:
        """The answer and its tables."""
        return self._result(op_search_parts(self.search))

    def proved(self) -> Result:
        """What the proof showed, and what was left open."""
        return self._result(op_search_conclusion(self.search, self.proof))

    def _result(self, parts: Iterable[FittedTable | str]) -> Result:
        content = {
            "schema_version": SCHEMA_VERSION,
            **self.planned.described(),
            "proof": None if self.proof is None else asdict(self.proof),
            **asdict(self.search),
        }
        files = {FILE: Result(content).json, **self._lists()}
        return Result(content, list(parts), files)

    def _lists(self) -> dict[str, str | bytes]:
        """The op lists, and the answer as code for other training loops."""
        config = self.planned.low.plan.config
        about = f"recipe {config.recipe.name}, precision {config.precision.name}"
        files: dict[str, str | bytes] = {**texts(self.search, about)}
        if self.casts is not None:
            answer = search_answer(
                self.planned.low.plan, self.casts, tuple(comments(self.search, about))
            )
            files |= snippets(answer)
        return files

    def overrides(self, given: Sequence[str], folder: Path) -> list[str] | None:
        """Those of a run that uses the result; None without one."""
        if self.search.search is None:
            return None
        by_modules = self.search.answer == "modules"
        lists = folder / (ALL_LOWER if by_modules else OPS)
        layers = [f"precision.layers_file={folder / LAYERS}"] if by_modules else []
        of_run = [text for text in given if key_of(text) not in ("op_lists", "run")]
        files = [f"op_lists.lower_file={lists}", f"op_lists.fp32_file={lists}"]
        return [*of_run, "op_lists=hmp", *files, *layers]


@dataclass
class FoundFormats:
    """The GEMMs of linear layers that must stay in bfloat16."""

    planned: PlannedSearch
    search: FormatSearch

    def prove(self, parts: LimitedParts) -> None:
        """Train with the answer and in float32, in pairs, if some GEMM keeps the format.

        Raises:
            RunFailedError: a training in float32 failed.
        """
        search = self.search
        if not search.keeps_a_format or search.layers is None:
            return
        low = copy.deepcopy(self.planned.low.composed.config)
        low.precision.layers = dict(search.layers)
        proof = self.planned.prove(low, SelectedCasts(None, search.layers, 1.0), parts)
        self.search = replace(search, proof=proof, ended_by=search.ended_by or parts.ended_by)

    def measured(self) -> Result:
        """The answer and its tables, and the layers' dtypes."""
        return self._result(search_parts(self.search))

    def proved(self) -> Result:
        """What the proof showed, and what was left open."""
        return self._result(conclusion(self.search))

    def _result(self, parts: Iterable[FittedTable | str]) -> Result:
        described = self.planned.described()
        content = {"schema_version": FORMATS_SCHEMA_VERSION, **described, **asdict(self.search)}
        layers = {LAYERS: layers_text(self.search)} if self.search.high else {}
        return Result(content, list(parts), {FILE: Result(content).json, **layers})

    def overrides(self, given: Sequence[str], folder: Path) -> list[str] | None:
        """Those of a run that uses the result; None without one."""
        if not self.search.keeps_a_format:
            return None
        kept = [text for text in given if not text.startswith("run.")]
        return [*kept, *[f"precision.layers_file={folder / LAYERS}"] * bool(self.search.high)]
