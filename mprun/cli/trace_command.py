"""`mprun trace`: one training step, op by op, and what its casts cost.

    mprun trace recipe=mnist op_lists=hmp

Takes the overrides of a run. Prints the totals and a summary by kind of op (with `trace.ops=true`
every op), and writes two files into the run's folder: `trace.json` with everything, and
`trace.chrome.json`, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
"""

from __future__ import annotations

from collections.abc import Sequence

from mprun.cli.arguments import Command, parse_arguments
from mprun.inspect.trace_result import TraceSettings
from mprun.records.result import measuring, show

COMMAND = Command("trace", (TraceSettings,))


def trace_command(args: Sequence[str]) -> int:
    """Run `mprun trace`; the exit status."""
    from mprun.config import compose
    from mprun.config.settings import take

    known = parse_arguments(COMMAND, args)
    settings, overrides = take(known.overrides, TraceSettings)
    composed = compose(overrides, known.config_dir)

    from mprun.cli.run_view import introduce
    from mprun.inspect.trace import trace_recipe
    from mprun.records.files import new_folder
    from mprun.study.planned_run import plan_run

    planned = plan_run(composed, "trace")
    introduce(planned)
    folder = new_folder(composed.config.run.dir)
    with measuring(folder):
        result = trace_recipe(planned, settings.own(TraceSettings).ops)
    return show(result, folder)
