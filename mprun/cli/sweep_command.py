"""`mprun sweep`: every mode with every seed, then the comparison.

    mprun sweep recipe=mnist seeds=5
    mprun sweep recipe=mnist precision=fp32,bf16_mixed op_lists=none,hmp seeds=10
    mprun sweep run.resume=outputs/DATE/TIME

Seeds go round all modes. What fails is named and the rest goes on; status 1 where a run could not
even begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.study_commands import Request, carry_out, request, seeds_of, tell
from mprun.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from mprun.assemble import DataCache
    from mprun.experiments.sweep import Sweep

SEEDS = 5


def sweep_command(words: list[str]) -> int:
    """Run `mprun sweep` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the overrides, or a folder that holds something already.
    """
    asked = request("sweep", words)
    from mprun.assemble import DataCache
    from mprun.cli.compare_command import compared, conclude
    from mprun.experiments.sweep import read_sweep

    load = DataCache()
    resume = asked.resume
    sweep = read_sweep("sweep", resume) if resume is not None else _new(asked, load)
    _load(sweep.trials[0].words, sweep.config_dir, load)
    outcomes, status = carry_out(sweep, "sweep", load=load)
    if status is not None:
        return status
    settings = asked.settings.compare
    conclude(compared([sweep.folder], settings), settings, sweep.folder)
    return EXIT_FAILED if any(o.summary is None for o in outcomes) else EXIT_OK


def _load(words: Sequence[str], config_dir: Path | None, load: DataCache) -> None:
    """Load the samples: what is wrong with them is wrong in every run."""
    from mprun.assemble import load_recipe
    from mprun.assemble.plan import data_request
    from mprun.config import compose

    config = compose(words, config_dir).config
    load(load_recipe(config.recipe.target, config.recipe.model), data_request(config))


def _new(asked: Request, load: DataCache) -> Sweep:
    from mprun.config.variants import variants
    from mprun.experiments.sweep import new_sweep

    found = variants(asked.words, asked.config_dir)
    _load(next(iter(found.words.values())), asked.config_dir, load)  # before a folder is made
    for name, reason in found.left_out.items():
        tell(f"left out: {name}: {reason}", error=True)
    seeds = seeds_of(asked, SEEDS)
    return new_sweep("sweep", found.words, seeds, asked.folder, asked.config_dir)
