"""Which mode to take: a decision from a comparison, with a reason for every rejected mode.

A mode is a candidate if all of these are true:

    its metric is shown to be equivalent to the baseline's within the margin, or better
    no run of it failed, and none shows a numerical alarm
    its step time (or its memory) is smaller than the baseline's: the ratio's interval lies below 1
    for the time, that gain is not lost again by a need for more samples to equal quality

The candidate with the smallest ratio is taken; without a candidate, the baseline. A mode with an
inconclusive result is no candidate: it was shown neither to be worse nor to be equivalent. What
stands before the colon of a reason is the reason in short: the short report cuts there.

The advice is left as a preset: a YAML file with the overrides' values; `preset=NAME` applies it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mprun.config import compose
from mprun.config.compose import parse
from mprun.config.recipe_file import named_file
from mprun.config.reference import GROUPS
from mprun.config.schema import OptimizerConfig
from mprun.config.settings import BASELINE, StudyRequest, variants
from mprun.config.validate import loss_scale_kind
from mprun.errors import UsageError
from mprun.precision import OpLists
from mprun.precision.policy import policy
from mprun.records.console.formatting import by_reason, counted
from mprun.records.files import write_atomic
from mprun.records.mode_names import SHIPPED_MODES
from mprun.records.run_record import Summary, placed_lines
from mprun.study.compare.comparison import Advice, Comparison, Estimate, Run, Variant
from mprun.study.compare.equal_quality import buys_nothing, judge_equal_quality
from mprun.study.compare.times import OVERLAPPED, artefacts, is_timed_pair, overlapping
from mprun.study.report.snippets import ListsAnswer, Snippet
from mprun.study.study import Study, StudyResult, held_out, new_study, scored_more
from mprun.study.trials import Outcome
from mprun.train.assemble import DataCache, Plan, make_plan
from mprun.train.assemble.optimizer import class_of, options_of

SAME_MEMORY = 1.01  # Peaks within this factor are the same: 1 % is no reason to choose a mode
# A larger share of skipped steps in the second half of a run is an alarm: a dynamic loss scale is
# stable by then, and skips one step in 2000 when it tries a larger scale
SKIPPED_SHARE = 0.05
REFUSED = "cannot run here: "  # Before the error of a mode that makes no plan
# What the best of equal peaks has ahead of the others
TIE_BY_TIME = "is faster with the same memory"
TIE = "needs as much, and their times have no verdict"
NEEDS = {"time": "step time", "memory": "peak memory"}  # What an objective minimizes


def new_advise_study(request: StudyRequest) -> Study:
    """Short trials of the modes that run natively, on validation data.

    Raises:
        UsageError: anything wrong with the overrides or the folder, or only one mode can be tried.
    """
    listed, load = variants(request.overrides, request.config_dir), DataCache()
    not_tried = dict(listed.left_out)
    native: dict[str, tuple[str, ...]] = {}
    of_trials: list[str] = []
    baselines: list[str] = []
    for name, overrides in listed.overrides.items():
        composed = compose(overrides, request.config_dir)
        try:
            planned = make_plan(composed.config, composed.given, load=load)
        except UsageError as error:
            not_tried[name] = f"{REFUSED}{error}"
            continue
        if planned.execution == "emulated":
            why = planned.why_emulated or "execution=emulated was given"
            not_tried[name] = f"emulated here: {why}; what it costs elsewhere is unknown"
            continue
        if not native:
            of_trials = held_out(composed, load)
            if composed.config.train.max_steps is None:  # the user's own limit stays
                of_trials.append(f"train.max_steps={request.settings.advise.max_steps}")
            trial = compose([*overrides, *of_trials], request.config_dir)
            of_trials += scored_more(trial, load)
        native[name] = overrides
        if planned.policy.name == BASELINE:
            baselines.append(name)
    if not native:
        raise UsageError(next(iter(not_tried.values())).removeprefix(REFUSED))
    if len(native) == 1:
        raise UsageError(
            f"there is nothing to choose from: only {next(iter(native))} can be tried"
            + "".join(f"; {', '.join(x)}: {why}" for why, x in by_reason(not_tried).items())
        )
    # The first variant is the baseline of the study; sorting is stable, so the rest stays in order
    ordered = {name: native[name] for name in sorted(native, key=lambda n: n not in baselines)}
    return new_study(request, ordered, of_trials=of_trials, not_tried=not_tried, load=load)


def advise(
    comparison: Comparison,
    alarms_of: Mapping[str, Sequence[str]],
    objective: str,
    screened_out: Mapping[str, str] | None = None,
    not_tried: Mapping[str, str] | None = None,
) -> Advice:
    """The decision; `screened_out` are modes whose trials ended early, to the reason."""
    baseline, *others = comparison.variants
    refused = {v.label: _refusal(v, alarms_of.get(v.label, ()), objective) for v in others}
    candidates = [v for v in others if refused[v.label] is None]
    best = _best(candidates, objective) if candidates else baseline
    rejected = dict(screened_out or {})
    rejected |= {label: reason for label, reason in refused.items() if reason is not None}
    for v in candidates:
        if v is not best:
            tie = _is_tie(v, best, objective)
            faster = math.isfinite(_counted_time(best))
            gain = (TIE_BY_TIME if faster else TIE) if tie else "needs less"
            rejected[v.label] = f"{best.label} {gain}: {_ratio_text(v, objective)}"
    if best is baseline:
        reason = f"no other mode was shown to need less {NEEDS[objective]} at an equal metric"
    else:
        rejected[baseline.label] = f"{best.label} needs {_ratio_text(best, objective)}"
        quality = best.equal_quality
        sooner = (
            f"{ratio_figure(quality.time_ratio)} of the baseline's time to equal validation loss, "
            if objective == "time" and quality is not None and quality.time_ratio is not None
            else ""
        )
        reason = f"{sooner}{_ratio_text(best, objective)}, {comparison.metric} {best.verdict.word}"
    notes = tuple(_notes(candidates, best, others, objective))
    return Advice(best.label, reason, rejected, dict(not_tried or {}), notes)


def _best(candidates: Sequence[Variant], objective: str) -> Variant:
    """The variant that needs least; of equal peaks of memory, the fastest, if times count."""
    least = min(candidates, key=lambda v: _value(v, objective))
    if objective == "time":
        return least
    equal = [v for v in candidates if _is_tie(v, least, objective)]
    return min(equal, key=_counted_time)


def _counted_time(variant: Variant) -> float:
    """Its ratio of step times; infinite where that has no verdict."""
    ratio = variant.step_time_ratio
    return math.inf if ratio is None or variant.no_time_verdict else ratio.value


def _is_tie(variant: Variant, best: Variant, objective: str) -> bool:
    """Whether two peaks of memory differ by 1 % at most."""
    if objective == "time":
        return False
    ratio = _value(variant, objective) / _value(best, objective)
    return 1 / SAME_MEMORY <= ratio <= SAME_MEMORY


def _refusal(variant: Variant, alarm_texts: Sequence[str], objective: str) -> str | None:
    """The reason why a mode is no candidate, or None."""
    if variant.execution == "emulated":
        return (
            "emulated here: its cost on hardware that supports it cannot be measured on this "
            "machine"
        )
    if variant.verdict.word not in ("equivalent", "better"):
        return f"{variant.verdict}: {variant.verdict.reason}"
    if alarm_texts:
        return f"numerical alarm: {alarm_texts[0]}"
    if not _is_smaller(variant, objective):
        return _no_gain(variant, objective)
    if objective == "time" and variant.substituted:
        return f"{variant.substituted}: {_ratio_text(variant, objective)}, no gain of float16"
    if objective == "time" and buys_nothing(variant):
        return f"buys nothing: {_ratio_text(variant, objective)}, but {_to_equal_quality(variant)}"
    return None


def _to_equal_quality(variant: Variant) -> str:
    quality = variant.equal_quality
    assert quality is not None
    missed = f" (never reached in {counted(quality.missed, 'pair')})"
    return (
        f"{ratio_figure(quality.samples_ratio)} of its samples and "
        f"{ratio_figure(quality.time_ratio)} of its time to equal validation loss"
        f"{missed if quality.missed else ''}"
    )


def _no_gain(variant: Variant, objective: str) -> str:
    """The measured ratio of a mode that was not shown to need less."""
    ratio = variant.step_time_ratio
    if objective == "memory" or ratio is None:
        smaller = "smaller" if objective == "memory" else "faster"
        return f"not {smaller}: {_ratio_text(variant, objective)}"
    interval = ratio.interval
    if interval is not None and interval.low > 1:
        return f"slower: {_ratio_text(variant, objective)}"
    pairs = counted(ratio.n, "pair")
    if variant.no_time_verdict:
        pairs += f"; {variant.no_time_verdict}"
    proven = "not proven faster" if ratio.value < 1 else "no gain"
    return f"{proven}: {ratio.value:.2f} of the baseline's step time measured ({pairs})"


def _is_smaller(variant: Variant, objective: str) -> bool:
    if objective == "memory":
        return variant.memory_ratio is not None and variant.memory_ratio < 1 / SAME_MEMORY
    ratio = variant.step_time_ratio
    return ratio is not None and ratio.interval is not None and ratio.interval.high < 1


def _value(variant: Variant, objective: str) -> float:
    if objective == "memory":
        assert variant.memory_ratio is not None
        return variant.memory_ratio
    assert variant.step_time_ratio is not None
    return variant.step_time_ratio.value


def _ratio_text(variant: Variant, objective: str) -> str:
    """`0.61 [0.59, 0.63] of the baseline's step time`."""
    ratio = ratio_figure(variant.step_time_ratio)
    if objective == "memory":
        if variant.memory_ratio is None:
            return f"no {NEEDS[objective]}"
        ratio = f"{variant.memory_ratio:.2f}"
    return f"{ratio} of the baseline's {NEEDS[objective]}"


def ratio_figure(ratio: Estimate | None) -> str:
    """`0.61 [0.59, 0.63]`."""
    if ratio is None:
        return "an unknown share"
    if ratio.interval is None:
        return f"{ratio.value:.2f} ({counted(ratio.n, 'pair')}, no interval)"
    return f"{ratio.value:.2f} [{ratio.interval.low:.2f}, {ratio.interval.high:.2f}]"


def _notes(
    candidates: Sequence[Variant], best: Variant, others: Sequence[Variant], objective: str
) -> Iterator[str]:
    nothing_gained = objective == "time" and best.verdict.word == "baseline"
    if nothing_gained and any(v.no_time_verdict == OVERLAPPED for v in others):
        yield (
            "trials ran at the same time on one machine, so that no mode could be advised for its "
            "time; a new study in one process, or with one for each machine, can do that"
        )
    if objective == "time" and best.step_time_ratio and best.step_time_ratio.interval:
        high = best.step_time_ratio.interval.high
        for v in candidates:
            if v is not best and _value(v, objective) < high:
                ratio = v.memory_ratio
                memory = f", with {ratio:.2f} of the baseline's peak memory" if ratio else ""
                yield f"{v.label} is as fast as {best.label} within the noise{memory}"
    if objective == "time" and judge_equal_quality(best) == "open":
        yield (
            f"{best.label} was not shown to reach the baseline's validation loss sooner: "
            f"{_to_equal_quality(best)}"
        )
    for v in others:
        undecided = v.verdict.word == "inconclusive" and v.verdict.more_seeds
        counts = objective == "memory" or v.has_own_times
        if undecided and counts and _is_smaller(v, objective):
            # Fresh seeds only: those that raised the question must not answer it
            seeds = len(v.runs) + (v.verdict.more_seeds or 0)
            fresh = 1 + max(run.summary.seed for run in v.runs)
            yield (
                f"{v.label} needs {_ratio_text(v, objective)}, and its metric is inconclusive: a "
                f"study with first_seed={fresh} and up to {seeds} seeds would likely settle it"
            )


def screened(
    outcomes: Sequence[Outcome],
    baseline: str,
    objective: str,
    pairs: int,
    beside: Sequence[Run] = (),
) -> dict[str, str]:
    """Variants that cannot win, to the reason: they failed, or needed more in every pair."""
    dropped = {
        o.trial.variant: f"seed {o.trial.seed} failed: {o.error}"
        for o in outcomes
        if o.error is not None and not o.by_machine and o.trial.variant != baseline
    }
    measured: dict[str, dict[int, tuple[Summary, float]]] = {}
    for o in outcomes:
        need = _need(o.summary, objective)
        if o.error is None and o.summary is not None and need is not None:
            measured.setdefault(o.trial.variant, {})[o.trial.seed] = o.summary, need
    base = measured.pop(baseline, {})  # what is left are the others
    known = (o.summary for o in outcomes if o.summary is not None)
    shared = overlapping([*(Run(Path(), summary) for summary in known), *beside])
    for variant, by_seed in measured.items():
        common = [(by_seed[seed], base[seed]) for seed in by_seed if seed in base]
        if objective == "time":
            common = [x for x in common if is_timed_pair(x[0][0], x[1][0], shared)]
            if artefacts(variant, baseline, [(own[0], other[0]) for own, other in common]):
                continue  # its times are not those of its arithmetic
        ratios = [own[1] / other[1] for own, other in common]
        # Needing more in every pair is no test; it only saves trials of a mode that cannot win
        if len(ratios) >= pairs and min(ratios) >= 1:
            figures = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            dropped.setdefault(
                variant,
                f"screened out after {counted(len(ratios), 'pair')}: {figures} of {baseline}'s "
                f"{NEEDS[objective]}",
            )
    return dropped


def _need(summary: Summary | None, objective: str) -> float | None:
    if summary is None:
        return None
    return summary.memory_bytes.peak if objective == "memory" else summary.step_time_ms.median


def without_result(
    study: Study, ran: StudyResult, dropped: Mapping[str, str], budget: str
) -> dict[str, str]:
    """Modes of which the machine let no run end, or the budget no trial, to the reason."""
    with_result = {o.trial.variant for o in ran.outcomes if not o.by_machine}
    reasons = {
        o.trial.variant: f"none of its runs ended: {o.error}"
        for o in ran.outcomes
        if o.trial.variant not in with_result
    }
    tried = {o.trial.variant for o in ran.outcomes if o.summary is not None and o.error is None}
    for name in study.plan.variants:
        if name in ran.not_run and name not in tried and name not in dropped:
            reasons[name] = f"{budget} ended before its first trial was complete"
    return reasons


def alarms_by_variant(comparison: Comparison) -> dict[str, list[str]]:
    """A variant's label to the alarms of its runs."""
    return {
        v.label: [
            f"seed {run.summary.seed}: {text}"
            for run in v.runs
            for text in alarms(run.summary, list(placed_lines(run.path)))
        ]
        for v in comparison.variants
    }


