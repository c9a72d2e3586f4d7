"""`mprun trace`: one training step, op by op, and what its casts cost.

    mprun trace recipe=mnist op_lists=hmp

Takes the overrides of a run. Prints the totals and a summary by kind of op (with `trace.ops=true`
every op), and writes two files into the run's folder: `trace.json` with everything, and
`trace.chrome.json`, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mprun.cli.arguments import parse_arguments
from mprun.cli.step_commands import introduce, traceback_in
from mprun.console import print_line, print_table, print_text, stdout_console
from mprun.errors import EXIT_OK, RunFailedError


def trace_command(args: Sequence[str]) -> int:
    """Run `mprun trace`; the exit status."""
    from mprun.config import compose
    from mprun.config.settings import take

    known = parse_arguments("trace", args)
    settings, overrides = take(known.overrides, "trace")
    composed = compose(overrides, known.config_dir)

    import msgspec

    from mprun.experiments.planned_run import plan_run
    from mprun.experiments.recipe_trace import (
        TraceFailedError,
        is_computed_by_mprun,
        trace_recipe,
    )
    from mprun.records.files import new_folder, write_files
    from mprun.report.trace_tables import chrome, kinds_table, step_table, totals

    planned = plan_run(composed, "trace")
    introduce(planned)
    console, folder = stdout_console(), new_folder(composed.config.run.dir)
    with traceback_in(folder):
        try:
            record = trace_recipe(planned)
        except TraceFailedError as failed:
            write_files(folder, {"trace.json": json.dumps(failed.content)})
            if failed.trace.rows:
                print_table(console, step_table(failed.trace.rows))
            raise RunFailedError(
                f"the step cannot run, the ops before the failure are above: {failed}"
            ) from failed.__cause__
    content, rows = msgspec.to_builtins(record), record.rows
    print_table(console, totals(record))
    print_table(console, kinds_table(rows))
    if settings.trace.ops:
        print_table(console, step_table(rows))
    if is_computed_by_mprun(planned.plan):
        print_text(
            console,
            "note: ops that mprun computes itself (emulated or substituted) are shown as the model "
            "calls them; casts inside them are not counted",
        )
    data = {"trace.json": content, "trace.chrome.json": chrome(rows)}
    names = write_files(folder, {name: json.dumps(x, indent=1) for name, x in data.items()})
    print_line(console, f"written: {folder}/{', '.join(names)}")
    return EXIT_OK
