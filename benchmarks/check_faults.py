"""How many planted faults does `mprun check` find, and how often is it wrong about healthy models?

    python -m benchmarks.check_faults                          all 40 faults
    python -m benchmarks.check_faults --only lstm --only gate_detached
    python -m benchmarks.check_faults --healthy 200            also so many checks of healthy models
    python -m benchmarks.check_faults --healthy 200 --only none --out
    python -m benchmarks.check_faults --strangers 36 --only strangers      twelve other models

Each fault of `check_models/` is trained by `preset=smoke` and checked, in the mode in which it acts
and in this process, so seconds are without the start of Python and imports. It is found if the
check reports something that it does not report of the same model without the fault; it is named
where such a finding names the module of the fault, or one within it. Of healthy models each finding
is a false alarm, warnings too. A check is one model in one mode with one seed.

`--out` writes the tables to benchmarks/results/, else they are printed only. Run it from the root
of the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import mprun
from mprun.errors import MprunError, RunFailedError, UsageError
from mprun.inspect.check.check_result import Finding

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "check_models"
MODELS = ("transformer", "cnn_batchnorm", "lstm", "vae", "mixture_of_experts", "tiny_llama")
MODES = ("fp32", "bf16_mixed", "fp16_mixed")
NONE = "none"
STRANGERS = "strangers"  # Models on which no threshold of the check was chosen


class Planted(NamedTuple):
    """A fault and where it is."""

    model: str
    name: str
    module: str
    mode: str
    text: str


class Looked(NamedTuple):
    """What one check said."""

    findings: list[Finding]
    not_done: dict[str, str]
    seconds: float


class Row(NamedTuple):
    """What was found of a fault."""

    fault: Planted
    by_smoke: bool
    smoke_s: float
    found: list[Finding]
    """What is not found without the fault."""
    named: bool
    seconds: float


class Alarm(NamedTuple):
    """A finding in a healthy model."""

    model: str
    mode: str
    seed: int
    finding: Finding


def planted(only: Sequence[str]) -> list[Planted]:
    """The faults of all models, or those whose name or model is given.

    Raises:
        UsageError: there is no such fault or model.
    """
    faults = []
    for model in (*MODELS, *({STRANGERS} & {*only})):
        try:
            table = importlib.import_module(f"benchmarks.check_models.{model}").FAULTS
        except UsageError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        faults += [Planted(model, name, *rest) for name, rest in table.items()]
    known = {NONE} | {x.name for x in faults} | {x.model for x in faults}
    for name in only:
        if name not in known:
            raise UsageError(f"--only {name}: legal is {', '.join(sorted(known))}")
    return [x for x in faults if not only or x.name in only or x.model in only]


def looked(recipe: str, mode: str, *overrides: str) -> Looked:
    """A check in one mode; a mode that cannot be planned is a finding."""
    began = time.monotonic()
    path = f"recipe={FOLDER / recipe}.py"
    try:
        with _quiet():
            record = mprun.check(path, *overrides, precision=mode).record
    except MprunError as error:
        found = [Finding("step_fails", "", str(error))]
        return Looked(found, {}, time.monotonic() - began)
    (only,) = record.modes
    return Looked(only.findings, only.not_done, time.monotonic() - began)


@cache
def without_fault(model: str, mode: str) -> frozenset[tuple[str, str]]:
    """Kinds and modules of what a check says of a model as it is."""
    return frozenset((x.kind, x.module) for x in looked(model, mode).findings)


def smoked(fault: Planted, folder: Path) -> tuple[bool, float]:
    """Whether `preset=smoke` fails, and its seconds."""
    began = time.monotonic()
    path = f"recipe={FOLDER / fault.model}.py"
    where = f"run.dir={folder / fault.model / fault.name}"
    try:
        with _quiet():
            plant = f"recipe.model.fault={fault.name}"
            mprun.run(path, plant, "preset=smoke", f"precision={fault.mode}", where)
    except RunFailedError:
        return True, time.monotonic() - began
    return False, time.monotonic() - began


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def is_within(module: str, place: str) -> bool:
    """Whether a finding's module is the fault's, or a part of it."""
    return module == place or module.startswith(f"{place}.")


def judged(fault: Planted, folder: Path) -> Row:
    """Train and check a model with a fault."""
    by_smoke, smoke_s = smoked(fault, folder)
    usual = without_fault(fault.model, fault.mode)
    seen = looked(fault.model, fault.mode, f"recipe.model.fault={fault.name}")
    found = [x for x in seen.findings if (x.kind, x.module) not in usual]
    named = any(is_within(x.module, fault.module) for x in found)
    return Row(fault, by_smoke, smoke_s, found, named, seen.seconds)


def healthy_cases(recipe: str) -> Iterator[tuple[str, str, int]]:
    """The healthy models of a file in all modes, seed after seed."""
    names = importlib.import_module(f"benchmarks.check_models.{recipe}").MODELS
    return ((name, mode, seed) for seed in count() for name in names for mode in MODES)


def false_alarms(checks: int, recipe: str) -> Iterator[tuple[str, str, int, Looked]]:
    """Check healthy models of a file so often."""
    for name, mode, seed in islice(healthy_cases(recipe), checks):
        seen = looked(recipe, mode, f"recipe.model.name={name}", f"seed={seed}")
        yield name, mode, seed, seen


def faults_table(rows: Sequence[Row]) -> str:
    """A Markdown table with a row for each fault, and a sentence before it."""
    by_smoke, found = sum(x.by_smoke for x in rows), sum(bool(x.found) for x in rows)
    named, seconds = sum(x.named for x in rows), sum(x.seconds for x in rows)
    lines = [
        f"Of {len(rows)} planted faults `preset=smoke` finds {by_smoke} and `mprun check` {found}; "
        f"of {named} it names the module. A check takes {seconds / max(len(rows), 1):.1f} s in the "
        "mean.",
        "",
        "| model | fault | mode | smoke | check | module named | kinds | seconds |",
        "|---|---|---|---|---|---|---|---:|",
    ]
    for row in rows:
        kinds = ", ".join(dict.fromkeys(x.kind for x in row.found)) or "-"
        answers = (_yes(row.by_smoke), _yes(bool(row.found)), _yes(row.named))
        cells = (row.fault.model, f"`{row.fault.name}`", row.fault.mode, *answers, kinds)
        lines.append(f"| {' | '.join(cells)} | {row.seconds:.1f} |")
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def alarms_table(alarms: Sequence[Alarm], checks: int, not_done: int, seconds: float) -> str:
    """A sentence, and a line for each false alarm."""
    wrong = len({(x.model, x.mode, x.seed) for x in alarms})
    lines = [
        f"{checks} checks of healthy models: {len(alarms)} false alarms in {wrong} of them "
        f"({not_done} parts not done for lack of time; {seconds / max(checks, 1):.1f} s a check)."
    ]
    lines += ["", *(f"- {x.model}, {x.mode}, seed {x.seed}: {x.finding}" for x in alarms)]
    return "\n".join(lines).rstrip()


def _faults(only: Sequence[str]) -> list[str]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in planted(only):
            row = judged(fault, Path(folder))
            rows.append(row)
            kinds = ", ".join(f"{x.kind} {x.module}" for x in row.found[:3])
            print(
                f"{fault.model}/{fault.name} ({fault.mode}): smoke {_yes(row.by_smoke)}, "
                f"found {_yes(bool(row.found))}, named {_yes(row.named)}, {row.seconds:.1f} s "
                f"[{kinds}]",
                flush=True,
            )
    return [faults_table(rows)] if rows else []


def _healthy(checks: int, recipe: str = "healthy") -> list[str]:
    alarms, not_done, began = [], 0, time.monotonic()
    for name, mode, seed, seen in false_alarms(checks, recipe):
        alarms += [Alarm(name, mode, seed, x) for x in seen.findings]
        not_done += len(seen.not_done)
        shown = "; ".join(map(str, seen.findings)) or "no finding"
        print(f"{name} ({mode}, seed {seed}): {shown}, {seen.seconds:.1f} s", flush=True)
    seconds = time.monotonic() - began
    return [alarms_table(alarms, checks, not_done, seconds)] if checks else []


def _conditions() -> str:
    import torch

    threads = torch.get_num_threads()
    return (
        f"{date.today().isoformat()}, {platform.machine()} with "
        f"{torch.backends.cpu.get_cpu_capability()}, {threads} threads of {os.cpu_count()} cores, "
        f"PyTorch {torch.__version__}, mprun {mprun.__version__}."
    )


def main(words: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], help="a fault, a model, or none")
    parser.add_argument("--healthy", type=int, default=0, help="checks of healthy models")
    parser.add_argument("--strangers", type=int, default=0, help="checks of twelve other models")
    parser.add_argument("--out", action="store_true", help="write to benchmarks/results/")
    args: Any = parser.parse_args(words)
    try:
        tables = [*_faults(args.only), *_healthy(args.healthy)]
        tables += _healthy(args.strangers, STRANGERS)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    page = "\n\n".join(["# Planted faults and false alarms", _conditions(), *tables]) + "\n"
    print(page)
    if args.out:
        file = ROOT / "benchmarks" / "results" / f"check_faults-{date.today().isoformat()}.md"
        file.write_text(page, encoding="utf-8")
        print(f"written: {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