def alarms(summary: Summary, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Signs of a numerical problem in a run's record and metrics.jsonl, a sentence each.

    A short trial may end with a good metric although steps are skipped again and again, or the loss
    scale keeps falling.
    """
    texts = []
    # Each skipped step has a line; train.log_every may leave out others.
    half = summary.steps // 2  # a dynamic scale starts high, and skips the first steps on purpose
    late = summary.steps - half
    is_step = (line for line in lines if line.get("kind") == "step" and line["step"] > half)
    skipped = sum(bool(line.get("skipped")) for line in is_step)
    if skipped > SKIPPED_SHARE * late:
        texts.append(f"{skipped} of the last {late} steps were skipped: gradients overflow")
    scale = summary.loss_scale
    if scale.kind == "dynamic" and scale.final < 1:
        texts.append(f"the loss scale fell to {scale.final:g}: gradients overflow even unscaled")
    losses_of = {
        "training": [summary.train.loss, *(e.train.loss for e in summary.history)],
        "validation": [e.validation.loss for e in summary.history],
        "test": [summary.test.loss],
    }
    for name, losses in losses_of.items():
        if any(x is not None and not math.isfinite(float(x)) for x in losses):
            texts.append(f"a {name} loss was not finite")
    return texts


# ---- the preset that an advice leaves ------------------------------------------------------------


def preset_text(name: str, overrides: Sequence[str], comments: Sequence[str]) -> str:
    """The file's text: the overrides, and comments, of which the first is the option's help."""
    groups: list[dict[str, str]] = []
    fields: dict[str, Any] = {"preset": {"name": name}}
    for text in overrides:
        override = parse(text)
        key, value = override.key_or_group, override.value()
        if key == "preset" or text in recipe_files([text]):
            continue  # this file replaces a preset, and is no place for the path of a recipe
        if key in GROUPS:
            groups.append({f"override /{key}": str(value)})
            continue
        *path, last = key.split(".")
        place = fields
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    # Text of records may have line breaks, behind which it would be YAML
    comment = "".join(f"# {' '.join(line.split())}\n" for line in comments)
    # Hydra reads the list of defaults first, so it stands first: keys are not sorted
    body = yaml.safe_dump({"defaults": groups, **fields}, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n{comment}{body}"


def recipe_files(overrides: Sequence[str]) -> list[str]:
    """The overrides that name a recipe's file; the command that takes the preset has them too."""
    parsed = [(text, parse(text)) for text in overrides]
    return [t for t, o in parsed if o.key_or_group == "recipe" and named_file(o.value())]


def write_preset(folder: Path, name: str, text: str) -> Path:
    """Write it where `--config-dir folder` finds it; its path."""
    path = folder / "preset" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
    return path


def copy_options(overrides: Sequence[str], config_dir: Path | None, folder: Path) -> None:
    """Copy the user's own options that the overrides name into the folder of a preset."""
    if config_dir is None:
        return
    for text in overrides:
        group, _, name = text.lstrip("+").partition("=")
        source = config_dir / group / f"{name}.yaml"
        if group in GROUPS and source.is_file():
            (folder / group).mkdir(exist_ok=True)
            write_atomic(folder / group / source.name, source.read_bytes())


# ---- the answer for other training loops ---------------------------------------------------------

# The scale where the configuration names no value; 65536 is GradScaler's own initial scale
INITIAL = {"none": 1.0, "static": 1024.0, "dynamic": 65536.0}


def advised_answer(study: Study, overrides: Sequence[str], notes: tuple[str, ...]) -> Snippet:
    """What the trials of a study's variant, given by its overrides, trained in."""
    config = compose([*overrides, *study.plan.of_trials], study.config_dir).config
    return plan_answer(make_plan(config, (), load=study.load, untrusted=study.untrusted), notes)


def plan_answer(plan: Plan, notes: tuple[str, ...]) -> Snippet:
    """What a plan trains in; `notes` say where the answer comes from, a line each."""
    config, row = plan.config, plan.policy
    # A mode of the user's own has no name that another program could look up: all columns are given
    shipped = policy(row.name).columns() if row.name in SHIPPED_MODES else None
    changes = {k: v for k, v in row.columns().items() if shipped and v != shipped[k]}
    if plan.op_lists is not None:
        changes.pop("casting", None)  # the lists say it
    kind = loss_scale_kind(config, plan.layers.values())
    value = 1.0 if kind == "none" else config.loss_scale.value or INITIAL[kind]
    own = plan.recipe.makes_optimizer
    return Snippet(
        title=f"{row.name} for recipe {config.recipe.name}",
        notes=notes,
        device=plan.device.type,
        execution=plan.execution,
        mode=row.name,
        columns=row.columns(),
        is_shipped=shipped is not None,
        changes=changes,
        lists=None if plan.op_lists is None else _lists(plan.op_lists),
        layers=dict(plan.layers),
        scale=replace(config.loss_scale, name=kind, value=value),
        optimizer=None if own else f"torch.optim.{class_of(config.train.optimizer).__name__}",
        optimizer_args={} if own else _options(config.train.optimizer),
        lr=plan.lr,
        clip_norm=config.train.clip_norm,
        left_out=tuple(_left_out(plan)),
        compile=plan.speed.compile,
    )


def _lists(lists: OpLists) -> ListsAnswer:
    def named(kind: str) -> tuple[str, ...]:
        return tuple(sorted(name for name, rule in lists.rules.items() if rule == kind))

    return ListsAnswer(named("lower"), named("fp32"), named("promote"), lists.first_input)


def _options(config: OptimizerConfig) -> dict[str, Any]:
    """The arguments without lr and those that are 0 by the class's own default."""
    options, default = options_of(config), inspect.signature(class_of(config)).parameters
    # Short code; but AdamW's own default of weight_decay is 0.01, so a 0 there must be written
    return {k: v for k, v in options.items() if v or default[k].default}


def _left_out(plan: Plan) -> Iterator[str]:
    train = plan.config.train
    if plan.batch.accumulate > 1:
        yield f"train.accumulate={plan.batch.accumulate}"
    if train.scheduler != "none" or plan.recipe.makes_schedule:
        name = "the recipe's own" if plan.recipe.makes_schedule else train.scheduler
        yield f"train.scheduler={name}"
    if train.warmup_steps:
        yield f"train.warmup_steps={train.warmup_steps}"
