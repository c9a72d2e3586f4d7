"""What `mprun check` reports: kinds of findings, the record, its lines, reports for CI. No torch.

Each mode has the same checks, in the order of `CHECKS`; a check that did not fit into the budget is
named as not done and is no success: status 4. A finding of severity error ends the command with 1.

JUnit has no standard; what is written here conforms to Jenkins' schema (junit-10.xsd of its xUnit
plugin), the strictest in use, and is read by GitLab, Jenkins and Azure. A suite is a mode, a case
is one of its checks. GitHub's commands and their escapes are those of actions/toolkit.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Annotated, TypeVar
from xml.etree import ElementTree as Xml

from msgspec import Meta, convert

from mprun.errors import UsageError, printable
from mprun.inspect.numerics import QuantityError, error_lines
from mprun.records.console import note
from mprun.records.console.fitted_table import FittedTable, text_column
from mprun.records.console.formatting import by_reason, counted
from mprun.records.files import write_files
from mprun.records.policy_columns import Count, Legal, NotNegative, Positive
from mprun.records.reader import load_yaml
from mprun.records.result import Result

T = TypeVar("T")
SCHEMA_VERSION = 1
ERROR, WARNING = "error", "warning"
# What is checked in each mode; tables, JUnit cases and findings have this order
CHECKS = {
    "trains": "the loss is finite, and falls where float32's does",
    "agrees": "loss, gradients and curve differ from float32's by no more than rounding errors",
    "dtypes": "each part runs, and is stored, in the dtype of the mode",
    "robust": "how far numbers are from overflow, and which results are noise",
    "fits": "the peak of memory, by category",
    "baseline": "what changed since mprun-baseline.json was written",
}
SHOWN = 4  # Findings on the terminal, two lines each; all are in check.json
SLOWEST = 3  # Checks whose seconds the answer has
# Legal values of check.targets; a copy of the names in check_targets.yaml, which help does not read
TARGETS = ("t4", "v100", "a100", "h100", "mps", "cpu-avx2")

# Characters that XML 1.0 forbids, escaped or not
CONTROLS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# A line of code as findings name it: `model.py:12 (forward)`, `model.py:12, in forward`
LINE = re.compile(r"(?P<file>.+?):(?P<number>\d+)(?=\W|$)")
NUMBER = re.compile(r"\d+")
NOT_ASKED = "nothing to compare with"
# Attributes of suites, and the elements that each counts
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


@dataclass
class CheckSettings:
    """What a check may take, and what it compares with."""

    budget_s: Positive = 60.0
    """Seconds for all modes; what did not fit is named."""
    # 24 steps visit each of four batches six times: first and last third have two visits of each
    steps: Annotated[int, Meta(ge=6)] = 24
    """Training steps of each mode, on a few batches again and again."""
    memory_gib: Positive | None = None
    """The most that a step may take, in GiB; null: only the baseline's is compared."""
    # A batch or a later step with numbers four times as large does not overflow
    headroom: NotNegative = 2.0
    """Doublings that the largest number must be away from overflow."""
    baseline: str = "mprun-baseline.json"
    """The file of the baseline."""
    targets: list[Annotated[str, Legal(*TARGETS)]] = field(default_factory=list)
    """Other hardware to answer for: [t4, v100, a100, h100, mps, cpu-avx2]."""
    junit: str | None = None
    """The file of a JUnit report, with a case for each mode and check."""
    samples: Count = 64
    """The most samples of a batch."""
    strict: bool = True
    """End with status 4 where a check was not done."""
    fast: bool = False
    """Leave out the curve of `agrees`, for a hook before a push."""


@dataclass(frozen=True)
class Kind:
    """A kind of finding."""

    check: str  # The check that reports it
    severity: str
    text: str  # What it means
    example: str  # Code that has this fault
    cure: str  # What to do


def data_file(name: str, kind: type[T]) -> T:
    """The content of a YAML file of this package."""
    text = files("mprun.inspect.check").joinpath(name).read_text(encoding="utf-8")
    return convert(load_yaml(text), kind)


