"""`mprun sweep`: every mode with every seed, then the comparison.

mprun sweep recipe=mnist seeds=5
mprun sweep recipe=mnist precision=fp32,bf16_mixed op_lists=none,hmp seeds=10
mprun sweep run.resume=outputs/DATE/TIME
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mprun.errors import EXIT_OK
from mprun.study_command import Request, carry_out, request, tell

if TYPE_CHECKING:
    from mprun.study.sweep import Sweep

SEEDS = 5


def sweep_command(words: list[str]) -> int:
    """Run `mprun sweep` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the overrides, or a folder that holds something already.
    """
    asked = request("sweep", words)
    from mprun.compare_command import compared, conclude
    from mprun.study.sweep import read_sweep

    sweep = read_sweep(asked.resume) if asked.resume is not None else _new(asked)
    _, status = carry_out(sweep, "sweep")
    if status is not None:
        return status
    settings = asked.settings.compare
    conclude(compared([sweep.folder], settings), settings, sweep.folder)
    return EXIT_OK


def _new(asked: Request) -> Sweep:
    from mprun.config.variants import variants
    from mprun.study.sweep import new_sweep

    found = variants(asked.words, asked.config_dir)
    for name, reason in found.left_out.items():
        tell(f"left out: {name}: {reason}", error=True)
    seeds = asked.settings.seeds or SEEDS
    return new_sweep(found.words, seeds, asked.folder, asked.config_dir)
