"""`mprun memory`: where the memory of a training step goes, modes side by side.

    mprun memory recipe=fashion_mnist precision=fp32,half_sr
    mprun memory recipe=mnist precision=bf16_mixed memory.fits=16GiB

Takes the overrides of a run; each list of values makes columns. The step runs on fake tensors: no
data are loaded, nothing of the model's size is allocated. Leaves `memory.json`, `memory.png` and
`memory.svg` in the run's folder.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.step_commands import without_effect
from mprun.cli.train_command import parse as parse_words
from mprun.errors import EXIT_OK, RunFailedError, UsageError

if TYPE_CHECKING:
    from mprun.assemble import Plan
    from mprun.config import Composed
    from mprun.config.settings import MemorySettings
    from mprun.records.memory_record import MemoryRecord

OF_A_MODE = ("precision", "op_lists", "loss_scale", "execution")
"""First parts of keys that belong to one mode, and are not asked of the one it is set against."""

NO_CUDA = (
    "device=cuda: PyTorch finds no CUDA device here, and autograd needs one even on fake tensors; "
    "legal here: device=cpu, which plans the same tensors with the CPU's choice of optimizer "
    "kernels and op lists"
)


@dataclass(frozen=True)
class Column:
    """A mode to show."""

    composed: Composed
    extra: str
    """The values of listed overrides besides the mode, as they were written."""


def memory_command(words: Sequence[str]) -> int:
    """Run `mprun memory` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the overrides or settings, or a folder that holds something.
        RunFailedError: the model's code does not run on fake tensors.
    """
    from mprun.config.settings import take
    from mprun.config.sizes import parse_size

    settings, rest = take(words, "memory")
    arguments = parse_words(rest)
    if arguments.multirun or arguments.show_config:
        raise UsageError(
            "mprun memory shows the modes of a list side by side by itself "
            "(precision=fp32,half_sr); leave out the option"
        )
    if settings.memory.fits is not None:
        parse_size(settings.memory.fits, "memory.fits")  # refused before anything is made
    columns = _columns(arguments.overrides, arguments.config_dir, settings.memory.against)
    return _show(columns, settings.memory)


def _columns(words: Sequence[str], config_dir: Path | None, against: str | None) -> list[Column]:
    """What is shown, the mode the others are set against first."""
    from mprun.config import compose
    from mprun.config.compose import parse
    from mprun.config.multirun import combinations

    parsed = [parse(word) for word in words]
    listed = [n for n, o in enumerate(parsed) if o.is_sweep_override()]
    shown = [n for n in listed if parsed[n].key_or_group != "precision"]
    found = [
        Column(compose(words, config_dir), " ".join(words[n] for n in shown))
        for words in combinations(parsed)
    ]
    if any(column.composed.config.run.resume is not None for column in found):
        raise UsageError("mprun memory plans a new run: leave out run.resume")
    alone = len(found) == 1 and found[0].composed.config.precision.name != "fp32"
    if against is None and not alone:
        return found
    first = combinations(parsed)[0]
    kept = [word for word, o in zip(first, parsed, strict=True) if not _of_a_mode(o.key_or_group)]
    try:
        composed = compose([*kept, f"precision={against or 'fp32'}"], config_dir)
    except UsageError as error:
        raise error if against is None else UsageError(f"memory.against: {error}") from None
    extra = " ".join(first[n] for n in shown)
    others = [column for column in found if column.composed.resolved != composed.resolved]
    return [Column(composed, extra), *others]


def _of_a_mode(key: str) -> bool:
    return key.partition(".")[0] in OF_A_MODE


def _show(columns: Sequence[Column], settings: MemorySettings) -> int:
    from mprun.console import print_line, stdout_console, warn
    from mprun.experiments.memory_by_mode import side_by_side
    from mprun.records.run_record import new_folder
    from mprun.report.memory_tables import category_table, module_table

    plans = [_plan(column.composed) for column in columns]
    console = stdout_console()
    warn(_warnings(columns, plans))
    folder = new_folder(columns[0].composed.config.run.dir)
    print_line(console, _header(plans[0]))
    named = [_label(column, chosen) for column, chosen in zip(columns, plans, strict=True)]
    given = [key for column in columns for key in column.composed.given]
    try:
        record = side_by_side(list(zip(named, plans, strict=True)), given, settings.fits)
    except RunFailedError as error:
        path = folder / "traceback.txt"
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        raise RunFailedError(f"{error} (the traceback is in {path})") from None
    text = json.dumps(asdict(record), indent=1)
    (folder / "memory.json").write_text(text, encoding="utf-8")
    console.print(category_table(record), highlight=False)
    for mode in record.modes:
        table = module_table(mode, record.modes[0], settings.depth)
        console.print(table, highlight=False)
    for note in _notes(record):
        print_line(console, note)
    names = ["memory.json"]
    if settings.picture:
        from mprun.report.plots.memory_plots import save_memory_plot

        names += [path.name for path in save_memory_plot(record, folder)]
    print_line(console, f"written: {folder}/{', '.join(names)}")
    return EXIT_OK


def _plan(composed: Composed) -> Plan:
    import torch

    from mprun.assemble import load_shapes, plan

    config = composed.config
    if config.device.name == "cuda" and not torch.cuda.is_available():
        raise UsageError(NO_CUDA)
    config = replace(config, train=replace(config.train, init_from=None))
    return plan(config, composed.given, load=load_shapes)


def _label(column: Column, chosen: Plan) -> str:
    from mprun.assemble.initial_summary import variant_label

    return " ".join(text for text in (variant_label(chosen), column.extra) if text)


def _warnings(columns: Sequence[Column], plans: Sequence[Plan]) -> Iterator[str]:
    """Each once, of all the modes."""
    said: dict[str, None] = {}
    for column, chosen in zip(columns, plans, strict=True):
        unused = without_effect(column.composed, "memory")
        said.update(dict.fromkeys((*chosen.warnings, *unused)))
        if column.composed.config.train.init_from is not None:
            said["train.init_from has no effect: memory depends on shapes, not on values"] = None
    yield from said


def _header(chosen: Plan) -> str:
    batch = chosen.batch
    pieces = f" ({batch.accumulate} x {batch.micro})" if batch.accumulate > 1 else ""
    return (
        f"recipe {chosen.config.recipe.name}, batch {batch.effective}{pieces}, "
        f"{chosen.config.train.optimizer.name.name}, {chosen.device.type}; counted on fake tensors"
    )


def _notes(record: MemoryRecord) -> Iterator[str]:
    from mprun.report.memory_tables import percent

    published = record.published
    if published is not None:
        yield (
            f"published for {published.precision} against {published.against} at batch "
            f"{published.batch_size}: {percent(published.ratio)} ({published.source}); "
            f"here {percent(published.ratio_here)}"
        )
    for mode in record.modes:
        if mode.fits is not None and not mode.fits.grows:
            yield (
                f"note: the peak of {mode.label} does not grow with every sample: larger "
                "batches than the one found may fit"
            )
