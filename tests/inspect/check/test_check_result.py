"""The findings of a check: their kinds, the terminal, JUnit's schema, the rules of GitHub."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from junitparser import JUnitXml

from mprun.errors import RunFailedError, UsageError
from mprun.inspect.check.check_result import (
    CHECKS,
    SCHEMA_VERSION,
    CheckRecord,
    Finding,
    ModeChecks,
    check_parts,
    github_commands,
    junit,
    kinds,
    refuse_folder,
    write_reports,
)
from mprun.records.result import Result

MPRUN = Path(__file__).resolve().parents[3] / "mprun"
NASTY = 'a\x00\x1b[31m<b>&"\ud800 ]]> 100%,\r\nnext: ü 😀'


def record(*findings: Finding, not_done: dict[str, str] | None = None) -> CheckRecord:
    done = {check: 0.5 for check in CHECKS if check not in ({"baseline"} | {*(not_done or {})})}
    modes = [
        ModeChecks("fp32", "fp32", done=dict(done)),
        ModeChecks("bf16_mixed", "bf16_mixed", [*findings], done, not_done or {}),
    ]
    return CheckRecord(SCHEMA_VERSION, "tiny", "a CPU", {}, 1234.5, 60.0, modes)


def shown(*modes: ModeChecks) -> list[str]:
    record = CheckRecord(SCHEMA_VERSION, "tiny", "a CPU", {}, 12.6, 60.0, [*modes])
    parts = [*check_parts(record)]
    assert not any(isinstance(x, str) and "\n" in x for x in parts)  # a terminal wraps each line
    return str(Result(record, parts)).splitlines()


def checks(label: str, *findings: Finding, **not_done: str) -> ModeChecks:
    done = {check: 1.0 for check in CHECKS if check not in not_done}
    return ModeChecks(label, label, [*findings], done, not_done)


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


def test_errors_come_first_and_what_two_modes_share_is_said_once() -> None:
    warning = Finding("near_overflow", "fc", "1 doubling left", at=1.0)
    errors = [Finding("overflow", "fc", f"{n} is inf", "mul", "a.py:3", at=n) for n in (1, 5)]
    lines = shown(checks("bf16_mixed", warning, errors[0]), checks("fp16_mixed", errors[1]))
    assert lines[0] == (
        "failed: tiny in bf16_mixed, fp16_mixed: 1 error, 1 warning "
        "(13 s: trains 2, agrees 2, dtypes 2)"
    )
    assert lines[5:] == [
        "error in bf16_mixed, fp16_mixed: overflow: fc, mul at a.py:3: 5 is inf",
        f"  fix: {kinds()['overflow'].cure}",
        "warning in bf16_mixed: near_overflow: fc: 1 doubling left",
        f"  fix: {kinds()['near_overflow'].cure}",
    ]


def test_repeated_layers_are_one_finding_and_what_has_no_place_comes_last() -> None:
    layers = [Finding("overflow", f"blocks.{n}.n1", "1e5", "mul", "a.py:3", at=n) for n in range(4)]
    curve = Finding("other_curve", "", "its mean loss is 2, float32's 1")
    lines = shown(checks("fp16_mixed", curve, *layers))
    assert lines[0].startswith("failed: tiny in fp16_mixed: 2 errors")
    assert lines[4] == "error in fp16_mixed: overflow: blocks.0 to 3.n1, mul at a.py:3: 1e5"
    assert lines[6].startswith("error in fp16_mixed: other_curve: the model")
    assert lines[7] == "  fix: compare whole runs: mprun sweep precision=fp32,fp16_mixed seeds=5"


def test_what_was_not_done_is_no_silent_success() -> None:
    late = "check.budget_s=60 was used up"
    lines = shown(
        checks("fp32"), checks("bf16_mixed", agrees=late), checks("x", agrees=late, fits="no")
    )
    assert lines[0] == (
        "incomplete: tiny in fp32, bf16_mixed, x: 3 unfinished checks "
        "(13 s: trains 3, dtypes 3, robust 3)"
    )
    assert lines[-2:] == [
        f"not done: agrees of bf16_mixed, x: {late}",
        "not done: fits of x: no",
    ]


# ---- JUnit ---------------------------------------------------------------------------------------

# junit-10.xsd of jenkinsci/xunit-plugin: the attributes (required ones first) and the children.
ATTRIBUTES: dict[str, tuple[set[str], set[str]]] = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"group", "time", "skipped", "timestamp", "hostname", "id", "package", "file", "log"},
    ),
    "testcase": ({"name"}, {"time", "classname", "group"}),
    **dict.fromkeys(("failure", "error", "skipped"), (set[str](), {"type", "message"})),
    **dict.fromkeys(("system-out", "system-err"), (set[str](), set[str]())),
}
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testsuite", "properties", "testcase", "system-out", "system-err"},
    "testcase": {"skipped", "error", "failure", "system-out", "system-err"},
}
TIME = re.compile(r"[0-9]*(\.[0-9]{0,3})?")


def conforming(data: bytes) -> Xml.Element:
    """The root of a JUnit file that conforms to the schema, with counts that are right."""
    root = Xml.fromstring(data)
    assert JUnitXml.fromstring(data).tests == int(root.attrib["tests"])  # of another reader
    assert root.tag == "testsuites"
    for element in root.iter():
        required, legal = ATTRIBUTES[element.tag]
        assert required <= {*element.attrib} <= required | legal, element.tag
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set()), element.tag
        assert TIME.fullmatch(element.get("time", "0"))
        if element.tag in CHILDREN:
            assert not (element.text or "").strip()
        for name, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
            if name in element.attrib:
                assert element.get(name) == str(len([*element.iter(tag)]))
    return root


def cases(root: Xml.Element, mode: str) -> dict[str, Xml.Element]:
    (suite,) = [x for x in root if x.get("name") == f"tiny {mode}"]
    return {case.attrib["name"]: case for case in suite}


def test_a_healthy_check_has_a_case_for_each_mode_and_check() -> None:
    root = conforming(junit(record()))
    assert (root.get("tests"), root.get("failures")) == (str(2 * len(CHECKS)), "0")
    for mode in ("fp32", "bf16_mixed"):
        found = cases(root, mode)
        assert [*found] == [*CHECKS]
        assert [name for name, case in found.items() if len(case)] == ["baseline"]
        assert found["trains"].get("classname") == f"mprun.tiny.{mode}"
        assert found["trains"].get("time") == "0.500"


def test_errors_fail_their_case_and_warnings_are_its_output() -> None:
    findings = [
        Finding("near_overflow", "fc", "0.5 doublings left"),
        Finding("all_noise", "rope", "3,000 ± 8", "sin", "model.py:12 (forward)"),
        Finding("overflow", "attention", "inf of 3e5", "mul"),
    ]
    left = {"agrees": "check.budget_s=60 was used up"}
    found = cases(conforming(junit(record(*findings, not_done=left))), "bf16_mixed")
    failure, output = found["robust"]
    assert (failure.tag, output.tag) == ("failure", "system-out")
    assert failure.get("type") == "all_noise,overflow"
    assert failure.get("message") == "all_noise: rope, sin at model.py:12 (forward): 3,000 ± 8"
    assert failure.text
    assert all(kinds()[x].cure in failure.text for x in ("all_noise", "overflow"))
    assert output.text
    assert "near_overflow: fc" in output.text
    assert [x.get("message") for x in found["agrees"]] == [left["agrees"]]
    late = record(Finding("other_curve", "", "x"), not_done=left)  # found before the budget ended
    assert [x.tag for x in cases(conforming(junit(late)), "bf16_mixed")["agrees"]] == ["failure"]


def test_no_text_makes_the_file_unreadable() -> None:
    root = conforming(junit(record(Finding("overflow", NASTY, NASTY, NASTY, NASTY))))
    (failure,) = cases(root, "bf16_mixed")["robust"]
    assert failure.text
    assert '[31m<b>&"? ]]> 100%' in failure.text
    assert "ü 😀" in failure.text
    assert "\x1b" not in failure.text


# ---- GitHub --------------------------------------------------------------------------------------


def unescaped(text: str) -> str:
    """As the runner reads it (ActionCommand.cs): %25 last."""
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def read(line: str) -> tuple[str, dict[str, str], str]:
    """A command as the runner reads it: its name, its properties, its text."""
    assert "\n" not in line
    match = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert match, line
    pairs = [text.split("=", 1) for text in match[2].split(",")]
    return match[1], {key: unescaped(value) for key, value in pairs}, unescaped(match[3])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("model.py:12 (forward)", ("model.py", "12")),
        ("net/a b,c:d%.py:7, in Net.forward", ("net/a b,c:d%.py", "7")),
        ("net/model.py:3", ("net/model.py", "3")),
        ("/elsewhere/model.py:12 (forward)", None),
        ("../model.py:12", None),
        ("", None),
        ("torch", None),
    ],
)
def test_a_finding_is_an_annotation_at_its_line(
    line: str, expected: tuple[str, str] | None, in_empty_folder: Path
) -> None:
    x = Finding("all_noise", "rope", NASTY.replace("\x00", ""), "sin", line)
    ((severity, fields, text),) = map(read, github_commands(record(x), in_empty_folder))
    place = (fields["file"], fields["line"]) if "file" in fields else None
    assert (severity, place) == ("error", expected)
    assert fields["title"] == "mprun check: all_noise in bf16_mixed"
    assert text == f"{x}\n  fix: {kinds()['all_noise'].cure}"


def result_of(found: CheckRecord) -> Result:
    return Result(found, [*check_parts(found)])


def test_github_gets_annotations_and_the_summary_behind_what_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("summary.md").write_text("before\n", encoding="utf-8")
    environment = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(Path.cwd()),
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    findings = [
        Finding("near_overflow", "fc", NASTY),
        Finding("overflow", "fc", NASTY, "", "a.py:1"),
    ]
    write_reports(result_of(record(*findings)), "junit.xml", environment)
    first, second = map(read, capsys.readouterr().out.splitlines())
    assert (first[0], first[1]["file"], second[0]) == ("error", "a.py", "warning")
    summary = Path("summary.md").read_text(encoding="utf-8")
    assert summary.startswith("before\n### mprun check\n\nfailed: ")
    assert "| bf16\\_mixed | ok | ok | ok | error | ok | - |" in summary
    assert "<b>" not in summary
    conforming(Path("junit.xml").read_bytes())


def test_a_summary_that_cannot_be_written_costs_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "no/summary.md"}
    write_reports(result_of(record()), None, environment)
    assert "note: the summary of the step cannot be written" in capsys.readouterr().err


def test_a_junit_file_that_cannot_be_written_is_said(in_empty_folder: Path) -> None:
    for path in (".", "no/junit.xml"):
        with pytest.raises(UsageError, match=r"check\.junit=.*expected a file in a folder"):
            refuse_folder(path)
    refuse_folder(None)
    refuse_folder("junit.xml")
    Path("gone").write_text("")
    with pytest.raises(RunFailedError, match="cannot be written"):
        write_reports(result_of(record()), "gone/junit.xml", {})
