"""The guard of products in several processes: each decides about its own samples, all are counted.

The oracle is one process that takes the same parts of each batch as micro-batches: its products are
those of the processes, one after the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.records.run_record import GuardRow, read_summary
from tests.run.test_guard_runs import RECIPE, events
from tests.run.test_resume import assert_equal
from tests.train.parallel.processes import Groups
from tests.train.parallel.test_equal_runs import losses, model, plain

WORDS = [
    *("recipe=planted.py", "precision=fp8_tensorwise", "device=cpu", "speed=plain"),
    *("train.batch_size=16", "train.max_steps=7", "debug.guard=promote"),
    *("debug.guard_error=1", "train.checkpoint_every_steps=1000"),
]
FOUND = {("2.linear", "forward"), ("2.linear", "grad_weight")}


@pytest.fixture(autouse=True)
def planted() -> None:
    Path("planted.py").write_text(RECIPE, encoding="utf-8")


def guard_of(name: str) -> GuardRow:
    guard = read_summary(Path(name)).guard
    assert guard is not None
    assert {(x.module, x.product) for x in guard.gemms} == FOUND
    return guard


def test_replicas_find_what_one_process_finds_in_micro_batches(groups: Groups) -> None:
    words = [*WORDS, "debug.guard_underflow=0.37"]  # passed in some micro-batches
    assert main([*words, "train.accumulate=2", "run.dir=one"]) == 0
    ended = groups.run([*words, "parallel=ddp", "run.dir=many"])
    assert ended.statuses == [0, 0], ended.errors
    assert guard_of("one") == guard_of("many")
    assert all(0 < x.steps < 7 for x in guard_of("one").gemms)
    assert events("one") == events("many")
    assert losses("many") == losses("one")
    assert_equal(plain(model("many")), plain(model("one")))


def test_shards_count_each_step_once(groups: Groups) -> None:
    """Both processes find the outlier in every step.

    FSDP2 does not call the hook that keeps the outlier's weights; a small step keeps them, too.
    """
    words = [*WORDS, "debug.guard_underflow=0.2", "train.lr=1e-8"]
    ended = groups.run([*words, "parallel=fsdp2", "run.dir=many"])
    assert ended.statuses == [0, 0], ended.errors
    assert [x.steps for x in guard_of("many").gemms] == [7, 7]
    assert len(events("many")) == 14