@cache
def kinds() -> dict[str, Kind]:
    """Every kind of finding by its name, in the order of the checks: check_kinds.yaml."""
    return data_file("check_kinds.yaml", dict[str, Kind])


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in one mode."""

    kind: str
    """One of `kinds`."""
    module: str
    """A name of `named_modules()`; empty for the model itself."""
    text: str
    """What was measured, with figures."""
    op: str = ""
    line: str = ""
    """The line of code: `file.py:12 (forward)`."""
    at: float = 0.0
    """How far: a measured size that orders findings of one kind, largest first. Its unit is that of
    the kind, so kinds are not compared by it."""

    @property
    def rank(self) -> tuple[bool, bool, int, float]:
        """Its place: errors first, then those with a place, the order of the checks, then `at`."""
        placed = bool(self.module or self.line)
        return self.severity != ERROR, not placed, [*kinds()].index(self.kind), -self.at

    @property
    def check(self) -> str:
        """The check that reports it."""
        return kinds()[self.kind].check

    @property
    def severity(self) -> str:
        """error or warning."""
        return kinds()[self.kind].severity

    def __str__(self) -> str:
        where = self.module or "the model"
        op = f", {self.op}" if self.op else ""
        line = f" at {self.line}" if self.line else ""
        return f"{self.kind}: {where}{op}{line}: {self.text}"

    def with_cure(self, mode: str) -> str:
        """The finding, and on a second line what to do, if that is known; `mode`: where it is."""
        cure = kinds()[self.kind].cure.replace("MODE", mode)
        return f"{self}\n  fix: {cure}" if cure else str(self)


@dataclass
class ModeChecks:
    """The checks of one mode."""

    label: str
    precision: str
    findings: list[Finding] = field(default_factory=list)
    done: dict[str, float] = field(default_factory=dict)
    """Check to its seconds, of those that were done."""
    not_done: dict[str, str] = field(default_factory=dict)  # Check to the reason
    figures: dict[str, float | str | None] = field(default_factory=dict)
    """Measured: `loss_first`, `loss_last`, `headroom`, `peak_bytes` and the like."""
    quantities: list[QuantityError] = field(default_factory=list)
    """Of the recipe's quantities, after a short training."""
    notes: list[str] = field(default_factory=list)

    def of(self, check: str) -> list[Finding]:
        """The findings of a check."""
        return [x for x in self.findings if x.check == check]

    def status(self, check: str) -> str:
        """ok, error, warning, or `-` for a check that was not done."""
        severities = {x.severity for x in self.of(check)}
        done = "ok" if check in self.done else "-"
        return next((x for x in (ERROR, WARNING) if x in severities), done)


@dataclass(frozen=True)
class CheckRecord:
    """The content of check.json."""

    schema_version: int
    recipe: str
    hardware: str
    versions: dict[str, str | None]
    seconds: float
    budget_s: float
    modes: list[ModeChecks]
    notes: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[tuple[str, Finding]]:
        """Label of the mode and finding, in the order of `Finding.rank`."""
        pairs = [(mode.label, x) for mode in self.modes for x in mode.findings]
        return sorted(pairs, key=lambda pair: pair[1].rank)

    @property
    def merged(self) -> list[tuple[str, Finding]]:
        """As `findings`, but one for a place that modes, or repeated layers, share: the largest."""
        groups: dict[tuple[str, ...], list[tuple[str, Finding]]] = {}
        for label, x in self.findings:
            place = x.kind, NUMBER.sub("#", x.module), x.op, x.line
            groups.setdefault(place, []).append((label, x))
        labels = [mode.label for mode in self.modes]
        merged = []
        for group in groups.values():
            own = {label for label, _ in group}
            worst = max((x for _, x in group), key=lambda x: x.at)
            module = together([x.module for _, x in group])
            merged.append(
                (", ".join(filter(own.__contains__, labels)), replace(worst, module=module))
            )
        return merged

    @property
    def has_errors(self) -> bool:
        """Whether the command fails."""
        return any(x.severity == ERROR for _, x in self.findings)

    @property
    def is_open(self) -> bool:
        """Whether a check was not done."""
        return any(mode.not_done for mode in self.modes)


