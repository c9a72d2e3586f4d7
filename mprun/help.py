"""`mprun --help`, made from the commands, the files in conf/ and the schema's own texts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mprun.config.reference import GROUPS, leaves, options

COMMON = (
    "seed",
    "device",
    "execution",
    "speed",
    "train.epochs",
    "train.max_steps",
    "train.max_time_s",
    "train.batch_size",
    "train.eval_batch_size",
    "train.lr",
    "train.clip_norm",
    "train.accumulate",
    "train.scheduler",
    "train.log_every",
    "data.source",
    "data.root",
    "run.dir",
)

INTRO = """\
mprun: train a model in a chosen numerical precision and see what it costs and what it buys.

  mprun recipe=fashion_mnist precision=bf16_mixed      train
  mprun recipe=mnist precision=fp32 seed=1 train.lr=2e-3
  mprun recipe=mnist preset=smoke                      a check of under 30 seconds
"""

OUTRO = """\
Options: --config-dir FOLDER (a folder with recipe/*.yaml of your own), --show-config (print the
resolved configuration and stop), --version, --help.
Environment: MPRUN_DATA (folder of the data sets), NO_COLOR.
Exit status: 0 done, 1 the run failed, 2 usage or configuration, 130 Ctrl-C, 143 SIGTERM.
Every field: docs/configuration.md
"""


def show_help(commands: Sequence[tuple[str, str]]) -> None:
    """Print the help to standard output."""
    console = Console(highlight=False, markup=False)
    console.print(INTRO)
    console.print(_section("Commands (the first word)", commands))
    console.print()
    for group in GROUPS:
        console.print(_section(f"{group}=", list(options(group).items())))
        console.print()
    fields = leaves()
    rows = [(f"{key} = {fields[key].default_text}", fields[key].doc) for key in COMMON]
    console.print(_section("Common overrides and their defaults", rows))
    console.print()
    console.print(OUTRO, end="")


def _section(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, box=None, show_header=False, title_justify="left", pad_edge=False)
    table.add_column(no_wrap=True, min_width=16)
    table.add_column()
    for name, text in rows:
        table.add_row(f"  {name}", text)
    return table
