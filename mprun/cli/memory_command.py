"""`mprun memory`: where the memory of a training step goes, modes side by side.

    mprun memory recipe=fashion_mnist precision=fp32,half_sr
    mprun memory recipe=mnist precision=bf16_mixed memory.fits=16GiB
    mprun memory recipe=char_gpt memory.world_size=8 memory.parallel=fsdp2 memory.checkpointing=true

Takes the overrides of a run; each list of values makes columns. The step runs on fake tensors: no
data are loaded, and no memory of the model's size is allocated. Writes `memory.json`, `memory.png`
and `memory.svg` into the run's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mprun.cli.arguments import parse_arguments
from mprun.cli.step_commands import traceback_in
from mprun.console import (
    JobProgress,
    print_line,
    print_table,
    print_text,
    stderr_console,
    stdout_console,
    warn,
)
from mprun.errors import EXIT_OK

if TYPE_CHECKING:
    from mprun.config.settings import MemorySettings
    from mprun.results.memory_result import MemoryRecord, ProcessLayout


def memory_command(args: Sequence[str]) -> int:
    """Run `mprun memory`; the exit status."""
    from mprun.config.settings import of_several_processes, parse_size, take

    known = parse_arguments("memory", args)
    all_settings, overrides = take(known.overrides, "memory")
    settings = all_settings.memory
    if settings.world_size == 1:
        warn(of_several_processes(known.overrides, "memory.parallel"))
    if settings.fits is not None:
        parse_size(settings.fits, "memory.fits")  # raises before a folder is made
    from mprun.experiments.memory_by_mode import plan_modes, side_by_side, warnings_of
    from mprun.records.files import json_text, new_folder, write_files
    from mprun.results.memory_result import answer, detailed_modes, module_table, peak_table

    planned = plan_modes(overrides, known.config_dir, settings.against)
    modes = planned.modes
    warn(warnings_of(modes))
    console, folder = stdout_console(), new_folder(modes[0].composed.config.run.dir)
    given = [key for mode in modes for key in mode.composed.given]
    plans = [(mode.label, mode.plan) for mode in modes]
    with JobProgress(stderr_console()) as progress, traceback_in(folder):
        layout = _layout(settings)
        record = side_by_side(plans, given, settings.fits, progress.begin, layout, planned.left_out)
    print_line(console, _header(record))
    if (sentence := answer(record)) is not None:
        print_text(console, sentence)
    print_table(console, peak_table(record))
    for mode in detailed_modes(record):
        print_table(console, module_table(mode, record.modes[0], settings.depth))
    for note in _notes(record):
        print_text(console, note)
    names = write_files(folder, {"memory.json": json_text(record)})
    if settings.picture:
        from mprun.report.plots.measurement_plots import save_memory_plot

        names += [path.name for path in save_memory_plot(record, folder)]
    print_line(console, f"written: {folder}/{', '.join(names)}")
    return EXIT_OK


def _layout(settings: MemorySettings) -> ProcessLayout:
    from mprun.results.memory_result import ProcessLayout

    if settings.world_size == 1:
        return ProcessLayout(checkpointing=settings.checkpointing)
    return ProcessLayout(settings.world_size, settings.parallel.value, settings.checkpointing)


def _header(record: MemoryRecord) -> str:
    batch, layout = record.modes[0].batch, record.layout
    pieces = f" ({batch.accumulate} x {batch.micro})" if batch.accumulate > 1 else ""
    each = " per process" if layout.parallel else ""
    how = f", one of {layout.world_size} processes of {layout.parallel}" if layout.parallel else ""
    if layout.checkpointing:
        how += ", blocks checkpointed"
    return (
        f"recipe {record.recipe}, batch {batch.effective}{pieces}{each}, "
        f"{record.modes[0].optimizer.name}, {record.device}{how}; counted on {_kind(record)}"
    )


def _kind(record: MemoryRecord) -> str:
    real = [mode.label for mode in record.modes if mode.why_real is not None]
    if not real:
        return "fake tensors"
    return "a real step" if len(real) == len(record.modes) else "fake tensors or a real step"


def _notes(record: MemoryRecord) -> Iterator[str]:
    from mprun.results.memory_result import change_text

    for label, reason in record.left_out.items():
        yield f"left out: {label}: {reason}"
    if formats := [mode.label for mode in record.modes if mode.policy.get("gemms") != "none"]:
        yield (
            f"note: {', '.join(formats)}: counted with products in 16 bits, an upper bound. The "
            "factors in 8 or 4 bits live as long as a product; the 16-bit copies of weights that "
            "autocast keeps for the backward pass are counted, and layers with such products keep "
            "none"
        )
    for mode in record.modes:
        if mode.why_real is not None:
            yield f"note: the step of {mode.label} is a real one: {mode.why_real}"
    published = record.published
    if published is not None:
        yield (
            f"published for {published.precision} against {published.against} at batch "
            f"{published.batch_size}: {change_text(published.ratio)} ({published.source}); "
            f"here {change_text(published.ratio_here)}"
        )
    for mode in record.modes:
        if mode.fits is not None and not mode.fits.grows:
            yield (
                f"note: the peak of {mode.label} does not grow with every sample: larger "
                "batches than this one may fit"
            )
