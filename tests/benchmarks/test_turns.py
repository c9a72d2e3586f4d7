"""The driver of `make bench`: turns, figures and problems, with subjects that need no torch."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.alternate import HEAPS, heap_environment
from benchmarks.bench import (
    MARKS,
    README,
    Group,
    group_table,
    measure,
    replace_section,
    short_table,
)
from benchmarks.peers import PEERS, RAW
from benchmarks.turns import Processes, Row, Subject

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 4


def trainer(body: str, name: str = "tiny", needs: tuple[str, ...] = ()) -> Subject:
    """A process that takes turns of one step for ever; `body` is its step."""
    code = (
        "import os, sys, time\n"
        "from benchmarks.turns import serve\n"
        "def train(task, turns):\n"
        "    step = 0\n"
        "    while True:\n"
        "        step += 1\n"
        f"        {body}\n"
        "        turns()\n"
        "serve(train, 0)\n"
    )
    return Subject(name, (sys.executable, "-c", code), needs)


def turns_of(subjects: list[Subject]) -> list[Row]:
    environment = {**heap_environment("steady"), "PYTHONPATH": str(ROOT)}
    with Processes(subjects, environment) as processes:
        return processes.take_turns("task", seconds=0, least=ROUNDS, most=ROUNDS)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Two that work, one whose package is missing, one that fails in its first turn."""
    return turns_of(
        [
            trainer("time.sleep(0.001)", "a"),
            trainer("pages = [bytearray(4096) for _ in range(5_000)]", "b"),
            trainer("pass", "absent", ("json", "no_such_package")),
            trainer("assert step < 2, 'out of paper'", "broken"),
        ]
    )


def test_the_order_reverses_from_round_to_round(rows: list[Row]) -> None:
    blocks = {row.name: [b.turn for b in row.blocks] for row in rows}
    # Round 0 (a, b, broken) is dropped; then b a, a b, b a.
    assert blocks == {"a": [4, 5, 8], "b": [3, 6, 7], "absent": [], "broken": []}


def test_a_row_has_every_figure(rows: list[Row]) -> None:
    a = rows[0]
    assert a.problem is None
    assert len(a.blocks) == ROUNDS - 1
    assert a.step_ms > 1, "a step sleeps for a millisecond"
    assert 0 < a.steps_per_s < 1e3
    assert a.first_step_s > 0.001
    assert a.peak_bytes > 1e6
    assert rows[1].peak_bytes > a.peak_bytes + 5_000 * 4_096 / 2
    assert a.over(a) == (1, 1, 1)


def test_problems_are_rows(rows: list[Row]) -> None:
    assert rows[2].problem == "not installed: no_such_package"
    assert rows[3].problem == "failed: AssertionError: out of paper"


def test_a_task_begins_afresh_and_another_one_may_have_failed() -> None:
    """Each task has a fork of its own: no step counter, memory or failure of the one before."""
    body = "assert task != 'big' or step < 2; pages = bytearray(10**8 if task == 'big' else 1)"
    environment = {**heap_environment("steady"), "PYTHONPATH": str(ROOT)}
    with Processes([trainer(body)], environment) as processes:
        rounds = partial(processes.take_turns, seconds=0, least=2, most=2)
        (small,), (failed,), (again,) = rounds("small"), rounds("big"), rounds("small")
    assert failed.problem == "failed: AssertionError"
    assert small.problem is again.problem is None
    assert again.first_step_s > 0
    assert again.peak_bytes < small.peak_bytes + 5e7


def test_a_waiting_process_sleeps_while_another_works() -> None:
    spin = "end = time.process_time() + 0.02\n        while time.process_time() < end: pass"
    worker, waiter = turns_of([trainer(spin, "worker"), trainer("pass", "waiter")])
    assert worker.problem is waiter.problem is None
    # Two of the worker's turns, of 20 ms of processor time each, passed in the longest wait.
    assert max(b.waited_s for b in waiter.blocks) > 0.02
    assert max(b.waited_cpu_s for b in waiter.blocks) < 0.02 / 2


def test_the_tables_name_every_peer_with_its_figures_or_its_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {RAW: trainer("time.sleep(0.001)", RAW), "Accelerate": trainer("pass", "Accelerate")}
    absent = replace(trainer("pass", "Keras 3 on torch"), needs=("no_such_package",))
    subjects = {**tiny, absent.name: absent}
    monkeypatch.setattr(bench, "subject", subjects.__getitem__)
    groups = [Group("mnist", 12, "fp32", heap) for heap in HEAPS]
    results = measure(groups, list(subjects), threads=1, folder=Path("none"), limit_s=300, most=5)
    text = capsys.readouterr().out
    assert f"| {RAW} |" in text
    assert "| Keras 3 on torch | not installed: no_such_package |" in text

    *_, accelerate, _ = group_table(groups[0], results[groups[0]]).split("\n")[2:7]
    assert re.search(r"ms \| \d\.\d\d \[\d\.\d\d, \d\.\d\d\] \|", accelerate)
    short = short_table(results)
    assert "fp32, heap as it is | fp32, heap steady" in short
    for name in subjects:
        assert PEERS[name].includes in short


def test_the_section_of_the_readme_is_replaced() -> None:
    begin, end = MARKS
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    assert replace_section(page, "new\n") == f"before\n{begin}\nnew\n{end}\nafter\n"
    assert all(mark in README.read_text(encoding="utf-8") for mark in MARKS)
