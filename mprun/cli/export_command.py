"""`mprun export`: a run's weights for other programs.

    mprun export outputs/DATE/TIME model.safetensors
    mprun export outputs/DATE/TIME model.pt          a state_dict of PyTorch
    mprun export outputs/DATE/TIME my_model          a folder, by the model's save_pretrained

The weights are those of the run's last checkpoint, in the dtype that they were stored in, under the
model's own names. A folder is written by the model itself (those of Hugging Face's libraries can),
so the recipe is loaded; code that lies in the run's folder runs with run.trust=true only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_OK, UsageError
from mprun.records.console import print_line, stdout_console
from mprun.records.listing import RUNS

USAGE = "write mprun export RUN FILE, such as mprun export outputs/DATE/TIME model.safetensors"
TRUST = "run.trust=true"
COMMAND = Command("export", instead=(TRUST,), folders_of=RUNS)


def export_command(args: Sequence[str]) -> int:
    """Run `mprun export`; the exit status.

    Raises:
        UsageError: there are no weights, or they cannot be written as asked.
    """
    given = parse_arguments(COMMAND, args).overrides
    paths = [text for text in given if text != TRUST]
    if len(paths) != 2:
        raise UsageError(f"mprun export takes a run and a file, not {len(paths)} names; {USAGE}")
    run, target = map(Path, paths)
    if not run.is_dir():
        raise UsageError(f"{run} is not a run's folder; {USAGE}")

    from mprun.records.run_record import read_summary
    from mprun.study.planned_run import write_folder
    from mprun.train.init_from import weights_of, write_file

    summary, state = read_summary(run), weights_of(run)
    facts = {
        "mprun_version": summary.mprun_version,
        "recipe": summary.recipe,
        "precision": summary.precision,
        "seed": str(summary.seed),
        "steps": str(summary.steps),
    }
    try:
        if target.suffix:
            write_file(state, target, facts)
        else:
            write_folder(run, state, target, TRUST in given)
    except OSError as error:
        raise UsageError(f"{target} cannot be written ({error.strerror})") from None
    numbers = sum(x.numel() for x in state.values())
    dtypes = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in state.values()}))
    print_line(
        stdout_console(),
        f"{target}: {len(state)} tensors, {numbers:,} numbers ({dtypes}), {summary.recipe} in "
        f"{summary.precision} after {summary.steps} steps",
    )
    return EXIT_OK