def together(modules: Sequence[str]) -> str:
    """Modules that differ in numbers, as one text: `blocks.0 to 3.norm`."""
    names = [*dict.fromkeys(modules)]
    columns = [*zip(*(map(int, NUMBER.findall(x)) for x in names), strict=True)]
    differing = [n for n, column in enumerate(columns) if len({*column}) > 1]
    if len(differing) != 1:  # one module, or several numbers
        return ", ".join(names)
    at, own = [*NUMBER.finditer(names[0])][differing[0]], columns[differing[0]]
    return f"{names[0][: at.start()]}{min(own)} to {max(own)}{names[0][at.end() :]}"


def check_parts(record: CheckRecord) -> Iterator[FittedTable | str]:
    """What the terminal shows: the answer, a row for each mode, the worst findings."""
    yield _answer(record)
    columns = [text_column(x, cell=methodcaller("status", x)) for x in CHECKS]
    labels = text_column("mode", cell=attrgetter("label"))
    yield FittedTable("", labels, *columns, rows=record.modes)
    for label, x in record.merged[:SHOWN]:
        yield from f"{x.severity} in {label}: {x.with_cure(label)}".splitlines()
    if (rest := len(record.merged) - SHOWN) > 0:
        yield f"({counted(rest, 'more finding')} in check.json)"
    left: dict[tuple[str, str], list[str]] = defaultdict(list)
    for mode in record.modes:
        for why, checks in by_reason(mode.not_done).items():
            left[", ".join(checks), why].append(mode.label)
    for (names, why), modes in left.items():
        yield f"not done: {names} of {', '.join(modes)}: {why}"
    for mode in record.modes:
        yield from error_lines(mode.quantities)
    for text in dict.fromkeys(x for mode in record.modes for x in mode.notes):
        yield f"note on {', '.join(x.label for x in record.modes if text in x.notes)}: {text}"
    yield from record.notes


def _answer(record: CheckRecord) -> str:
    numbers = Counter(x.severity for _, x in record.merged)
    numbers["unfinished check"] = left = sum(len(mode.not_done) for mode in record.modes)
    counts = ", ".join(counted(n, x) for x, n in numbers.items() if n)
    modes = ", ".join(mode.label for mode in record.modes)
    answer = "failed" if record.has_errors else "incomplete" if left else "passed"
    spent = Counter[str]()
    for mode in record.modes:
        spent.update(mode.done)
    slow = [
        f"{name} {seconds:.0f}" for name, seconds in spent.most_common(SLOWEST) if seconds >= 0.5
    ]
    took = f"{record.seconds:.0f} s{': ' * bool(slow)}{', '.join(slow)}"
    return f"{answer}: {record.recipe} in {modes}: {counts or 'no findings'} ({took})"


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
        failure.text = "\n".join(x.with_cure(mode.label) for x in errors)
    elif check not in mode.done:
        Xml.SubElement(case, "skipped", message=mode.not_done.get(check, NOT_ASKED))
    if warnings := [x.with_cure(mode.label) for x in mode.of(check) if x not in errors]:
        Xml.SubElement(case, "system-out").text = "\n".join(f"warning: {x}" for x in warnings)
    return case


# ---- GitHub --------------------------------------------------------------------------------------


def github_commands(record: CheckRecord, workspace: Path) -> Iterator[str]:
    """A command of GitHub for each finding, errors first: it shows the first ten of each severity.

    Files outside of `workspace`, the folder of the checkout, are named in the text alone.
    """
    for label, x in record.merged:
        where = _place(x.line, workspace) | {"title": f"mprun check: {x.kind} in {label}"}
        fields = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in where.items())
        yield f"::{x.severity} {fields}::{_escaped(x.with_cure(label))}"


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
