"""The help, made from the commands, conf/ and the texts of the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from shutil import get_terminal_size

from mprun.config import settings
from mprun.config.reference import GROUPS, leaves, options

# The fields that help lists; docs/reference/configuration.md has all
COMMON = (
    *("seed", "device", "execution", "train.epochs", "train.max_steps", "train.max_time_s"),
    *("train.batch_size", "train.eval_batch_size", "train.lr", "train.clip_norm"),
    *("train.accumulate", "train.scheduler", "train.log_every", "train.checkpoint_every_steps"),
    *("precision.layers", "op_lists.lower_file", "op_lists.fp32_file", "op_lists.promote_file"),
    *("op_lists.strict", "op_lists.verbose", "loss_scale.value", "debug.fp_exceptions"),
    *("data.source", "data.root", "run.dir", "run.resume"),
)

INTRO = """\
mprun: train a model in a numerical precision, and measure what it costs and
what it saves.

  mprun recipe=fashion_mnist precision=bf16_mixed
  mprun recipe=mnist precision=fp32 seed=1 train.lr=2e-3
  mprun -m recipe=mnist precision=fp32,bf16_mixed seed=0,1,2       (a sweep)
  mprun recipe=my.py                        (a model of your own)
  mprun run.resume=last                     (resume the newest run)
"""

OTHER_NAMES = """\
  Lightning's names (bf16-mixed, 16-mixed, 32-true, ...) and Keras'
  (mixed_bfloat16, mixed_float16, float32, ...) are accepted for these.
"""

OWN_RECIPE = "Your model, in a file; my.py:NAME for one of several classes"

OUTRO = """\
Options: -m (run every combination of the values listed), --config-dir FOLDER
(a folder with recipe/*.yaml of your own), --show-config (print the resolved
configuration and stop), --version, --help.
Environment: MPRUN_DATA (folder of the data sets), NO_COLOR.
Exit status: 0 done, 1 the run failed, 2 usage or configuration, 3 a fail_if
condition, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
Your own model: docs/tutorials/your_model.md
Every field: docs/reference/configuration.md
"""


def show_help(commands: Sequence[tuple[str, str]]) -> None:
    """Print the help to standard output."""
    print(INTRO)
    print(_section("Commands (the first argument; mprun COMMAND --help)", commands))
    for group in GROUPS:
        own = [("path/to/my.py", OWN_RECIPE)] if group == "recipe" else []
        print(_section(f"{group}=", [*options(group).items(), *own]))
        if group == "precision":
            print(OTHER_NAMES)
    fields = leaves()
    rows = [(f"{key} = {fields[key].default_text}", fields[key].doc) for key in COMMON]
    print(_section("Common overrides and their defaults", rows))
    print(OUTRO, end="")


def show_command(text: str, sections: Sequence[str | type]) -> None:
    """Print the help of one command: its module's text and its settings."""
    print(text, end="\n\n")
    fields = settings.fields(sections) if sections else {}
    rows = [(f"{key} = {field.default_text}", field.doc) for key, field in fields.items()]
    if rows:
        print(_section("Settings and their defaults", rows))
    print("Overrides of a run: mprun --help", end="\n")


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A title over two columns; the second is wrapped to the terminal, the first is not."""
    column = max(14, *(len(name) for name, _ in rows)) + 4
    width = max(column + 30, get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * column
    lines = [title]
    for name, text in rows:
        wrapper.initial_indent = f"  {name}".ljust(column)
        lines.append(wrapper.fill(text))
    return "\n".join(lines) + "\n"
