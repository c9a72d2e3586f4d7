"""A question is one file; nothing else has to name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

QUESTION = '''"""`mprun width`: how wide numbers are.

    mprun width recipe=mnist width.bits=8
"""

from dataclasses import dataclass

from mprun.inspect.question import Given, Prepared, Question
from mprun.records.console.fitted_table import FittedTable, figure_column
from mprun.records.policy_columns import Count
from mprun.records.result import Result


@dataclass
class WidthSettings:
    """How wide it is."""

    bits: Count = 16
    """Bits of a number."""


def width_table(bits: int) -> FittedTable:
    return FittedTable("width", figure_column("bits"), rows=[bits])


def prepare(given: Given) -> Prepared:
    from mprun.config import compose

    name = compose(given.overrides, given.config_dir).config.recipe.name
    bits = given.settings(WidthSettings).bits
    return Prepared(lambda _: Result({"width": bits}, [f"{name} is narrow", width_table(bits)]))


QUESTION = Question("width", prepare, (WidthSettings,))
'''
START = """
import contextlib, io, sys
from mprun import inspect
inspect.__path__.append("new")
from mprun.cli.main import main
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = main(words.split())
    print("=====", status, out.getvalue(), sep="\\n")
"""
CALLS: dict[str, tuple[int, list[str]]] = {
    "--help": (0, ["  width           how wide numbers are\n", "  new-recipe "]),
    "width --help": (0, ["mprun width recipe=mnist", "  width.bits = 16  Bits of a number."]),
    "width recipe=mnist width.bits=8": (0, ["mnist is narrow\n", "\nbits\n", "\n   8\n"]),
    "width recipe=mnist width.bits=0": (2, ["width.bits=0: legal is 1 or more"]),
    "width recipe=mnist width.bit=1": (2, ["there is no field 'width.bit'; did you mean"]),
    "widht": (2, ["there is no command 'widht'", "did you mean 'width'"]),
}


def test_help_and_settings_find_it() -> None:
    Path("new").mkdir()
    Path("new/width.py").write_text(QUESTION, encoding="utf-8")
    command = [sys.executable, "-c", START, *CALLS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = done.stdout.split("=====\n")[1:]
    for (words, (status, shown)), answer in zip(CALLS.items(), answers, strict=True):
        assert answer.startswith(f"{status}\n"), words
        assert [text for text in shown if text not in answer] == [], words
