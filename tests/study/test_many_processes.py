"""One study, many processes: every run once, whatever happens to a process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from mprun.cli.main import main
from mprun.config.settings import study_request
from mprun.errors import UsageError
from mprun.records.console import stdout_console
from mprun.records.run_record import Summary, read_summary
from mprun.study.budget import Budget, BudgetSignals
from mprun.study.compare.load import find_runs
from mprun.study.compare.times import OVERLAPPED
from mprun.study.compare.verdicts import compare
from mprun.study.hydra_launch import Screening
from mprun.study.study import Study, new_study, resumed_study
from mprun.study.trials import Outcome, StudyProgress, Trial, TrialClaims, Trials
from mprun.train.machine import machine
from tests.study.crowd import Crowd, a_crowd, starts, write_recipe

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

SWEEP = ["sweep", "recipe=waiting.py", "precision=fp32,bf16_mixed", "run.dir=s"]


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with a_crowd() as crowd:
        yield crowd


def summaries(study: str) -> dict[str, Summary]:
    return {
        path.parent.name: read_summary(path.parent) for path in Path(study).glob("*/summary.json")
    }


@pytest.mark.representative(0)
@pytest.mark.parametrize("seeds", [6, 20])
def test_many_runs_by_four_processes_at_once(seeds: int, crowd: Crowd) -> None:
    """The same command four times: each run is begun once, and the comparison says what counts."""
    write_recipe(together=4)
    Path("go").touch()
    runs = 2 * seeds
    words = [*SWEEP, "train.max_steps=20", "train.batch_size=8", f"seeds={seeds}"]
    words += ["execution=native", "compare.report=false"]
    pids = [crowd.start(words, f"{n}.txt") for n in range(4)]
    assert crowd.statuses() == dict.fromkeys(pids, 0)
    found = summaries("s")
    assert len(found) == runs
    assert {(summary.status, summary.steps) for summary in found.values()} == {("completed", 20)}
    begun = starts("s")
    assert begun.keys() == found.keys()
    assert all(len(by) == 1 for by in begun.values()), "a run was begun twice"
    assert {by[0] for by in begun.values()} == set(pids)
    assert not list(Path("s").glob("*.abandoned-*"))
    assert not list(Path("s").rglob("*.tmp"))
    assert {summary.hardware.host for summary in found.values()} == {machine.host()}
    texts = [Path(f"{n}.txt").read_text(encoding="utf-8") for n in range(4)]
    for text in texts:  # each process waited for the others
        assert f"{runs} of {runs} runs" in text
        assert f"no verdict on the times of bf16_mixed: {OVERLAPPED}" in text
    assert sum("s has this study already" in text for text in texts) == 3
    base, other = compare(find_runs([Path("s")]).runs, margin=0.005, relative_margin=0.02).variants
    assert (len(base.runs), len(other.runs)) == (seeds, seeds)
    assert other.verdict.interval is not None
    assert other.no_time_verdict == OVERLAPPED
    assert other.step_time_ratio.interval is None


# ---- the order of one process --------------------------------------------------------------------


def study() -> Study:
    """Two variants with three seeds; each run takes a step."""
    request = study_request("sweep", ["run.dir=s", "seeds=3"], None)
    variants = {mode: ("recipe=linear", f"precision={mode}") for mode in ("fp32", "bf16_mixed")}
    return new_study(request, variants, of_trials=["train.max_steps=1"])


def order_of(study: Study, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the trials that this process carries out, in its order."""
    names: list[str] = []
    carry_out = Trials.run

    def run(self: Trials, trial: Trial) -> Outcome:
        names.append(trial.name)
        return carry_out(self, trial)

    monkeypatch.setattr(Trials, "run", run)
    progress = StudyProgress(stdout_console(), list(study.plan.variants), len(study.plan.seeds))
    with BudgetSignals(Budget()) as stop:
        study.run(stop, progress)
    return names


