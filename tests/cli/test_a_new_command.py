"""A command that measures something is three files; nothing else has to name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "inspect/width.py": """
from mprun.records.result import Result
from mprun.inspect.width_result import WidthSettings, width_table


def width_of(name: str, settings: WidthSettings) -> Result:
    return Result({"width": settings.bits}, [f"{name} is narrow", width_table(settings.bits)])
""",
    "inspect/width_result.py": '''
from dataclasses import dataclass

from mprun.records.console.fitted_table import FittedTable, figure_column
from mprun.records.policy_columns import Count


@dataclass
class WidthSettings:
    """How wide it is."""

    bits: Count = 16
    """Bits of a number."""


def width_table(bits: int) -> FittedTable:
    return FittedTable("width", figure_column("bits"), rows=[bits])
''',
    "cli/width_command.py": '''"""`mprun width`: how wide numbers are.

    mprun width recipe=mnist width.bits=8
"""

from collections.abc import Sequence

from mprun.cli.arguments import Command, parse_arguments
from mprun.records.result import show
from mprun.inspect.width_result import WidthSettings

COMMAND = Command("width", (WidthSettings,))


def width_command(args: Sequence[str]) -> int:
    from mprun.config import compose
    from mprun.config.settings import take

    known = parse_arguments(COMMAND, args)
    settings, overrides = take(known.overrides, WidthSettings)
    composed = compose(overrides, known.config_dir)

    from mprun.inspect.width import width_of

    return show(width_of(composed.config.recipe.name, settings.own(WidthSettings)))
''',
}
START = """
import sys
from mprun import cli, inspect, results
for package in (cli, inspect, results):
    package.__path__.append(f"new/{package.__name__.partition('.')[2]}")
from mprun.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        ("--help", 0, ["  width           how wide numbers are\n", "  new-recipe "]),
        ("width --help", 0, ["mprun width recipe=mnist", "  width.bits = 16  Bits of a number."]),
        ("--completion bash", 0, [" new-recipe width)", "width.bits="]),
        ("width recipe=mnist width.bits=8", 0, ["mnist is narrow\n", "\nbits\n", "\n   8\n"]),
        ("width recipe=mnist width.bits=0", 2, ["width.bits=0: legal is 1 or more"]),
        ("width recipe=mnist width.bit=1", 2, ["there is no field 'width.bit'; did you mean"]),
        ("widht", 2, ["there is no command 'widht'", "did you mean 'width'"]),
    ],
)
def test_help_completion_and_settings_find_it(words: str, status: int, shown: list[str]) -> None:
    for name, text in FILES.items():
        path = Path("new") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", START, *words.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    for text in shown:
        assert text in done.stdout + done.stderr
