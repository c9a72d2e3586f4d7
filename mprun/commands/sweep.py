"""`mprun sweep`: every mode with every seed, then the comparison.

mprun sweep recipe=mnist seeds=5
mprun sweep recipe=mnist precision=fp32,bf16_mixed op_lists=none,hmp seeds=10
mprun sweep run.resume=outputs/DATE/TIME
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mprun.commands.study import Request, carry_out, request, tell
from mprun.errors import EXIT_OK

if TYPE_CHECKING:
    from mprun.build import DataCache
    from mprun.study.sweep import Sweep

SEEDS = 5


def sweep_command(words: list[str]) -> int:
    """Run `mprun sweep` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the overrides, or a folder that holds something already.
    """
    asked = request("sweep", words)
    from mprun.build import DataCache
    from mprun.commands.compare import compared, conclude
    from mprun.study.sweep import read_sweep

    load = DataCache()
    sweep = read_sweep(asked.resume) if asked.resume is not None else _new(asked, load)
    _, status = carry_out(sweep, "sweep", load=load)
    if status is not None:
        return status
    settings = asked.settings.compare
    conclude(compared([sweep.folder], settings), settings, sweep.folder)
    return EXIT_OK


def _new(asked: Request, load: DataCache) -> Sweep:
    """The sweep, its samples loaded: what is wrong with them is wrong in every run."""
    from mprun.build import load_recipe
    from mprun.build.plan import data_request
    from mprun.config import compose
    from mprun.config.variants import variants
    from mprun.study.sweep import new_sweep

    found = variants(asked.words, asked.config_dir)
    config = compose(next(iter(found.words.values())), asked.config_dir).config
    load(load_recipe(config.recipe.target, config.recipe.model), data_request(config))
    for name, reason in found.left_out.items():
        tell(f"left out: {name}: {reason}", error=True)
    seeds = asked.settings.seeds or SEEDS
    return new_sweep(found.words, seeds, asked.folder, asked.config_dir)