def locked(study: Study, *names: str) -> list[FileLock]:
    """Locks of another process."""
    (study.folder / ".claims").mkdir(exist_ok=True)
    locks = [FileLock(study.folder / ".claims" / f"{name}.lock") for name in names]
    for lock in locks:
        lock.acquire()
    return locks


def test_a_process_takes_whole_seeds_first_then_helps_then_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process is at the first variant of seed 0, and is killed while this one waits."""
    made = study()
    seed, trial = locked(made, "seed0", "fp32-seed0")

    def killed(self: StudyProgress, runs: Sequence[str]) -> None:
        assert runs == ["fp32 seed 0"]
        seed.release()
        trial.release()

    monkeypatch.setattr(StudyProgress, "wait_for", killed)
    assert order_of(made, monkeypatch) == [
        *("bf16_mixed-seed1", "fp32-seed1", "fp32-seed2", "bf16_mixed-seed2"),
        *("bf16_mixed-seed0", "fp32-seed0"),
    ]


def test_a_budget_ends_the_waiting_for_other_processes() -> None:
    made = study()
    theirs = locked(made, *(trial.name for trial in made.trials))
    progress = StudyProgress(stdout_console(), list(made.plan.variants), len(made.plan.seeds))
    with BudgetSignals(Budget("sweep.budget_min", 1 / 60)) as stop:
        result = made.run(stop, progress)
    assert len(theirs) == 6
    assert result.outcomes == []
    assert result.not_run == {"fp32": [0, 1, 2], "bf16_mixed": [0, 1, 2]}


def test_a_run_that_another_process_ends_in_this_moment_is_not_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = study()
    ask = Trials.has_ended
    asked: list[str] = []

    def has_ended(self: Trials, trial: Trial) -> bool:
        """The other process ends the run after this one has looked, and before it has the lock."""
        asked.append(trial.name)
        return asked.count(trial.name) > 1 or ask(self, trial)

    monkeypatch.setattr(Trials, "has_ended", has_ended)
    order_of(made, monkeypatch)
    assert starts("s") == {}


# ---- the folder ----------------------------------------------------------------------------------


def test_locks_that_are_links_are_refused() -> None:
    claims = Path("s/.claims")
    claims.mkdir(parents=True)
    (claims / "fp32-seed0.jsonl").symlink_to(Path("mine.txt").absolute())
    with pytest.raises(UsageError, match=r"fp32-seed0\.jsonl is a link"):
        resumed_study("sweep", Path("s"), trust=True)
    claims.rename("claims")
    claims.symlink_to(Path("claims").absolute())
    with pytest.raises(UsageError, match=r"\.claims is a link"):
        resumed_study("sweep", Path("s"), trust=True)


def test_a_file_system_without_locks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FileLock) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(FileLock, "_acquire", refuse)
    claims = TrialClaims(Path())
    with (
        pytest.raises(UsageError, match="this file system has no locks"),
        claims.held("fp32-seed0"),
    ):
        pass


def test_a_run_of_another_process_that_lasts_keeps_modes_from_being_screened_by_time() -> None:
    words = ["recipe=linear", "train.max_steps=20", "precision=fp32", "train.lr=0.01,0.02"]
    assert main(["sweep", *words, "seeds=2", "run.dir=s", "compare.report=false"]) == 0
    made = resumed_study("sweep", Path("s"))
    progress = StudyProgress(stdout_console(), list(made.plan.variants), 2)
    first, *rest = made.run(BudgetSignals(Budget(minutes=0)), progress).outcomes
    slower = [o for o in rest if o.trial.variant != made.baseline]
    for outcome in slower:
        outcome.summary.step_time_ms.median = 1e6
    drop = Screening("time", 1).drop
    assert set(drop(made, rest)) == {slower[0].trial.variant}
    path = Path("s") / first.trial.name / "summary.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {"status": "running", "written_at": None}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert drop(made, rest) == {}
