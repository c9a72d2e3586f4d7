"""Tab completion: `mprun --completion bash` prints a script for bash, zsh or fish.

A script that asks Python at each key press would take a third of a second for its imports. So the
printed script has all names inside, and needs no Python. It completes commands, groups and their
options, fields, values of fields that have few, and lists of values (`precision=fp32,bf<TAB>`).
Names in a folder of the user's own (`--config-dir`) are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from mprun.cli.arguments import Command
from mprun.config import settings
from mprun.config.reference import GROUPS, Field, leaves, options
from mprun.config.schema import DEVICES
from mprun.errors import UsageError, hint

SHELLS = ("bash", "zsh", "fish")
OPTIONS = (
    *("--config-dir", "--help", "--multirun", "-m", "--verbose"),
    *("--show-config", "--version", "--completion"),
)
MODES = ("memory.against", "compare.baseline")  # Settings that name a precision mode


@dataclass(frozen=True)
class _Names:
    """What can be completed."""

    keys: Mapping[str, Sequence[str]]
    """Command to what it takes; `*` for a run, which has no command."""
    values: Mapping[tuple[str, ...], Sequence[str]]  # Keys to the values they have in common


def completion_script(shell: str, commands: Sequence[Command]) -> str:
    """The script for a shell.

    Args:
        shell: one of `SHELLS`.
        commands: all of them.

    Raises:
        UsageError: another shell.
    """
    if shell not in SHELLS:
        received = f"'{shell}' is not a supported shell" if shell else "a shell is missing"
        raise UsageError(
            f"--completion: {received}; legal: {', '.join(SHELLS)}{hint(shell, SHELLS)}"
        )
    names = _names(commands)
    cases = _fish_cases if shell == "fish" else _cases
    text = (files("mprun.cli") / f"completion.{shell}").read_text(encoding="utf-8")
    for place, lines in {
        "@VALUES@": cases("values", names.values),
        "@KEYS@": cases("keys", {(command,): keys for command, keys in names.keys.items()}),
        "@COMMANDS@": [" ".join(c.name for c in commands)],
        "@OPTIONS@": [" ".join(OPTIONS)],
    }.items():
        text = text.replace(place, "\n".join(lines))
    return text


def _names(commands: Sequence[Command]) -> _Names:
    fields = {**leaves(), **settings.fields([x for c in commands for x in c.settings])}
    of_run = [f"{key}=" for key in (*GROUPS, *leaves()) if key not in {f"{g}.name" for g in GROUPS}]
    keys = {
        c.name: (
            *(of_run if c.instead is None else c.instead),
            *(f"{key}=" for key in (settings.fields(c.settings) if c.settings else ())),
        )
        for c in commands
    }
    by_values: dict[tuple[str, ...], list[str]] = {}
    for key in (*GROUPS, *fields):
        values = tuple(options(key)) if key in GROUPS else _values(fields[key])
        if values:
            by_values.setdefault(values, []).append(key)
    return _Names({**keys, "*": of_run}, {tuple(k): values for values, k in by_values.items()})


def _values(field: Field) -> tuple[str, ...]:
    if field.key in MODES:
        return tuple(options("precision"))
    if field.key == "device":  # a text, since it may have a number: cuda:1
        return ("auto", *DEVICES)
    return ("true", "false") if field.type is bool else () if field.is_list else field.choices


def _cases(variable: str, lists: Mapping[tuple[str, ...], Sequence[str]]) -> Iterator[str]:
    """Branches of `case` in bash and zsh."""
    for keys, names in lists.items():
        yield f"            {'|'.join(keys)}) {variable}=({' '.join(names)}) ;;"


def _fish_cases(variable: str, lists: Mapping[tuple[str, ...], Sequence[str]]) -> Iterator[str]:
    for keys, names in lists.items():
        quoted = " ".join(keys).replace("*", "'*'")
        yield f"            case {quoted}"
        yield f"                set {variable} {' '.join(names)}"
