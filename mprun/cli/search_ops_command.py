"""`mprun search-ops`: which ops must stay in float32, and the op list that keeps them there.

    mprun search-ops recipe=mnist precision=fp16_mixed
    mprun search-ops recipe=mnist search_ops.budget_min=10    (what ten minutes can settle)

Takes the overrides of a run, and settings (`search_ops.tolerance=0.005`, `seeds=3`). Writes into
the run's folder `ops.yaml`, which `op_lists.lower_file` and `op_lists.fp32_file` read,
`search_ops.json` with every measurement, and `snippets/`, the result as code for other training
loops. Ctrl-C ends it with what was measured. See docs/reference/search-ops.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import parse_arguments
from mprun.cli.step_commands import introduce, traceback_in
from mprun.console import (
    JobProgress,
    print_line,
    print_table,
    print_text,
    stderr_console,
    stdout_console,
)
from mprun.errors import EXIT_OK, RunFailedError
from mprun.experiments.budget import Budget, BudgetSignals, EndedEarlyError, LimitedParts
from mprun.train.signals import SignalReceivedError, interruptible

if TYPE_CHECKING:
    from mprun.config.settings import Settings
    from mprun.experiments.proof import SelectedCasts
    from mprun.inspect.search import PlannedSearch
    from mprun.results.search_result import OpSearch, Proof


def search_ops_command(args: Sequence[str]) -> int:
    """Run `mprun search-ops`; the exit status."""
    from mprun.config.settings import take

    known = parse_arguments("search-ops", args)
    settings, overrides = take(known.overrides, "search_ops", "seeds")
    if not {"precision", "op_lists"} & {text.lstrip("+").partition("=")[0] for text in overrides}:
        overrides = [*overrides, "precision=bf16_mixed"]
    stop = BudgetSignals(Budget("search_ops.budget_min", settings.search_ops.budget_min))
    return interruptible(
        lambda _: _search(overrides, known.config_dir, settings, stop),
        " before the first result",
        stop,
    )


def _search(
    overrides: list[str], config_dir: Path | None, settings: Settings, stop: BudgetSignals
) -> int:
    from mprun.inspect.search import plan_search
    from mprun.records.files import new_folder

    planned = plan_search(overrides, config_dir, settings)
    introduce(planned.low)
    console = stdout_console()
    for note in planned.notes():
        print_line(console, note)
    folder, proof = new_folder(planned.low.composed.config.run.dir), None
    if planned.low.plan.policy.gemms != "none":
        return _search_formats(planned, folder, overrides, config_dir, stop)
    with stop.deferred():
        with JobProgress(stderr_console()) as progress, traceback_in(folder):
            try:
                search, casts = planned.measure(LimitedParts(stop, progress.begin))
            except EndedEarlyError:
                raise _nothing_measured(stop) from None
        _print(search)
        names = _write(folder, planned, search, None)
        if casts is not None and settings.search_ops.steps:
            with JobProgress(stderr_console()) as progress:
                parts = LimitedParts(stop, progress.begin)
                proof = planned.prove(casts, parts)
            search = planned.with_open_proof(search, proof, parts.ended_by)
            names = _write(folder, planned, search, proof)
        if casts is not None:
            names += _write_snippets(folder, planned, search, casts)
        for line in _conclusion(search, proof):
            print_text(console, line)
        print_line(console, f"written: {folder}/{', '.join(names)}")
        if search.search is not None:
            command = _command_with_result(overrides, config_dir, search, folder)
            print_line(console, f"use it: {shlex.join(command)}")
    return EXIT_OK if stop.received is None else stop.exit_status


def _search_formats(
    planned: PlannedSearch,
    folder: Path,
    overrides: list[str],
    config_dir: Path | None,
    stop: BudgetSignals,
) -> int:
    """The same for a mode whose products have formats of 8 bits or fewer."""
    from mprun.inspect.search import format_content, measure_formats, prove_formats
    from mprun.records.files import jsonable, write_files
    from mprun.results.search_tables import LAYERS, conclusion, layers_text, search_parts

    console = stdout_console()
    with stop.deferred():
        with JobProgress(stderr_console()) as progress, traceback_in(folder):
            try:
                search = measure_formats(planned, LimitedParts(stop, progress.begin))
            except EndedEarlyError:
                raise _nothing_measured(stop) from None
        for part in search_parts(search):
            if isinstance(part, str):
                print_text(console, part)
            else:
                print_table(console, part)
        if planned.settings.search_ops.steps:
            with JobProgress(stderr_console()) as progress:
                search = prove_formats(planned, search, LimitedParts(stop, progress.begin))
        text = json.dumps(jsonable(format_content(planned, search)), indent=1, allow_nan=False)
        files = {"search_ops.json": text}
        if search.high:
            files[LAYERS] = layers_text(search)
        for line in conclusion(search):
            print_text(console, line)
        print_line(console, f"written: {folder}/{', '.join(write_files(folder, files))}")
        if search.keeps_a_format:
            own = [] if config_dir is None else ["--config-dir", str(config_dir)]
            kept = [text for text in overrides if not text.startswith("run.")]
            result = [f"precision.layers_file={folder / LAYERS}"] * bool(search.high)
            command = ["mprun", *own, *kept, *result]
            print_line(console, f"use it: {shlex.join(command)}")
    return EXIT_OK if stop.received is None else stop.exit_status


def _nothing_measured(stop: BudgetSignals) -> BaseException:
    if stop.received is not None:
        return SignalReceivedError()
    return RunFailedError(
        f"{stop.name} ended the search before its first result: give it more time"
    )


def _write(
    folder: Path, planned: PlannedSearch, search: OpSearch, proof: Proof | None
) -> list[str]:
    """Write search_ops.json and the op lists; the files' names."""
    from mprun.records.files import jsonable, write_files
    from mprun.results.search_tables import texts

    format_content = planned.content(search, proof)
    text = json.dumps(jsonable(format_content), indent=1, allow_nan=False)
    config = f"recipe {format_content['recipe']}, precision {format_content['precision']}"
    files = {"search_ops.json": text, **texts(search, config)}
    return write_files(folder, files)


