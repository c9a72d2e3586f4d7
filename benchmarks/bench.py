"""mprun against what people run instead: `make bench`.

    python -m benchmarks.bench [--limit-s N] [--threads N] [--recipes NAME ...] [--readme]

A group is a recipe, a batch size, a precision and a heap; the recipes are those of the tutorials
that mprun reproduces (`benchmarks.tasks`). Recipes without images have few page faults, and are
measured with the heap as it is. With each heap, every way to train
(`benchmarks.peers`) is a process, which forks for each group, and the processes take turns
(`benchmarks.turns`). The time limit is shared by the groups; a faster machine measures more rounds.
The figures:

- **step**: wall time of a turn over its steps, the median of the turns; data included;
- **ratio** of these medians to the raw loop's, with a 95 % bootstrap interval over rounds;
- **samples/s**: all samples over the wall time of all turns;
- **first step**: the imports, and from the fork to the end of the first step. The decoded samples
  are read from a file that all share, so downloading and decoding are left out. Compiling counts
  with the first heap; the second one takes the compiled code;
- **peak**: the largest resident memory of the fork (`turns.peak_bytes`);
- **faults**: page faults per step.

The output is Markdown. It is kept in `benchmarks/results/`; with `--readme` the short table in
`benchmarks/README.md` is replaced.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.alternate import HEAPS, heap_environment
from benchmarks.peers import PEERS, RAW, peers_of
from benchmarks.tasks import CASES, DATA, save_data
from benchmarks.turns import Processes, Row, Subject
from mprun.train.data import DataRequest, Splits, image_splits
from mprun.train.machine.machine import cpu_name, git_commit, usable_cores

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "benchmarks" / "README.md"
MARKS = "<!-- make bench -->", "<!-- end of make bench -->"
PRECISIONS = ("fp32", "bf16_mixed")
PACKAGES = ("torch", "lightning", "accelerate", "keras", "numpy")
CHANNELS_LAST = "mprun speed=auto", "raw loop, channels-last"
"""Compared with each other too: `speed=auto` takes channels-last where that is the faster."""
TURN_S = 0.3
SETS = {"fashion_mnist": "FashionMNIST", "mnist": "MNIST"}
"""Recipe to its data set; the others draw their data."""


@dataclass(frozen=True)
class Group:
    """What is compared with one another."""

    recipe: str
    batch_size: int
    precision: str
    heap: str

    @property
    def batch(self) -> str:
        """What a table is about."""
        return f"{self.recipe}, batch {self.batch_size:,}"

    @property
    def title(self) -> str:
        return f"{self.batch}, {self.precision}, heap {self.heap}"

    @property
    def task(self) -> str:
        """What the processes of `benchmarks.peers` train."""
        return f"{self.recipe} {self.batch_size} {self.precision}"


def subject(name: str) -> Subject:
    """The process of a peer."""
    module = [sys.executable, "-m", "benchmarks.peers", name]
    return Subject(name, (*module, "--turn-s", str(TURN_S)), PEERS[name].needs)


def environment(heap: str, threads: int, folder: Path) -> dict[str, str]:
    """The environment of a heap's processes; `folder` has the samples and the compiled code."""
    return {
        **heap_environment(heap),
        DATA: str(folder),
        "CUDA_VISIBLE_DEVICES": "",  # a benchmark of the CPU
        "KERAS_BACKEND": "torch",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONDONTWRITEBYTECODE": "",  # else each start compiles the libraries' sources again
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def heading(command: str, threads: int, sets: Iterable[Splits]) -> str:
    """Date, machine, versions and the command."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} not installed")
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg()) if hasattr(os, "getloadavg") else "?"
    return (
        f"{date.today()}, {cpu_name()}, {usable_cores()} cores, OpenMP threads of each process: "
        f"{threads}, load before: {load}; "
        f"{', '.join(f'{s.name} ({s.source})' for s in sets)}.\n"
        f"Python {sys.version.split()[0]}, {', '.join(versions)}; mprun {git_commit()}.\n"
        f"`{command}`"
    )


def baseline(rows: Sequence[Row]) -> Row | None:
    """The raw loop's row, if it was measured."""
    return next((row for row in rows if row.name == RAW and row.problem is None), None)


def ratio(row: Row, base: Row | None) -> str:
    """A ratio and its interval as text; a dash if the raw loop was not measured."""
    if base is None:
        return "-"
    middle, low, high = row.over(base)
    return "1" if row is base else f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a short line is filled up with empty cells."""
    full = [[*line, *[""] * (len(header) - len(line))] for line in lines]
    cells = [header, ["---", *["---:"] * (len(header) - 1)], *full]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def group_table(group: Group, rows: Sequence[Row]) -> str:
    """All figures of a group."""
    base = baseline(rows)

    def line(row: Row) -> list[str]:
        if row.problem is not None:
            return [row.name, row.problem]
        return [
            row.name,
            f"{row.step_ms:.2f} ms",
            ratio(row, base),
            f"{row.steps_per_s * group.batch_size:,.0f}",
            f"{row.first_step_s:.1f} s",
            f"{row.peak_bytes / 2**20:,.0f} MiB",
            f"{row.faults:,.0f}",
        ]

    header = ["", "step", "ratio", "samples/s", "first step", "peak", "faults/step"]
    text = f"### {group.title}\n\n{markdown(header, map(line, rows))}\n"
    if measured := [row for row in rows if row.problem is None]:
        rounds, idle = len(measured[0].blocks), max(row.idle_load for row in measured)
        text += f"\n{rounds} rounds of turns of {TURN_S} s; a waiting process used at most "
        text += f"{idle:.1%} of a core.\n"
    mine, other = (next((r for r in measured if r.name == name), None) for name in CHANNELS_LAST)
    if mine and other:
        text += f"\n{mine.name} over {other.name}: {ratio(mine, other)}.\n"
    return text


def short_table(results: Mapping[Group, Sequence[Row]]) -> str:
    """Step time and ratio in all groups, then start, memory and what a step includes."""
    if not results:
        return "nothing was measured\n"
    parts = []
    for batch in dict.fromkeys(group.batch for group in results):
        groups = {group: rows for group, rows in results.items() if group.batch == batch}
        header = [batch, *(f"{g.precision}, heap {g.heap}" for g in groups)]
        columns = [[_step(row, baseline(rows)) for row in rows] for rows in groups.values()]
        names = [row.name for row in next(iter(groups.values()))]
        parts.append(markdown(header, zip(names, *columns, strict=True)))
    group, rows = next(iter(results.items()))
    header = [group.title, "first step", "peak", "beside the arithmetic, a step"]
    parts.append(markdown(header, map(_start, rows)))
    return "\n\n".join(parts) + "\n"


def _step(row: Row, base: Row | None) -> str:
    return row.problem or f"{row.step_ms:.1f} ms: {ratio(row, base)}"


def _start(row: Row) -> list[str]:
    includes = PEERS[row.name].includes
    if row.problem is not None:
        return [row.name, row.problem, "", includes]
    return [row.name, f"{row.first_step_s:.1f} s", f"{row.peak_bytes / 2**20:,.0f} MiB", includes]


def measure(
    groups: Sequence[Group],
    names: Sequence[str],
    threads: int,
    folder: Path,
    limit_s: float,
    most: int = 100,
) -> dict[Group, list[Row]]:
    """Measure heap after heap and group after group, at most `most` rounds each.

    A group that would exceed the limit, judged by the shortest one so far, is left out.

    Args:
        groups: in any order.
        names: of the peers.
        threads: OpenMP's threads of each process.
        folder: has the samples; keeps compiled code.
        limit_s: time for everything.
        most: rounds of a group.
    """
    end, shortest_s = time.monotonic() + limit_s, 0.0
    results: dict[Group, list[Row]] = {}
    subjects, left = [subject(name) for name in names], len(groups)
    for heap in dict.fromkeys(group.heap for group in groups):
        with Processes(subjects, environment(heap, threads, folder)) as processes:
            for group in (group for group in groups if group.heap == heap):
                start, share_s = time.monotonic(), (end - time.monotonic()) / left
                left -= 1
                if results and start + shortest_s > end:
                    print(f"{group.title}: left out, the time is used up (--limit-s)\n", flush=True)
                    continue
                own = [name for name in names if name in peers_of(group.recipe)]
                rows = processes.take_turns(group.task, share_s, most=most, only=own)
                results[group] = rows
                took_s = time.monotonic() - start
                shortest_s = min(shortest_s or took_s, took_s)
                print(group_table(group, rows), flush=True)
    return {group: results[group] for group in groups if group in results}


def replace_section(page: str, text: str) -> str:
    """The README with `text` between its marks."""
    begin, end = MARKS
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}"


def main() -> None:
    """Measure, print and keep the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limit-s", type=float, default=800.0, help="seconds for all groups")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="OpenMP's, of each")
    parser.add_argument("--recipes", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="only these")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--heaps", nargs="+", choices=list(HEAPS), default=list(HEAPS))
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--out", type=Path, help="the file that keeps the output")
    parser.add_argument("--readme", action="store_true", help="rewrite the table of the README")
    args = parser.parse_args()
    groups = [
        Group(recipe, size, precision, heap)
        for recipe in args.recipes
        for size in CASES[recipe].batch_sizes
        if args.batch_sizes is None or size in args.batch_sizes
        for precision, heap in itertools.product(args.precisions, args.heaps)
        if CASES[recipe].images or heap == args.heaps[0]
    ]
    command = shlex.join(["python", "-m", "benchmarks.bench", *sys.argv[1:]])
    sets = {
        recipe: image_splits(SETS[recipe], DataRequest(fallback=True))
        for recipe in args.recipes
        if recipe in SETS
    }
    head = heading(command, args.threads, sets.values())
    print(head + "\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for recipe, splits in sets.items():
            save_data(recipe, splits, Path(folder))
        results = measure(groups, args.only, args.threads, Path(folder), args.limit_s)
    short = f"{head}\n\n{short_table(results)}"
    whole = "\n".join([short, *(group_table(g, rows) for g, rows in results.items())])
    cpu = re.sub(r"\W+", "-", cpu_name().lower()).strip("-")
    name = f"peers-{cpu}-{usable_cores()}cores-{date.today()}.md"
    out: Path = args.out or ROOT / "benchmarks" / "results" / name
    out.write_text(whole, encoding="utf-8")
    print(f"{short}\nkept in {out}")
    if args.readme:
        page = README.read_text(encoding="utf-8")
        README.write_text(replace_section(page, short), encoding="utf-8")


if __name__ == "__main__":
    main()
