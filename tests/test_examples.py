"""The example outputs of the docs are not stale, and the tool that writes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from docs import examples as tool
from docs.examples import (
    CUT,
    PAGES,
    RECIPES,
    ROOT,
    RULE,
    TERMINAL,
    Example,
    digest,
    examples,
    excerpt,
    stale,
)
from tests.example_outputs import OUTPUTS, output

pytestmark = pytest.mark.usefixtures("native_is_fast")

EXAMPLES = list(examples())
BLOCK = re.compile(r"^(.*)\n```(\w*)\n((?:.*\n)*?)```$", re.MULTILINE)
"""The line above it, its language, its lines."""
COMMANDS = re.compile(r"(#|\$ )?\s*((\w+=\S+ )*(mprun|make|pip|source|export) .*)?")
"""A line of a block that shows commands, not their output."""


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that wraps nothing, and recipes of the docs that can be imported."""
    for name, value in {**TERMINAL, "COLUMNS": "1000"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [*sys.path, str(RECIPES)])


# ---- the docs ------------------------------------------------------------------------------------


def unwrapped(example: Example) -> Example:
    """The example with each sentence that its terminal broke in one line again.

    A line was broken if the first word of the next one has no room in it.
    """
    lines: list[str] = []
    room = -1
    for line in example.block.splitlines():
        is_broken = line not in ("", CUT) and 0 <= room <= len(line.split()[0])
        if is_broken and not in_table(line):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        room = -1 if in_table(line) else int(example.columns) - len(line)
    return replace(example, block="\n".join(lines) + "\n")


def in_table(line: str) -> bool:
    return RULE.match(line) is not None or line.startswith("   ") or "  " in line.strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.example)
def test_no_example_is_stale(example: Example) -> None:
    assert not stale(unwrapped(example), output(example)), (
        f"run `make docs EXAMPLES={example.example}`"
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.example)
def test_no_example_was_made_by_hand(example: Example) -> None:
    assert example.is_as_made, f"run `make docs EXAMPLES={example.example}`"


def test_each_example_has_a_name_and_an_output_to_compare_with() -> None:
    names = [example.example for example in EXAMPLES]
    assert len(set(names)) == len(names)
    assert set(OUTPUTS) == {e.example for e in EXAMPLES if not e.program}


def unmarked() -> Iterator[str]:
    """The blocks that are neither commands nor marked."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for above, language, lines in BLOCK.findall(text):
            is_commands = all(COMMANDS.fullmatch(line) for line in lines.splitlines())
            if not language and not is_commands and above not in ("-->", "<!-- no output -->"):
                yield f"{page.relative_to(ROOT)}: {lines.splitlines()[0]}"


def test_each_output_has_a_mark() -> None:
    assert list(unmarked()) == [], "put a mark above it, see docs/examples.py"


# ---- what is shown -------------------------------------------------------------------------------

OUTPUT = """\
warning: something
trained mnist into outputs/2026-11-22/10-11-12-3

            ms  ratio  verdict
────────────────────────────────
fp32      12.5      -  baseline
bf16       6.2   0.5x  about 3
                       more seeds

bf16 inconclusive: the interval reaches beyond the margin
"""
TABLE = Example(Path("page.md"), "", "table", run="mprun x", show=[["^ +ms", "^bf16 inc"]])


def block(example: Example, text: str = OUTPUT) -> Example:
    return replace(example, block=excerpt(text, example) + "\n")


# ---- what is stale -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("12.5      -", "1,234.5   -"),  # a figure
        ("-  baseline", "0.1x  baseline"),  # a figure where there was none
        ("outputs/2026-11-22/10-11-12-3", "outputs/mine"),
        ("3\n                       more seeds", "3 more seeds"),  # nothing wraps
        ("about 3", "about 1"),
        ("bf16 inconclusive", "fp16_mixed inconclusive"),
        ("ms  ratio", "ms   ratio"),  # widths
    ],
)
def test_other_figures_are_the_same_form(before: str, after: str) -> None:
    assert before in OUTPUT
    for example in (TABLE, replace(TABLE, show=["inconclusive"])):
        assert stale(block(example), OUTPUT.replace(before, after)) == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("ratio", "share", "no cell has 'ratio'"),
        ("  ratio", "", "no cell has 'ratio'"),
        ("  verdict", "  pairs  verdict", "the block has no column 'pair'"),
        ("baseline", "reference", "no cell has 'baseline'"),
        ("more seeds", "further seeds", "no cell has 'more seed'"),
    ],
)
def test_another_table_is_stale(before: str, after: str, problem: str) -> None:
    assert before in OUTPUT
    (text, *_) = stale(block(TABLE), OUTPUT.replace(before, after))
    assert text.startswith(problem)


# ---- writing them --------------------------------------------------------------------------------

PAGE = """\
Before.

```python
print(6 * 7)
```

<!-- example: answer
program: above
-->
```
41
```

<!-- example: words
run: echo "one $COLUMNS $TERM"; ls *.py; false
prompt: yes
columns: 77
status: 1
cost: timed
made: 2026-11-21 01234567
-->
```
$ other
```
"""


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Path("page.md")
    path.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(tool, "PAGES", (path.resolve(),))
    monkeypatch.setattr(tool, "ROOT", Path.cwd())
    return path


def test_blocks_are_written_from_commands(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == 0
    after_quick = page.read_text(encoding="utf-8")
    assert after_quick == PAGE.replace("\n41\n", "\n42\n")
    assert tool.main(["words"]) == 0
    block = (
        '$ echo "one $COLUMNS $TERM"; ls *.py; false\n'
        "one 77 dumb\nmy_model.py\nnorms.py\npairs.py\nspirals.py\nvit.py\n"
    )
    made = f"{date.today()} {digest(block)}"
    text = page.read_text(encoding="utf-8")
    assert text.partition("made: ")[2] == f"{made}\n-->\n```\n{block}```\n"
    assert all(example.is_as_made for example in examples())
    page.write_text(text.replace("one 77", "one 78"), encoding="utf-8")
    assert [x.is_as_made for x in examples()] == [True, False]
    page.write_text(text, encoding="utf-8")
    assert tool.main(["quick"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "page.md: answer rewritten",
        "page.md: words rewritten",
        "page.md: answer as it was",
    ]


def test_a_command_that_fails_leaves_the_block(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.replace("status: 1\n", "")
    page.write_text(text, encoding="utf-8")
    assert tool.main(["timed"]) == 1
    assert "words: echo" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == text
    assert tool.main(["word"]) == 2
    assert "legal: answer, long, quick, timed, words" in capsys.readouterr().out
