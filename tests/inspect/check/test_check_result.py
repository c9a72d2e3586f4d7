"""The findings of a check: what the file of kinds has, and what the terminal shows of a record."""

from __future__ import annotations

import re
from pathlib import Path

from mprun.inspect.check.check_result import (
    CHECKS,
    ERROR,
    SCHEMA_VERSION,
    SHOWN,
    WARNING,
    CheckRecord,
    Finding,
    ModeChecks,
    check_parts,
    kinds,
)
from mprun.records.result import Result

MPRUN = Path(__file__).resolve().parents[3] / "mprun"


def shown(*modes: ModeChecks) -> list[str]:
    record = CheckRecord(SCHEMA_VERSION, "tiny", "a CPU", {}, 12.6, 60.0, [*modes])
    parts = [*check_parts(record)]
    assert not any(isinstance(x, str) and "\n" in x for x in parts)  # a terminal wraps each line
    return str(Result(record, parts)).splitlines()


def mode(label: str, *findings: Finding, **not_done: str) -> ModeChecks:
    done = {check: 1.0 for check in CHECKS if check not in not_done}
    return ModeChecks(label, label, [*findings], done, not_done)


def test_each_kind_says_all_of_it_and_belongs_to_a_check_in_their_order() -> None:
    checks = [kind.check for kind in kinds().values()]
    assert checks == sorted(checks, key=[*CHECKS].index)
    for name, kind in kinds().items():
        assert kind.check in CHECKS, name
        assert kind.severity in (ERROR, WARNING), name
        assert all((kind.text, kind.example, kind.cure)), name
        assert not kind.text.endswith("."), name


def test_every_kind_that_the_code_names_is_one() -> None:
    named = {
        name
        for path in MPRUN.rglob("*.py")
        for name in re.findall(r'\bFinding\(\s*"(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert "over_memory" in named
    assert named <= {*kinds()}
    text = "".join(path.read_text(encoding="utf-8") for path in MPRUN.rglob("*.py"))
    assert [name for name in kinds() if f'"{name}"' not in text] == []


def test_a_check_without_findings_is_a_line_and_a_table() -> None:
    lines = shown(mode("fp32"), mode("bf16_mixed"))
    assert lines[0] == "passed: tiny in fp32, bf16_mixed: no findings (13 s)"
    assert lines[1].split() == ["mode", *CHECKS]
    assert lines[-1].split() == ["bf16_mixed", *["ok"] * len(CHECKS)]
    assert len(lines) == 5


def test_errors_come_first_and_what_two_modes_share_is_said_once() -> None:
    warning = Finding("near_overflow", "fc", "1 doubling left", at=1.0)
    errors = [Finding("overflow", "fc", f"{n} is inf", "mul", "a.py:3", at=n) for n in (1, 5)]
    lines = shown(mode("bf16_mixed", warning, errors[0]), mode("fp16_mixed", errors[1]))
    assert lines[0] == "failed: tiny in bf16_mixed, fp16_mixed: 1 error, 1 warning (13 s)"
    assert lines[5:] == [
        "error in bf16_mixed, fp16_mixed: overflow: fc, mul at a.py:3: 5 is inf",
        f"  fix: {kinds()['overflow'].cure}",
        "warning in bf16_mixed: near_overflow: fc: 1 doubling left",
        f"  fix: {kinds()['near_overflow'].cure}",
    ]


def test_sizes_of_two_kinds_are_not_compared() -> None:
    """Errors first, then the order of the checks; `at` orders findings of one kind alone."""
    noise = [Finding("all_noise", f"n{n}", "", at=n / 10) for n in (7, 9)]
    sizes = [Finding("overflow", f"o{n}", "", at=n) for n in (7e4, 9e4)]
    memory = Finding("over_memory", "", "", at=1.1)
    far = Finding("far_from_float32", "f", "", at=1.2)
    warning = Finding("near_overflow", "w", "", at=1e9)
    found = [warning, memory, *noise, *sizes, far]
    record = CheckRecord(SCHEMA_VERSION, "tiny", "a CPU", {}, 1.0, 60.0, [mode("x", *found)])
    places = ["f", "o90000.0", "o70000.0", "n9", "n7", "", "w"]
    assert [x.module for _, x in record.merged] == places
    assert [x.module for x in sorted(found, key=lambda x: x.rank)] == places


def test_many_findings_are_counted() -> None:
    found = [Finding("overflow", f"layer.{n}", "inf") for n in range(SHOWN + 2)]
    lines = shown(mode("fp16_mixed", *found))
    assert lines[0].startswith(f"failed: tiny in fp16_mixed: {SHOWN + 2} errors (")
    assert lines[-1] == "(2 more findings in check.json)"
    assert len(lines) == 5 + 2 * SHOWN


def test_what_was_not_done_is_no_silent_success() -> None:
    late = "check.budget_s=60 was used up"
    lines = shown(mode("fp32"), mode("bf16_mixed", agrees=late), mode("x", agrees=late, fits="no"))
    assert lines[0] == "incomplete: tiny in fp32, bf16_mixed, x: 3 unfinished checks (13 s)"
    assert lines[-2:] == [
        f"not done: agrees of bf16_mixed, x: {late}",
        "not done: fits of x: no",
    ]
