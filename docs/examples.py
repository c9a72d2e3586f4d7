"""The example outputs of the docs: written from real commands, compared in form with the code.

An example that was pasted once goes stale when a phrase or a column changes, and no program reads
it, so nobody notices. So a mark, an HTML comment above the block, names the command:

    <!-- example: memory
    run: mprun memory recipe=fashion_mnist precision=fp32,half_sr
    show: [["one training step", " by module"], ^written]
    -->

- `run`: shell commands, run in an empty folder; or `program`: the Python block above.
- `show`: the lines that are shown (default: all): a pattern, or a pair, from the first line with
  one pattern to the line before the next one with the other. `...` stands for lines left out.
- `cut`: patterns whose text is replaced by `...`.
- `file`: the block is this file of the run's folder, not what the command prints.
- `columns`: the width of the terminal (default: 100). `prompt: yes` shows the command too.
- `status`: the exit status (default: 0).
- `cost`: `quick` (default), `timed` (the block shows times: a quiet machine is needed), `long`.
- `made`: the date of the block and its digest, which this program writes; required unless it is
  quick. By the digest a test refuses a block that a person wrote or changed.

    python -m docs.examples                 rewrite the quick ones
    python -m docs.examples timed sweep     others, by cost or by name

Figures differ from machine to machine, so a test cannot compare them. `stale` compares the form: a
block's lines with numbers and names masked, with any output of the same command.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "docs" / "recipes"
"""Recipes of the docs; each command finds them in its folder."""
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TERMINAL = {"FORCE_COLOR": "1", "TERM": "dumb", "LINES": "50", "PYTHONUNBUFFERED": "1"}
"""rich lays its output out as on a terminal, without colours and without redrawing. It takes the
width of a dumb terminal from the environment only if the height is there too."""

MARK = re.compile(r"^<!-- (example: .*?)-->\n```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_FOLDER = re.compile(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d(-\d+)?")
CUT = "..."
COSTS = ("quick", "timed", "long")


class ExampleError(Exception):
    """A mark is wrong, or its command did not give what is to be shown."""


@dataclass(frozen=True)
class Example:
    """A block of output and its mark; the fields are described above."""

    page: Path
    block: str
    example: str
    """Its name."""
    run: str = ""
    program: str = ""
    show: Sequence[str | Sequence[str]] = ()
    cut: Sequence[str] = ()
    file: str = ""
    columns: str = "100"
    prompt: str = ""
    status: str = "0"
    cost: str = "quick"
    made: str = ""

    def __post_init__(self) -> None:
        if self.cost not in COSTS or (self.cost != "quick" and not self.made):
            raise ExampleError(
                f"{self.example}: cost={self.cost!r}, made={self.made!r}: legal are quick, timed "
                "and long, the last two with made: DATE"
            )

    @property
    def script(self) -> str:
        """The commands that make the output."""
        return "python train.py" if self.program else self.run

    @property
    def is_as_made(self) -> bool:
        """Whether the block is what this program wrote last; a quick one is compared with a run."""
        return self.cost == "quick" or self.made.endswith(f" {digest(self.block)}")


def digest(block: str) -> str:
    """Eight hexadecimal digits of a block."""
    return hashlib.sha256(block.encode()).hexdigest()[:8]


def examples() -> Iterator[Example]:
    """The marked blocks of the docs.

    Raises:
        ExampleError: a mark has an unknown field or value.
    """
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in MARK.finditer(text):
            fields = yaml.load(match[1], yaml.BaseLoader)
            if "program" in fields:
                fields["program"] = PROGRAM.findall(text, 0, match.start())[-1]
            try:
                yield Example(page, match[2], **fields)
            except TypeError as error:
                raise ExampleError(f"{page.name}, {match[1].splitlines()[0]}: {error}") from None


# ---- making the blocks ---------------------------------------------------------------------------


def excerpt(text: str, example: Example) -> str:
    """What an example shows of an output.

    Raises:
        ExampleError: a pattern fits no line.
    """
    lines = [RUN_FOLDER.sub("outputs/DATE/TIME", line.rstrip()) for line in text.splitlines()]
    for pattern in example.cut:
        lines = [re.sub(pattern, CUT, line) for line in lines]
    shown = set(range(len(lines))) if not example.show else set[int]()
    for item in example.show:
        first, before = (item, None) if isinstance(item, str) else item
        starts = [n for n, line in enumerate(lines) if re.search(first, line)]
        if not starts:
            raise ExampleError(f"{example.example}: no line with {first!r} in\n{text}")
        if before is None:
            shown.update(starts)
        else:
            rest = range(starts[0] + 1, len(lines))
            end = next((n for n in rest if before and re.search(before, lines[n])), len(lines))
            shown.update(range(starts[0], end))
    return "\n".join(_without_rest(lines, shown, bool(example.prompt)))


def _without_rest(lines: Sequence[str], shown: set[int], has_prompt: bool) -> list[str]:
    """The lines shown; of others that hold text, one `...`, but not at the end or the start."""
    kept: list[str] = []
    for is_shown, numbers in groupby(range(len(lines)), lambda n: n in shown):
        part = [lines[n] for n in numbers]
        if not is_shown and any(part):
            while kept and not kept[-1]:
                kept.pop()
            part = [CUT] if kept or has_prompt else []
        kept += part
    while kept and kept[-1] in ("", CUT):
        kept.pop()
    while kept and not kept[0]:
        kept.pop(0)
    return kept


class Runs:
    """The outputs of commands, each run once however many examples show a part of it.

    Args:
        folder: where each command gets a folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[tuple[str, str, str], tuple[str, Path]] = {}

    def block(self, example: Example) -> str:
        """The new text of an example's block.

        Raises:
            ExampleError: the command ends with another status, or lacks what is to be shown.
        """
        key = (example.script, example.columns, example.program)
        if key not in self._done:
            self._done[key] = self._run(example)
        text, folder = self._done[key]
        if example.file:
            (path,) = folder.glob(f"outputs/*/*/{example.file}")
            text = path.read_text(encoding="utf-8")
        prompt = f"$ {example.script}\n" if example.prompt else ""
        return f"{prompt}{excerpt(text, example)}\n"

    def _run(self, example: Example) -> tuple[str, Path]:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        leave_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(RECIPES, folder, dirs_exist_ok=True, ignore=leave_out)
        if example.program:
            (folder / "train.py").write_text(example.program, encoding="utf-8")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(
            ["bash", "-c", example.script],
            cwd=folder,
            env={**os.environ, **TERMINAL, "COLUMNS": example.columns, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != int(example.status):
            raise ExampleError(
                f"{example.example}: {example.script}: status {done.returncode}\n{done.stdout}"
            )
        return done.stdout, folder


def rewrite(example: Example, block: str) -> bool:
    """Put a new block into the page, with today's date; whether it differs from the old one."""
    if block == example.block and example.is_as_made:
        return False
    text = example.page.read_text(encoding="utf-8")
    for match in MARK.finditer(text):
        if match[1].splitlines()[0].split() == ["example:", example.example]:
            mark = re.sub(r"(?m)^made: .*$", f"made: {date.today()} {digest(block)}", match[1])
            new = f"<!-- {mark}-->\n```\n{block}```"
            text = text[: match.start()] + new + text[match.end() :]
            break
    example.page.write_text(text, encoding="utf-8")
    return True


# ---- comparing the form --------------------------------------------------------------------------

FIGURE = re.compile(
    r"[\w.+<>^/…-]*\d(?:[\w.^/…-]|,(?=\d))*%?"  # 65,536, -0.16, 2^16, <0.01%, bf16_mixed, 4.weight
    r"|/?\w+(?:[./…]\w+)+"  # fc.weight, outputs/DATE/TIME/ops.yaml
    r"|\b(?:nan|inf)\b|(?<!\S)-(?!\S)"
)
COUNTED = re.compile(r"\b(epoch|mode|pair|run|sample|seed|step|thread|variant)s\b")
RULE = re.compile(r"^\s*[─━]+\s*$")
GAPS = re.compile(r"\s{2,}|[│┃|]")


def stale(example: Example, output: str) -> list[str]:
    """The parts of a block that its command prints no more; of none, an empty list.

    Figures, paths and names with a digit or a dot are all the same. A line of text must be a line
    of the output. In a table the columns' widths follow from the figures, so a cell must be a part
    of a cell. A column of the output that the block lacks is reported, and so is a line, if the
    block shows the whole output.

    Args:
        example: the block.
        output: any output of the command, not wrapped.
    """
    block = example.block.splitlines()[1:] if example.prompt else example.block.splitlines()
    printed = [_masked(line) for line in output.splitlines()]
    cells = {cell for line in printed for cell in _cells(line)}
    problems = []
    for line in block:
        masked = _masked(line)
        if RULE.match(line) or not masked.strip() or masked.strip() == CUT:
            continue
        if _is_of_table(line):
            problems += [
                f"no cell has {cell!r}: {line}"
                for cell in _cells(masked)
                if not any(f" {cell} " in f" {whole} " for whole in cells)
            ]
        elif not any(_fits(masked, other) for other in printed):
            problems.append(f"no line is like: {line}")
    missing = _headings(excerpt(output, example).splitlines()) - _headings(block)
    problems += [f"the block has no column {word!r}" for word in sorted(missing)]
    if not example.show:
        shown = {_masked(line) for line in block}
        problems += [f"the block lacks a line like: {x}" for x in printed if x not in shown]
    return problems


def _masked(line: str) -> str:
    """A line with `#` for each figure; `3 seeds` and `1 seed` are the same."""
    return COUNTED.sub(r"\1", FIGURE.sub("#", line)).rstrip()


def _is_of_table(line: str) -> bool:
    return line.startswith(" ") or GAPS.search(line.strip()) is not None


def _cells(masked: str) -> list[str]:
    return [cell for cell in GAPS.split(masked.strip()) if cell and not RULE.match(cell)]


def _fits(masked: str, other: str) -> bool:
    """Whether a line is another one, or that one with something cut out."""
    parts = [re.escape(part) for part in masked.split(CUT)]
    return re.fullmatch(".*".join(parts), other) is not None


def _headings(lines: Sequence[str]) -> set[str]:
    """The words of the headings of all tables: what is directly above a rule."""
    words: set[str] = set()
    for n, line in enumerate(lines):
        if RULE.match(line):
            above = n - 1
            while above >= 0 and _is_of_table(lines[above]):
                words.update(_masked(lines[above]).split())
                above -= 1
    return words - {"#"}


def main(names: Iterable[str]) -> int:
    """Rewrite the examples of these names or costs; the exit status."""
    wanted, known = set(names) or {"quick"}, list(examples())
    legal = {*COSTS, *(e.example for e in known)}
    if wrong := wanted - legal:
        print(f"there is no example {', '.join(wrong)}; legal: {', '.join(sorted(legal))}")
        return 2
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for example in known:
            if not {example.example, example.cost} & wanted:
                continue
            try:
                changed = rewrite(example, runs.block(example))
            except ExampleError as error:
                print(error)
                failed = True
            else:
                page = example.page.relative_to(ROOT)
                print(f"{page}: {example.example} {'rewritten' if changed else 'as it was'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
