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

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mprun.config import compose
from mprun.config.compose import parse
from mprun.config.recipe_file import named_file
from mprun.config.reference import GROUPS
from mprun.config.settings import BASELINE, StudyRequest, variants
from mprun.errors import UsageError
from mprun.records.console.formatting import by_reason, counted
from mprun.records.files import write_atomic
from mprun.records.run_record import Summary, number, placed_lines
from mprun.study.compare.comparison import Advice, Comparison, Estimate, Run, Variant
from mprun.study.compare.equal_quality import buys_nothing, judge_equal_quality
from mprun.study.compare.times import OVERLAPPED, artefacts, is_timed_pair, overlapping
from mprun.study.study import Study, StudyResult, held_out, new_study
from mprun.study.trials import Outcome
from mprun.train.assemble import DataCache, make_plan

SAME_MEMORY = 1.01  # Peaks within this factor are the same: 1 % is no reason to choose a mode
# A larger share of skipped steps in the second half of a run is an alarm: a dynamic loss scale is
# stable by then, and skips one step in 2000 when it tries a larger scale
SKIPPED_SHARE = 0.05
REFUSED = "cannot run here: "  # Before the error of a mode that makes no plan
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
    """The decision.

    Args:
        comparison: the trials', on validation data.
        alarms_of: a variant's label to the alarms of its runs, see `alarms`.
        objective: what is minimized.
        screened_out: modes whose trials ended early and are not in the comparison: the reasons.
        not_tried: modes that had no trial: the reasons.
    """
    baseline, *others = comparison.variants
    refused = {v.label: _refusal(v, alarms_of.get(v.label, ()), objective) for v in others}
    candidates = [v for v in others if refused[v.label] is None]
    best = _best(candidates, objective) if candidates else baseline
    rejected = dict(screened_out or {})
    rejected |= {label: reason for label, reason in refused.items() if reason is not None}
    for v in candidates:
        if v is not best:
            tie = _is_tie(v, best, objective)
            gain = _tie_breaker(best) if tie else "needs less"
            rejected[v.label] = f"{best.label} {gain}: {_ratio_text(v, objective)}"
    if best is baseline:
        reason = f"no other mode was shown to need less {NEEDS[objective]} at an equal metric"
    else:
        rejected[baseline.label] = f"{best.label} needs {_ratio_text(best, objective)}"
        reason = f"{_ratio_text(best, objective)}, {comparison.metric} {best.verdict.word}"
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


def _tie_breaker(best: Variant) -> str:
    """What the best of equal peaks has ahead of the others."""
    if math.isfinite(_counted_time(best)):
        return "is faster with the same memory"
    return "needs as much, and their times have no verdict"


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
    """`1.20 [1.18, 1.22] of its samples and 1.00 [0.98, 1.02] of its time to equal validation
    loss`."""
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
    if objective == "memory" and variant.memory_ratio is None:
        return f"no {NEEDS[objective]}"
    ratio = (
        f"{variant.memory_ratio:.2f}"
        if objective == "memory"
        else ratio_figure(variant.step_time_ratio)
    )
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
                yield f"{v.label} is as fast as {best.label} within the noise{_memory(v)}"
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
                f"{v.label} needs {_ratio_text(v, objective)}, and its metric is inconclusive: "
                f"a study with seeds={seeds} first_seed={fresh} would likely settle it"
            )


def _memory(variant: Variant) -> str:
    if variant.memory_ratio is None:
        return ""
    return f", with {variant.memory_ratio:.2f} of the baseline's peak memory"


