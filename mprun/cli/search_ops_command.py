"""`mprun search-ops`: which ops must stay in float32, and the op list that keeps them there.

    mprun search-ops recipe=mnist precision=fp16_mixed

Takes the overrides of a run, and settings (`search_ops.tolerance=0.005`, `seeds=3`). Writes into
the run's folder `ops.yaml`, which `op_lists.lower_file` and `op_lists.fp32_file` read, and
`search_ops.json` with every measurement. See docs/reference/search-ops.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import parse_arguments
from mprun.cli.step_commands import introduce, traceback_in
from mprun.console import print_line, stderr_console, stdout_console
from mprun.errors import EXIT_OK

if TYPE_CHECKING:
    from mprun.experiments.search_ops import PlannedSearch
    from mprun.records.search_ops_record import OpSearch, Proof


def search_ops_command(args: Sequence[str]) -> int:
    """Run `mprun search-ops`; the exit status."""
    from mprun.config.settings import take

    known = parse_arguments("search-ops", args)
    settings, overrides = take(known.overrides, "search_ops", "seeds")
    from mprun.experiments.search_ops import key_of, plan_search
    from mprun.records.files import new_folder

    if not {"precision", "op_lists"} & {text.lstrip("+").partition("=")[0] for text in overrides}:
        overrides = [*overrides, "precision=bf16_mixed"]
    planned = plan_search(overrides, known.config_dir, settings)
    introduce(planned.low)
    console, errors = stdout_console(), stderr_console()
    for note in planned.notes():
        print_line(console, note)
    folder = new_folder(planned.low.composed.config.run.dir)
    with errors.status("", spinner="line") as status, traceback_in(folder):
        search, casts = planned.measure(status.update)
    _print(search)
    names = _write(folder, planned, search, None)
    proof = None
    if settings.search_ops.steps:
        with errors.status("", spinner="line") as status:
            proof = planned.prove(casts, status.update)
        _write(folder, planned, search, proof)
    for line in _conclusion(search, proof):
        print_line(console, line)
    print_line(console, f"written: {folder}/{', '.join(names)}")
    own = [] if known.config_dir is None else ["--config-dir", str(known.config_dir)]
    of_run = [text for text in overrides if key_of(text) not in ("op_lists", "run")]
    command = ["mprun", *own, *of_run, *_result_overrides(search, folder)]
    print_line(console, f"use it: {shlex.join(command)}")
    return EXIT_OK


def _write(
    folder: Path, planned: PlannedSearch, search: OpSearch, proof: Proof | None
) -> list[str]:
    """Write search_ops.json and the op lists; the files' names."""
    from mprun.records.files import jsonable, write_files
    from mprun.report.op_list_text import texts

    content = planned.content(search, proof)
    text = json.dumps(jsonable(content), indent=1, allow_nan=False)
    config = f"recipe {content['recipe']}, precision {content['precision']}"
    files = {"search_ops.json": text, **texts(search, config)}
    return write_files(folder, files)


def _print(search: OpSearch) -> None:
    from mprun.report.numerics_tables import unjudged
    from mprun.report.search_ops_tables import outcome_table, rows_table

    console = stdout_console()
    for kind, rows in (("ops", search.ops), ("modules", search.modules)):
        if rows:
            console.print(rows_table(search, kind), highlight=False)
    console.print(outcome_table(search), highlight=False)
    for line in unjudged(search.unjudged_parameters, search.zero_gradients, search.reference):
        print_line(console, line)


def _conclusion(search: OpSearch, proof: Proof | None) -> Iterator[str]:
    from mprun.report.search_ops_tables import proof_lines

    if not search.search.ops.is_within:
        yield "warning: the difference is above the tolerance even with every op in float32"
    if proof is not None:
        yield from proof_lines(proof)


def _result_overrides(search: OpSearch, folder: Path) -> Iterator[str]:
    """The overrides of a run that uses the result."""
    from mprun.report.op_list_text import ALL_LOWER, LAYERS, OPS

    by_modules = search.answer == "modules"
    lists = folder / (ALL_LOWER if by_modules else OPS)
    yield from ("op_lists=hmp", f"op_lists.lower_file={lists}", f"op_lists.fp32_file={lists}")
    if by_modules:
        yield f"precision.layers_file={folder / LAYERS}"
