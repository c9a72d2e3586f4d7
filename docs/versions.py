"""What differs between the versions of PyTorch and Python that mprun is tried with.

    python -m docs.versions NAME [JUNIT.xml ...]

records the environment at hand in docs/reference/versions/NAME.json, and how its tests ended, if
their reports are named. The sessions of `noxfile.py` do so, each under its own name. From these
files docs/site_build.py makes the tables of docs/reference/versions.md, so that no figure in them
is written by hand.

The facts are those that a user can notice: the ops that `torch.autocast` casts, the peak memory of
a step of `fashion_mnist`, how `mprun doctor` says that each mode runs, the tests that are skipped.
Where doctor measures whether bfloat16 is slow enough to be emulated, it is taken as fast: near the
limit that differs from run to run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

FOLDER = Path(__file__).parent / "reference" / "versions"
MODES = ("fp32", "bf16_mixed", "half_sr")
"""Those whose step's memory is counted."""

Record = dict[str, Any]


def record(name: str, reports: Sequence[Path]) -> Record:
    """Write the facts of this environment to NAME.json; without reports, tests stay as they were.

    Args:
        name: of the environment, as its session in noxfile.py without `tests-`.
        reports: JUnit files of pytest.
    """
    path = FOLDER / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = {
        **facts(),
        "made": date.today().isoformat(),
        "missing": missing(),
        "tests": outcome(reports) if reports else before.get("tests"),
    }
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return found


def facts() -> Record:
    """Versions, and what `mprun doctor` and `mprun memory` say here, where no time decides."""
    import torch

    from mprun.inspect.machine_examination import examine_modes
    from mprun.train.machine.machine import examine_machine, versions

    cpu, named = torch.device("cpu"), versions()
    machine = examine_machine(cpu)
    with patch("mprun.precision.execution.slowdown", return_value=1.0):
        modes = examine_modes(cpu, {})
    return {
        "python": named["python"],
        "torch": named["torch"],
        "cpu": machine.hardware.name,
        "onednn": machine.onednn.version,
        "autocast": {key: " ".join(sorted(autocast_ops(key))) for key in ("CPU", "CUDA")},
        "modes": {mode.name: _way(mode.execution, mode.substituted) for mode in modes},
        "peak_bytes": peaks(),
    }


def _way(execution: str, substituted: Sequence[str]) -> str:
    """How a mode runs: "native, matmul in float32"."""
    return ", ".join([execution, *(f"{op} in float32" for op in substituted)])


def peaks() -> dict[str, int]:
    """Bytes alive at the peak of a step of `fashion_mnist`, by mode."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["recipe=fashion_mnist", f"precision={','.join(MODES)}", f"run.dir={folder}"]
        command = [sys.executable, "-m", "mprun", "memory", "memory.picture=false", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        memory = json.loads(Path(folder, "memory.json").read_text(encoding="utf-8"))
    return {mode["label"]: mode["bytes"]["peak"] for mode in memory["modes"]}


def autocast_ops(device: str) -> set[str]:
    """Names of the ATen ops that `torch.autocast` has a kernel for on CPU or CUDA."""
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    own = (name for name in names if has(name, f"Autocast{device}"))
    return {name.removeprefix("aten::").partition(".")[0] for name in own}


def missing() -> list[str]:
    """The development requirements that are not installed: there is no wheel, as a rule."""
    return [name for name in _development() if not _is_installed(name)]


def _development() -> Iterator[str]:
    for text in requires("mprun") or []:
        if "extra == 'dev'" in text.replace('"', "'") and not text.startswith("mprun"):
            yield re.split(r"[^\w-]", text)[0]


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def outcome(reports: Sequence[Path]) -> Record:
    """Counts of passed, failed and skipped tests, minutes, and names of those that did not pass."""
    suites = [suite for path in reports for suite in ElementTree.parse(path).iter("testsuite")]
    ended: dict[str, str] = {}  # a module that is skipped as a whole is in each report
    skipped = {}
    for case in (case for suite in suites for case in suite.iter("testcase")):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            ended[name] = "failed"
        elif (skip := case.find("skipped")) is not None:
            ended[name], skipped[name] = "skipped", skip.get("message", "")
        else:
            ended.setdefault(name, "passed")
    return {
        "passed": [*ended.values()].count("passed"),
        "failed": sorted(name for name, how in ended.items() if how == "failed"),
        "skipped": skipped,
        "minutes": round(sum(float(suite.get("time", 0)) for suite in suites) / 60, 1),
    }


# ---- the page ------------------------------------------------------------------------------------


def records() -> dict[str, Record]:
    """The committed records by name, the oldest PyTorch first."""
    found = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in FOLDER.glob("*.json")}
    return dict(sorted(found.items(), key=lambda item: (_numbers(item[1]["torch"]), item[0])))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def page() -> str:
    """Two tables in Markdown: the runs of the tests, and what is not the same everywhere."""
    of = records()
    runs = [
        [f"`{name}`", one["torch"], one["python"], *_counts(one["tests"]), *_origin(one)]
        for name, one in of.items()
    ]
    heads = [f"{one['torch']} (`{name}`)" for name, one in of.items()]
    shown = [_shown(one) for one in of.values()]
    keys = dict.fromkeys(key for one in shown for key in one)
    rows = [[key, *(one.get(key, "no") for one in shown)] for key in keys]
    differ = [row for row in rows if len({*row[1:]}) > 1]
    return "\n\n".join(
        [
            "## The tests",
            _table([*RUN_HEADS], runs),
            "## What differs",
            _table(["", *heads], differ),
        ]
    )


RUN_HEADS = (
    *("session", "PyTorch", "Python", "passed", "failed", "skipped", "minutes"),
    *("not installed", "made"),
)


def _counts(tests: Record | None) -> list[str]:
    if tests is None:
        return ["-"] * 4
    sizes = (tests["passed"], len(tests["failed"]), len(tests["skipped"]))
    return [*(f"{size:,}" for size in sizes), f"{tests['minutes']:g}"]


def _origin(one: Record) -> list[str]:
    return [", ".join(one["missing"]) or "-", one["made"]]


def _shown(one: Record) -> dict[str, str]:
    """A record's facts as cells of a table, each under the head of its row."""
    cells = {"CPU": one["cpu"], "oneDNN": one["onednn"]}
    cells |= {
        f"autocast on {device} casts `{op}`": "yes"
        for device, ops in one["autocast"].items()
        for op in ops.split()
    }
    for mode, peak in one["peak_bytes"].items():
        cells[f"peak memory of `fashion_mnist`, `{mode}`"] = f"{peak / 2**20:.2f} MiB"
    cells |= {f"`{mode}` on the CPU": way for mode, way in one["modes"].items()}
    skipped = one["tests"]["skipped"] if one["tests"] else {}
    return cells | {f"skipped: {reason}": "yes" for reason in sorted({*skipped.values()})}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(name: str, *reports: str) -> int:
    """Record this environment and print what failed; 1 if a test did, else 0."""
    tests = record(name, [Path(report) for report in reports])["tests"]
    failed = tests["failed"] if tests else []
    print("\n".join(f"failed: {test}" for test in failed) or f"recorded: {FOLDER / name}.json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
