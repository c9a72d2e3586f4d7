"""What `mprun check` tells others: JUnit XML, and GitHub's annotations and step summary. No torch.

JUnit has no standard; what is written here conforms to Jenkins' schema (junit-10.xsd of its xUnit
plugin), the strictest in use, and is read by GitLab, Jenkins and Azure. A suite is a mode, a case
is one of its checks. GitHub's commands and their escapes are those of actions/toolkit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree as Xml

from mprun.console import note
from mprun.errors import UsageError, printable
from mprun.records.files import write_files
from mprun.results import Result
from mprun.results.check_result import CHECKS, ERROR, CheckRecord, Finding, ModeChecks, kinds

CONTROLS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 forbids, escaped or not."""
LINE = re.compile(r"(?P<file>.+?):(?P<number>\d+)(?=\W|$)")
"""A line of code as findings name it: `model.py:12 (forward)`, `model.py:12, in forward`."""
NOT_ASKED = "nothing to compare with"


# ---- JUnit ---------------------------------------------------------------------------------------


def junit(record: CheckRecord) -> bytes:
    """The record as JUnit XML: an error fails its case, a warning is the case's output."""
    root = Xml.Element("testsuites", name="mprun check", time=f"{record.seconds:.3f}")
    for mode in record.modes:
        suite = Xml.SubElement(root, "testsuite", name=f"{record.recipe} {mode.label}")
        for check in CHECKS:
            suite.append(_case(f"mprun.{record.recipe}.{mode.label}", mode, check))
        _count(suite)
        suite.set("time", f"{sum(mode.done.values()):.3f}")
    _count(root)
    for element in root.iter():
        element.text = CONTROLS.sub("?", element.text or "") or None
        element.attrib.update({k: CONTROLS.sub("?", v) for k, v in element.attrib.items()})
    Xml.indent(root)
    return bytes(Xml.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _case(group: str, mode: ModeChecks, check: str) -> Xml.Element:
    seconds = mode.done.get(check, 0.0)
    case = Xml.Element("testcase", name=check, classname=group, time=f"{seconds:.3f}")
    errors = [x for x in mode.of(check) if x.severity == ERROR]
    if errors:
        kinds = ",".join(dict.fromkeys(x.kind for x in errors))
        failure = Xml.SubElement(case, "failure", message=str(errors[0]), type=kinds)
        failure.text = _texts(errors)
    elif check not in mode.done:
        Xml.SubElement(case, "skipped", message=mode.not_done.get(check, NOT_ASKED))
    if warnings := [x for x in mode.of(check) if x.severity != ERROR]:
        Xml.SubElement(case, "system-out").text = _texts(warnings)
    return case


def _texts(findings: list[Finding]) -> str:
    return "\n".join(f"{x.severity}: {x}\n  fix: {kinds()[x.kind].cure}" for x in findings)


def _count(element: Xml.Element) -> None:
    """The numbers of cases in an element, as its attributes."""
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name, tag in counts.items():
        if name != "skipped" or element.tag == "testsuite":  # the schema has none at the root
            element.set(name, str(sum(1 for _ in element.iter(tag))))


# ---- GitHub --------------------------------------------------------------------------------------


def github_commands(record: CheckRecord, workspace: Path) -> Iterator[str]:
    """A command of GitHub for each finding, errors first: it shows the first ten of each severity.

    Args:
        record: the record.
        workspace: the folder of the checkout; files outside of it are named in the text alone.
    """
    for label, x in record.merged:
        where = _place(x.line, workspace) | {"title": f"mprun check: {x.kind} in {label}"}
        fields = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in where.items())
        yield f"::{x.severity} {fields}::{_escaped(f'{x}{chr(10)}fix: {kinds()[x.kind].cure}')}"


def _place(line: str, workspace: Path) -> dict[str, str]:
    match = LINE.match(line)
    if match is None:
        return {}
    path = Path(match["file"]).resolve()
    if not path.is_relative_to(workspace.resolve()):
        return {}
    return {"file": path.relative_to(workspace.resolve()).as_posix(), "line": match["number"]}


def _escaped(text: str, more: str = "") -> str:
    """Text as a command's data; as a property's value with `more`."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


# ---- where they go -------------------------------------------------------------------------------


def refuse_folder(path: str | None) -> None:
    """Refuse a `check.junit` that cannot be a file.

    Raises:
        UsageError: it is a folder, or in none.
    """
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise UsageError(f"check.junit={path}: expected a file in a folder that exists")


def tell_others(
    result: Result, junit_path: str | None, environment: Mapping[str, str] = os.environ
) -> None:
    """Write the JUnit file; on GitHub print annotations and append to the step's summary.

    Raises:
        RunFailedError: the JUnit file cannot be written.
    """
    if junit_path is not None:
        write_files(Path(junit_path).parent, {Path(junit_path).name: junit(result.record)})
    if environment.get("GITHUB_ACTIONS") != "true":
        return
    for line in github_commands(result.record, Path(environment.get("GITHUB_WORKSPACE", "."))):
        print(printable(line))
    if summary := environment.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"### mprun check\n\n{result.markdown}\n")
        except OSError as error:
            note(f"the summary of the step cannot be written ({error.strerror}): {summary}")
