"""`mprun search-ops`: which ops must stay in float32, and the op list that keeps them there.

    mprun search-ops recipe=mnist precision=fp16_mixed

Takes the overrides of a run and settings of its own (`search_ops.tolerance=0.005`, `seeds=3`). It
leaves in the run's folder `ops.yaml`, which `op_lists.lower_file` and `op_lists.fp32_file` read,
and `search_ops.json`, everything that was measured. See docs/reference/search-ops.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.cli.step_commands import faults_explained, refuse_resume, without_effect
from mprun.cli.train_command import parse
from mprun.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mprun.assemble import Plan
    from mprun.config import Composed
    from mprun.config.settings import Settings

SCHEMA_VERSION = 1
SEEDS = 5
"""Pairs of trainings, unless `seeds` says."""
HELD_OUT = "data.validation_fraction"
"""Set to `SHARE` for a recipe that holds nothing out by itself."""
SHARE = 0.1
OF_THE_MODE = ("precision", "op_lists", "loss_scale", "execution")
"""Parts of a configuration that a mixed mode and fp32 do not share."""


def search_ops_command(words: Sequence[str]) -> int:
    """Run `mprun search-ops` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the words, a folder that holds something already, or a model
            that cannot be measured.
        RunFailedError: a training in float32 failed.
    """
    arguments = parse(words)
    if arguments.multirun or arguments.show_config:
        raise UsageError("mprun search-ops takes one configuration; leave out the option")
    from mprun.config.settings import take
    from mprun.console import stderr_console, stdout_console

    settings, overrides = take(arguments.overrides, "search_ops", "seeds")
    if not any(_key(w) in ("precision", "op_lists") for w in overrides):
        overrides = [*overrides, "precision=bf16_mixed"]
    return _search(settings, overrides, arguments.config_dir, stdout_console(), stderr_console())


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def _search(
    settings: Settings,
    overrides: list[str],
    config_dir: Path | None,
    console: Console,
    errors: Console,
) -> int:
    from mprun.assemble import plan
    from mprun.config import compose
    from mprun.console import print_line, warn
    from mprun.experiments.proof import Margins, prove
    from mprun.experiments.search_ops import search_ops
    from mprun.numerics.passes import NotMeasurableError
    from mprun.records.run_record import new_folder

    low, chosen, held_out = _planned(overrides, config_dir)
    warn((*chosen.warnings, *without_effect(low, "search-ops")))
    shared = [w for w in (*overrides, *held_out) if _key(w).partition(".")[0] not in OF_THE_MODE]
    float32 = compose([*shared, "precision=fp32"], config_dir)
    found = _opening(low, chosen, settings)
    for line in _notes(low, chosen, held_out):
        print_line(console, line)
    folder = new_folder(low.config.run.dir)
    with errors.status("", spinner="line") as status:
        try:
            reference = plan(float32.config, ())
            with faults_explained("search-ops", folder):
                result, casts = search_ops(chosen, reference, settings.search_ops, status.update)
        except NotMeasurableError as error:
            raise UsageError(f"the model cannot be measured: {error}") from None
    found.update(asdict(result))
    _write(folder, found)
    _show(console, found)
    if settings.search_ops.steps:
        with errors.status("", spinner="line") as status:
            proof = prove(
                low.config,
                float32.config,
                casts,
                seeds=settings.seeds or SEEDS,
                warmup_steps=settings.search_ops.warmup_steps,
                steps=settings.search_ops.steps,
                margins=Margins(settings.search_ops.margin, settings.search_ops.relative_margin),
                timed=settings.search_ops.timed_steps > 0,
                report=status.update,
            )
        found["proof"] = asdict(proof)
        _write(folder, found)
    for line in _closing(found, folder):
        print_line(console, line)
    at = [] if config_dir is None else ["--config-dir", str(config_dir)]
    print_line(console, f"use it: {shlex.join(['mprun', *at, *_using(found, folder, overrides)])}")
    return EXIT_OK


def _planned(
    overrides: list[str], config_dir: Path | None
) -> tuple[Composed, Plan, tuple[str, ...]]:
    """The configuration, its plan, and the override that holds validation data out for it."""
    from mprun.assemble import plan

    low = _composed(overrides, config_dir)
    chosen = plan(low.config, low.given)
    own = len(chosen.splits.validation) or HELD_OUT in low.given
    if own or HELD_OUT in chosen.recipe.ignores:
        return low, chosen, ()
    held_out = (f"{HELD_OUT}={SHARE}",)
    other = _composed([*overrides, *held_out], config_dir)
    split = plan(other.config, other.given)
    return (other, split, held_out) if len(split.splits.validation) else (low, chosen, ())


def _composed(overrides: list[str], config_dir: Path | None) -> Composed:
    from mprun.config import compose

    composed = compose(overrides, config_dir)
    precision = composed.config.precision
    refuse_resume(composed, "search-ops")
    if precision.casting.name == "none":
        raise UsageError(
            f"precision={precision.name} casts no op: mprun search-ops chooses between float32 and "
            "a 16-bit dtype; legal: precision=bf16_mixed, precision=fp16_mixed"
        )
    if precision.layers or precision.layers_file is not None:
        raise UsageError(
            "mprun search-ops finds out which modules to keep apart: leave out precision.layers "
            "and precision.layers_file"
        )
    return composed


def _opening(low: Composed, chosen: Plan, settings: Settings) -> dict[str, Any]:
    """What search_ops.json says of the machine and the configuration."""
    from mprun.assemble.initial_summary import initial_summary

    summary = initial_summary(chosen, low.resolved)
    kept = ("recipe", "precision", "seed", "execution", "hardware", "versions", "backend", "data")
    return {
        "schema_version": SCHEMA_VERSION,
        **{key: value for key, value in asdict(summary).items() if key in kept},
        "settings": {**asdict(settings.search_ops), "seeds": settings.seeds or SEEDS},
        "proof": None,
    }


def _notes(low: Composed, chosen: Plan, held_out: Sequence[str]) -> Iterator[str]:
    from mprun.assemble.initial_summary import initial_summary
    from mprun.report.tables import header

    yield from header(initial_summary(chosen, low.resolved))
    name = low.config.recipe.name
    for word in held_out:
        yield f"note: recipe={name} holds no validation data out; {word} is set"
    if not len(chosen.splits.validation):
        yield f"note: recipe={name} has no validation data: measured on training data"
    if chosen.execution == "emulated":
        yield "note: times of emulated arithmetic say nothing of the hardware: none are taken"


def _files(found: Mapping[str, Any]) -> dict[str, str]:
    """Name to content of the op-list files."""
    import msgspec

    from mprun.records.search_ops_record import OpSearch
    from mprun.report.op_list_text import texts

    config = f"recipe {found['recipe']}, precision {found['precision']}"
    return texts(msgspec.convert(found, OpSearch), config)


def _write(folder: Path, found: Mapping[str, Any]) -> None:
    from mprun.records.run_record import jsonable

    text = json.dumps(jsonable(found), indent=1, allow_nan=False)
    (folder / "search_ops.json").write_text(text, encoding="utf-8")
    for name, content in _files(found).items():
        (folder / name).write_text(content, encoding="utf-8")


def _show(console: Console, found: Mapping[str, Any]) -> None:
    import msgspec

    from mprun.console import print_line
    from mprun.records.search_ops_record import OpSearch
    from mprun.report.numerics_tables import unjudged
    from mprun.report.search_ops_tables import outcome_table, rows_table

    search = msgspec.convert(found, OpSearch)
    for what in ("ops", "modules"):
        if found[what]:
            console.print(rows_table(search, what), highlight=False)
    console.print(outcome_table(search), highlight=False)
    for line in unjudged(search.unjudged_parameters, search.zero_gradients, search.reference):
        print_line(console, line)


def _closing(found: Mapping[str, Any], folder: Path) -> Iterator[str]:
    import msgspec

    from mprun.records.search_ops_record import Proof
    from mprun.report.search_ops_tables import proof_lines

    if not found["search"]["ops"]["is_within"]:
        yield "warning: even with every op in float32 the difference is more than is tolerated"
    if found["proof"] is not None:
        yield from proof_lines(msgspec.convert(found["proof"], Proof))
    yield f"written: {folder}/{', '.join(('search_ops.json', *_files(found)))}"


def _using(found: Mapping[str, Any], folder: Path, overrides: Sequence[str]) -> Iterator[str]:
    """The words of a run with what was found."""
    from mprun.report.op_list_text import ALL_LOWER, LAYERS, OPS

    by_modules = found["answer"] == "modules"
    lists = folder / (ALL_LOWER if by_modules else OPS)
    yield from (w for w in overrides if _key(w).partition(".")[0] not in ("op_lists", "run"))
    yield from ("op_lists=hmp", f"op_lists.lower_file={lists}", f"op_lists.fp32_file={lists}")
    if by_modules:
        yield f"precision.layers_file={folder / LAYERS}"