def _write_snippets(
    folder: Path, planned: PlannedSearch, search: OpSearch, casts: SelectedCasts
) -> list[str]:
    """Write the casts as code for other training loops; the names of the files in `folder`."""
    from mprun.experiments.plan_answer import search_answer
    from mprun.records.files import write_files
    from mprun.report.snippets import snippets
    from mprun.results.search_tables import comments

    config = planned.low.plan.config
    about = f"recipe {config.recipe.name}, precision {config.precision.name}"
    answer = search_answer(planned.low.plan, casts, tuple(comments(search, about)))
    return write_files(folder, snippets(answer))


def _print(search: OpSearch) -> None:
    from mprun.results.numerics_result import unjudged
    from mprun.results.search_tables import answer_sentence, outcome_table, rows_table

    console = stdout_console()
    print_text(console, answer_sentence(search))
    for kind, rows in (("ops", search.ops), ("modules", search.modules)):
        if rows:
            print_table(console, rows_table(search, kind))
    print_table(console, outcome_table(search))
    for line in unjudged(search.unjudged_parameters, search.zero_gradients, search.reference):
        print_text(console, line)


def _conclusion(search: OpSearch, proof: Proof | None) -> Iterator[str]:
    from mprun.results.search_tables import proof_lines

    if search.search is not None and not search.search.ops.is_within:
        yield "warning: the difference is above the tolerance even with every op in float32"
    if proof is not None:
        yield from proof_lines(proof)
    for sentence in search.unsettled:
        yield f"not settled, ended by {search.ended_by}: {sentence}"


def _command_with_result(
    overrides: list[str], config_dir: Path | None, search: OpSearch, folder: Path
) -> list[str]:
    """The command of a run that uses the result."""
    from mprun.inspect.search import key_of

    own = [] if config_dir is None else ["--config-dir", str(config_dir)]
    of_run = [text for text in overrides if key_of(text) not in ("op_lists", "run")]
    return ["mprun", *own, *of_run, *_result_overrides(search, folder)]


def _result_overrides(search: OpSearch, folder: Path) -> Iterator[str]:
    """The overrides of a run that uses the result."""
    from mprun.results.search_tables import ALL_LOWER, LAYERS, OPS

    by_modules = search.answer == "modules"
    lists = folder / (ALL_LOWER if by_modules else OPS)
    yield from ("op_lists=hmp", f"op_lists.lower_file={lists}", f"op_lists.fp32_file={lists}")
    if by_modules:
        yield f"precision.layers_file={folder / LAYERS}"
