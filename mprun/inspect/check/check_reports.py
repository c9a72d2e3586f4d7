"""Reports of `mprun check` for CI: JUnit XML, GitHub's annotations and step summary. No torch.

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

from mprun.errors import UsageError, printable
from mprun.inspect.check.check_result import CHECKS, ERROR, CheckRecord, ModeChecks
from mprun.records.console import note
from mprun.records.files import write_files
from mprun.records.result import Result

# Characters that XML 1.0 forbids, escaped or not
CONTROLS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# A line of code as findings name it: `model.py:12 (forward)`, `model.py:12, in forward`
LINE = re.compile(r"(?P<file>.+?):(?P<number>\d+)(?=\W|$)")
NOT_ASKED = "nothing to compare with"
# Attributes of suites, and the elements that each counts
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


# ---- JUnit ---------------------------------------------------------------------------------------


def junit(record: CheckRecord) -> bytes:
    """The record as JUnit XML: an error fails its case, a warning is the case's output."""
    root = Xml.Element("testsuites", name="mprun check", time=f"{record.seconds:.3f}")
    for mode in record.modes:
        suite = Xml.SubElement(root, "testsuite", name=f"{record.recipe} {mode.label}")
        suite.set("time", f"{sum(mode.done.values()):.3f}")
        suite.extend(_case(f"mprun.{record.recipe}.{mode.label}", mode, check) for check in CHECKS)
    for element in (root, *root):
        for name, tag in COUNTS.items():
            element.set(name, str(len([*element.iter(tag)])))
    del root.attrib["skipped"]  # the schema has none there
    Xml.indent(root)
    return CONTROLS.sub("?", Xml.tostring(root, encoding="unicode")).encode() + b"\n"


def _case(group: str, mode: ModeChecks, check: str) -> Xml.Element:
    seconds = mode.done.get(check, 0.0)
    case = Xml.Element("testcase", name=check, classname=group, time=f"{seconds:.3f}")
    errors = [x for x in mode.of(check) if x.severity == ERROR]
    if errors:
        kinds = ",".join(dict.fromkeys(x.kind for x in errors))
        failure = Xml.SubElement(case, "failure", message=str(errors[0]), type=kinds)
        failure.text = "\n".join(x.with_cure for x in errors)
    elif check not in mode.done:
        Xml.SubElement(case, "skipped", message=mode.not_done.get(check, NOT_ASKED))
    if warnings := [x.with_cure for x in mode.of(check) if x not in errors]:
        Xml.SubElement(case, "system-out").text = "\n".join(f"warning: {x}" for x in warnings)
    return case


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
        yield f"::{x.severity} {fields}::{_escaped(x.with_cure)}"


def _place(line: str, workspace: Path) -> dict[str, str]:
    match, folder = LINE.match(line), workspace.resolve()
    if match and (path := Path(match["file"]).resolve()).is_relative_to(folder):
        return {"file": path.relative_to(folder).as_posix(), "line": match["number"]}
    return {}


def _escaped(text: str, more: str = "") -> str:
    """Text as a command's data; as a property's value with `more`."""
    return text.translate({ord(x): f"%{ord(x):02X}" for x in f"%\r\n{more}"})


# ---- where they go -------------------------------------------------------------------------------


def refuse_folder(path: str | None) -> None:
    """Refuse a `check.junit` that cannot be a file.

    Raises:
        UsageError: it is a folder, or in none.
    """
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise UsageError(f"check.junit={path}: expected a file in a folder that exists")


def write_reports(
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
    # GitHub reads commands from stdout, a line each
    for line in github_commands(result.record, Path(environment.get("GITHUB_WORKSPACE", "."))):
        print(printable(line))
    if summary := environment.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"### mprun check\n\n{result.markdown}\n")
        except OSError as error:
            note(f"the summary of the step cannot be written ({error.strerror}): {summary}")
