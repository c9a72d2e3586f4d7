"""The help and the page of fields, made from the commands, conf/ and the texts of the schema."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from shutil import get_terminal_size

from omegaconf import MISSING

from mprun.config import settings
from mprun.config.recipe_file import RecipeFile, recipe_text
from mprun.config.reference import GROUPS, Field, leaves, options
from mprun.records.mode_names import ALIASES
from mprun.records.run_config import yaml_text

COMMON = (
    "seed",
    "device",
    "execution",
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
    "train.checkpoint_every_steps",
    "precision.layers",
    "op_lists.lower_file",
    "op_lists.fp32_file",
    "op_lists.promote_file",
    "op_lists.strict",
    "op_lists.verbose",
    "loss_scale.value",
    "debug.fp_exceptions",
    "data.source",
    "data.root",
    "run.dir",
    "run.resume",
)

INTRO = """\
mprun: train a model in a numerical precision, and measure what it costs and
what it saves.

  mprun recipe=fashion_mnist precision=bf16_mixed
  mprun recipe=mnist precision=fp32 seed=1 train.lr=2e-3
  mprun -m recipe=mnist precision=fp32,bf16_mixed seed=0,1,2       (a sweep)
  mprun recipe=my.py                        (a model of your own)
  mprun recipe=mnist preset=smoke           (a check of under 30 seconds)
  mprun sweep recipe=mnist seeds=5          (every mode, then the comparison)
  mprun advise recipe=mnist                 (which mode to take here)
  mprun compare outputs/DATE/TIME           (runs side by side, a verdict)
  mprun memory precision=fp32,half_sr       (what a step's memory holds)
  mprun trace recipe=mnist op_lists=hmp     (one step: every op, every cast)
  mprun run.resume=outputs/DATE/TIME        (resume a run)
"""

OTHER_NAMES = """\
  Lightning's names (bf16-mixed, 16-mixed, 32-true, ...) and Keras'
  (mixed_bfloat16, mixed_float16, float32, ...) are accepted for these.
"""

OWN_RECIPE = (
    "Your model, in a file (mprun recipe=my.py --help lists its parameters); my.py:NAME for one "
    "of several classes"
)

OUTRO = """\
Options: -m (run every combination of the values listed), --config-dir FOLDER
(a folder with recipe/*.yaml of your own), --show-config (print the resolved
configuration and stop), --completion SHELL (a script for bash, zsh or fish),
--version, --help.
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


def show_recipe(file: RecipeFile) -> None:
    """Print the help of a recipe that is a file: its parameters and its defaults.

    Raises:
        UsageError: the file cannot be read.
    """
    recipe, fields = recipe_text(file), leaves()
    print(f"{file.name}: {recipe.doc or 'a recipe in ' + str(file.path)}\n")
    for name, parameters in recipe.classes.items():
        rows = [
            (
                f"recipe.model.{p.name}" + ("" if p.default is None else f" = {p.default}"),
                f"{p.doc} ({p.type})" if p.doc else f"({p.type})",
            )
            for p in parameters
        ]
        if rows:
            print(_section(f"Parameters of {name} and their defaults", rows))
        else:
            print(f"{name} has no parameters\n")
    if not recipe.classes:
        shown = [name for name in recipe.functions if not name.startswith("_")]
        print(f"Functions: {', '.join(shown)}; for parameters, make them a class\n")
    defaults = [(f"{key} = {yaml_text(v)}", fields[key].doc) for key, v in recipe.defaults.items()]
    if defaults:
        print(_section("Defaults of this recipe", defaults))
    print("Other overrides: mprun --help", end="\n")


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


PAGE_INTRO = """\
# Configuration: every field

`make docs` writes this page from the schema. Set a field with `name=value` on the command line.
Each line has a field with its default, its legal values and its meaning. A group chooses a file in
`conf/`, which sets the fields without a default. `mprun COMMAND --help` lists the settings of a
command, `mprun recipe=my.py --help` the parameters of a recipe.

## Groups

"""


def configuration_page() -> str:
    """docs/reference/configuration.md: groups with their options, then every field."""
    groups = [f"- `{g}`: " + ", ".join(f"`{name}`" for name in options(g)) for g in GROUPS]
    other_names = ", ".join(f"`{name}` ({mode})" for name, mode in ALIASES.items())
    groups.append(f"\nOther names of modes, recorded under mprun's: {other_names}.")
    fields = [_item(f) for f in leaves().values() if f.key not in {f"{g}.name" for g in GROUPS}]
    return PAGE_INTRO + "\n".join([*groups, "\n## Fields\n", *fields]) + "\n"


def _item(field: Field) -> str:
    """A field as a line, without legal values that its text or default already shows."""
    default = "" if field.default == MISSING else f"={field.default_text}"
    legal = field.legal.removeprefix("a ").removeprefix("one of ").replace(" [name, ...]", "")
    legal = legal.removesuffix(", or null") if field.default is None else legal
    has_value = field.default is not None and field.default != MISSING  # which shows its type
    shown = _names_all(field) if field.choices else has_value
    return f"- `{field.key}{default}`" + ("" if shown else f" ({legal})") + f": {field.doc}"


def _names_all(field: Field) -> bool:
    """Whether a field's text names each of its legal values."""
    return all(re.search(rf"\b{choice}\b", field.doc) for choice in field.choices)
