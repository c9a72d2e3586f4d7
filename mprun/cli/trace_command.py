"""`mprun trace`: one training step, op by op, and what its casts cost.

    mprun trace recipe=mnist op_lists=hmp

Takes the overrides of a run. Prints the step, and leaves in the run's folder `trace.json`, the same
whole, and `trace.chrome.json`, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mprun.cli.step_commands import faults_explained, introduce, refuse_resume
from mprun.cli.train_command import parse
from mprun.errors import EXIT_OK, RunFailedError, UsageError

if TYPE_CHECKING:
    from mprun.config import Composed

SCHEMA_VERSION = 1


def trace_command(words: Sequence[str]) -> int:
    """Run `mprun trace` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the overrides, or a folder that holds something already.
    """
    arguments = parse(words)
    if arguments.multirun or arguments.show_config:
        raise UsageError("mprun trace takes one step of one configuration; leave out the option")
    from mprun.config import compose

    composed = compose(arguments.overrides, arguments.config_dir)
    refuse_resume(composed, "trace")
    return _trace(composed)


def _trace(composed: Composed) -> int:
    import msgspec

    from mprun.assemble import build_arithmetic, plan
    from mprun.console import print_line, stdout_console
    from mprun.experiments.recipe_trace import TraceFailedError, trace_step
    from mprun.precision import backend_flags
    from mprun.records.run_record import new_folder
    from mprun.records.trace_record import TraceRecord, TraceRow
    from mprun.report.trace_tables import chrome, step_table, totals

    chosen = plan(composed.config, composed.given)
    console, summary = stdout_console(), introduce(composed, chosen, "trace")
    folder = new_folder(composed.config.run.dir)
    try:
        with faults_explained("trace", folder), backend_flags(chosen.policy, chosen.native_tf32):
            step, step_time_s = trace_step(chosen)
    except TraceFailedError as failed:
        (folder / "traceback.txt").write_text(
            "".join(traceback.format_exception(failed.__cause__)), encoding="utf-8"
        )
        rows = failed.trace.as_dict(failed.trace.time_s or 1.0)
        text = json.dumps({"schema_version": SCHEMA_VERSION, "error": str(failed), **rows})
        (folder / "trace.json").write_text(text, encoding="utf-8")
        if failed.trace.rows:
            table = step_table(msgspec.convert(rows["rows"], list[TraceRow]))
            console.print(table, highlight=False)
        raise RunFailedError(
            f"the step cannot run, what was traced up to there is above: {failed} (the traceback "
            f"is in {folder}/traceback.txt)"
        ) from None
    kept = ("recipe", "precision", "variant", "execution", "hardware", "versions", "backend")
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **{key: value for key, value in asdict(summary).items() if key in kept},
        "step_time_ms": step_time_s * 1e3,
        **step.as_dict(step_time_s),
    }
    record = msgspec.convert(found, TraceRecord)
    for name, data in (("trace.json", found), ("trace.chrome.json", chrome(record.rows))):
        (folder / name).write_text(json.dumps(data, indent=1), encoding="utf-8")
    console.print(step_table(record.rows), highlight=False)
    console.print(totals(record), highlight=False)
    if chosen.execution == "emulated" or build_arithmetic(chosen).substitutions:
        print_line(
            console,
            "note: ops that mprun computes itself (emulated or substituted) are shown as the model "
            "has them; casts inside them are not counted",
        )
    print_line(console, f"written: {folder}/trace.json, trace.chrome.json")
    return EXIT_OK
