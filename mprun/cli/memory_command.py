"""`mprun memory`: where the memory of a training step goes, modes side by side.

    mprun memory recipe=fashion_mnist precision=fp32,half_sr
    mprun memory recipe=mnist precision=bf16_mixed memory.fits=16GiB
    mprun memory recipe=char_gpt memory.world_size=8 memory.parallel=fsdp2 memory.checkpointing=true

Takes the overrides of a run; each list of values makes columns. The step runs on fake tensors: no
data are loaded, and no memory of the model's size is allocated. Writes `memory.json`, `memory.png`
and `memory.svg` into the run's folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from mprun.cli.arguments import Command, parse_arguments
from mprun.inspect.memory_result import MemorySettings
from mprun.records.console import warn
from mprun.records.result import measuring, show

COMMAND = Command("memory", (MemorySettings,))


def memory_command(args: Sequence[str]) -> int:
    """Run `mprun memory`; the exit status."""
    from mprun.config.settings import of_several_processes, parse_size, take

    known = parse_arguments(COMMAND, args)
    all_settings, overrides = take(known.overrides, MemorySettings)
    settings = all_settings.own(MemorySettings)
    if settings.world_size == 1:
        warn(of_several_processes(known.overrides, "memory.parallel"))
    if settings.fits is not None:
        parse_size(settings.fits, "memory.fits")  # raises before a folder is made
    from mprun.inspect.memory import memory_of_modes, plan_modes, warnings_of
    from mprun.records.files import new_folder

    planned = plan_modes(overrides, known.config_dir, settings.against)
    warn(warnings_of(planned.modes))
    folder = new_folder(planned.modes[0].composed.config.run.dir)
    with measuring(folder) as report:
        result = memory_of_modes(planned, settings, report)
    return show(result, folder)
