"""Checkpoints of sharded runs: whole or not at all, for any number of processes and any command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mprun.cli.main import main
from mprun.records.run_record import read_summary
from mprun.train import checkpoint
from mprun.train.parallel.layouts import Layout
from tests.run.test_resume import trained
from tests.train.parallel.processes import Groups
from tests.train.parallel.test_lost_processes import LINEAR, STEPS, assert_same_run, whole_runs

__all__ = ["whole_runs"]  # a fixture

SHARDED = [*LINEAR, "precision=fp32", "parallel=fsdp2"]


def shards(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder, "checkpoints").glob("shards-*"))


def weights(folder: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = trained(Path(folder))["model"]
    return found


def last_step(folder: str) -> int:
    saved = checkpoint.load(Path(folder))
    assert saved is not None
    return int(saved["trainer"]["step"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_while_shards_are_written_leaves_the_checkpoint_before(
    groups: Groups, whole_runs: Any, rank: int
) -> None:
    whole = whole_runs("fp32", "fsdp2", LINEAR)
    ended = groups.run([*SHARDED, "run.dir=run"], environment={"PLANTED": f"cut {rank} 7"})
    assert ended.statuses[rank] == -9
    assert ended.statuses[1 - rank] == 1
    step = last_step("run")
    assert step in (4, 6), "that of step 6 is perhaps still being written before step 7"
    assert f"shards-{step}" in shards("run")
    assert groups.run(["run.resume=run"]).statuses == [0, 0]
    assert_same_run("run", whole)
    assert shards("run") == [f"shards-{STEPS}"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_process_ends_all_and_keeps_the_checkpoint_before(
    groups: Groups, whole_runs: Any, rank: int
) -> None:
    whole = whole_runs("fp32", "fsdp2", LINEAR)
    ended = groups.run([*SHARDED, "run.dir=run"], environment={"PLANTED": f"full {rank} 7"})
    assert ended.statuses == [1, 0], "the job fails in all processes, so none is lost"
    assert len(ended.errors) == 1, ended.errors
    assert "the disk is full" in ended.errors[0] or "No space left" in ended.errors[0]
    assert "Traceback" not in ended.errors[0]
    step = last_step("run")
    assert step in (4, 6)
    assert shards("run") == [f"shards-{step}"], "what is not complete takes room that is needed"
    assert read_summary(Path("run")).status == "failed"
    assert groups.run(["run.resume=run"]).statuses == [0, 0]
    assert_same_run("run", whole)


def test_two_processes_then_one_then_four(groups: Groups, whole_runs: Any) -> None:
    whole = whole_runs("fp32", "fsdp2", LINEAR)
    words = [*SHARDED, "run.dir=run"]
    assert groups.run([*words, "train.max_steps=4"]).statuses == [0, 0]
    assert shards("run") == ["shards-4"]
    assert main(["run.resume=run", "parallel=none", "train.max_steps=8"]) == 0
    assert shards("run") == []
    again = ["run.resume=run", "parallel=fsdp2", f"train.max_steps={STEPS}"]
    assert groups.run(again, 4).statuses == [0] * 4
    assert shards("run") == [f"shards-{STEPS}"]
    assert last_step("run") == STEPS
    # sums of 2, 1 and 4 parts round differently: an element may be off by some units of float32
    for name, expected in weights(whole).items():
        torch.testing.assert_close(weights("run")[name], expected, rtol=1e-5, atol=1e-6)


def test_every_command_reads_a_sharded_run(
    groups: Groups, whole_runs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = whole_runs("fp32", "fsdp2", LINEAR)
    expected = weights(run)
    assert main(["export", run, "model.safetensors"]) == 0
    assert main(["export", run, "model.pt"]) == 0
    for found in (load_file("model.safetensors"), torch.load("model.pt", weights_only=True)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    for source in (run, f"{run}/checkpoints/last.pt"):
        words = [*LINEAR[:4], "train.max_steps=1", "train.lr=1e-12", f"train.init_from='{source}'"]
        assert main([*words, f"run.dir=of-{Path(source).suffix}"]) == 0
        started = trained(Path(f"of-{Path(source).suffix}"))["model"]
        assert all(torch.allclose(started[name], expected[name], atol=1e-9) for name in expected)
    capsys.readouterr()
    assert main(["diff", run, run]) == 0
    assert "the weights differ" not in capsys.readouterr().out


def test_a_strangers_checkpoint_leads_nowhere_else(groups: Groups, whole_runs: Any) -> None:
    file = Path(whole_runs("fp32", "fsdp2", LINEAR)) / "checkpoints" / "last.pt"
    saved = torch.load(file, weights_only=True)
    for name in ("shards-4", "../checkpoints/shards-12", "/etc", "", 3, None):
        saved["shards"]["folder"] = name
        with pytest.raises((ValueError, OSError, TypeError)):
            checkpoint.fetched(saved, file, Layout())