def screened(
    outcomes: Sequence[Outcome],
    baseline: str,
    objective: str,
    pairs: int,
    beside: Sequence[Run] = (),
) -> dict[str, str]:
    """Variants that cannot win, to the reason: they failed, or needed more in every pair.

    Args:
        outcomes: of the trials so far.
        baseline: the variant that the others are compared with.
        objective: what is minimized.
        pairs: the least number of pairs for this.
        beside: further runs, which may have shared the machine with trials.
    """
    dropped = {
        o.trial.variant: f"seed {o.trial.seed} failed: {o.error}"
        for o in outcomes
        if o.error is not None and not o.by_machine and o.trial.variant != baseline
    }
    needs: dict[str, dict[int, float]] = {}
    summaries: dict[str, dict[int, Summary]] = {}
    for o in outcomes:
        need = _need(o.summary, objective)
        if o.error is None and o.summary is not None and need is not None:
            needs.setdefault(o.trial.variant, {})[o.trial.seed] = need
            summaries.setdefault(o.trial.variant, {})[o.trial.seed] = o.summary
    base = needs.pop(baseline, {})  # what is left in `needs` are the others
    known = (o.summary for o in outcomes if o.summary is not None)
    shared = overlapping([*(Run(Path(), summary) for summary in known), *beside])
    for variant, by_seed in needs.items():
        common = [seed for seed in by_seed if seed in base]
        if objective == "time":
            own, other = summaries[variant], summaries.get(baseline, {})
            common = [s for s in common if is_timed_pair(own[s], other[s], shared)]
        ratios = [by_seed[seed] / base[seed] for seed in common]
        both = [(summaries[variant][seed], summaries[baseline][seed]) for seed in common]
        if objective == "time" and artefacts(variant, baseline, both):
            continue  # its times are not those of its arithmetic
        # Needing more in every pair is no test; it only saves trials of a mode that cannot win
        if len(ratios) >= pairs and min(ratios) >= 1:
            figures = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            dropped.setdefault(
                variant,
                f"screened out after {counted(len(ratios), 'pair')}: {figures} of {baseline}'s "
                f"{NEEDS[objective]}",
            )
    return dropped


def without_run(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Variants of which the machine let no run end, to the reason."""
    with_result = {o.trial.variant for o in outcomes if not o.by_machine}
    return {
        o.trial.variant: f"none of its runs ended: {o.error}"
        for o in outcomes
        if o.trial.variant not in with_result
    }


def without_trial(
    study: Study, ran: StudyResult, dropped: Mapping[str, str], budget: str
) -> dict[str, str]:
    """Modes of which the budget left no completed trial, to the reason."""
    tried = {o.trial.variant for o in ran.outcomes if o.summary is not None and o.error is None}
    names = (name for name in study.plan.variants if name in ran.not_run)
    reason = f"{budget} ended before its first trial was complete"
    return {name: reason for name in names if name not in tried and name not in dropped}


def _need(summary: Summary | None, objective: str) -> float | None:
    if summary is None:
        return None
    if objective == "memory":
        return summary.memory_bytes.peak
    return summary.step_time_ms.median


def alarms(summary: Summary, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Signs of a numerical problem in a run's record, a sentence each.

    A short trial may end with a good metric although steps are skipped again and again, or the loss
    scale keeps falling.

    Args:
        summary: the run's summary.
        lines: of its metrics.jsonl.
    """
    return [*_skipped(summary, lines), *_scale(summary), *_losses(summary)]


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


def _skipped(summary: Summary, lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    # Each skipped step has a line; train.log_every may leave out others.
    half = summary.steps // 2  # a dynamic scale starts high, and skips the first steps on purpose
    late = summary.steps - half
    is_step = (line for line in lines if line.get("kind") == "step" and line["step"] > half)
    skipped = sum(bool(line.get("skipped")) for line in is_step)
    if skipped > SKIPPED_SHARE * late:
        yield f"{skipped} of the last {late} steps were skipped: gradients overflow"


def _scale(summary: Summary) -> Iterator[str]:
    row = summary.loss_scale
    if row.kind == "dynamic" and row.final < 1:
        yield f"the loss scale fell to {row.final:g}: gradients overflow even unscaled"


def _losses(summary: Summary) -> Iterator[str]:
    losses_of = {
        "training": [summary.train.loss, *(e.train.loss for e in summary.history)],
        "validation": [e.validation.loss for e in summary.history],
        "test": [summary.test.loss],
    }
    for name, losses in losses_of.items():
        if any(x is not None and not math.isfinite(number(x)) for x in losses):
            yield f"a {name} loss was not finite"


# ---- the preset that an advice leaves ------------------------------------------------------------


def preset_text(name: str, overrides: Sequence[str], comments: Sequence[str]) -> str:
    """The file's text.

    Args:
        name: the preset's.
        overrides: with one value each; another preset among them, and a recipe's file, are left
            out.
        comments: lines about its origin; the first is shown as the option's help.
    """
    groups: list[dict[str, str]] = []
    fields: dict[str, Any] = {"preset": {"name": name}}
    for text in overrides:
        override = parse(text)
        key, value = override.key_or_group, override.value()
        if key == "preset" or text in recipe_files([text]):
            continue  # this file replaces a preset, and is no place for the path of a recipe
        if key in GROUPS:
            groups.append({f"override /{key}": str(value)})
        else:
            _put(fields, key.split("."), value)
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


def _put(fields: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        fields = fields.setdefault(key, {})
    fields[keys[-1]] = value
