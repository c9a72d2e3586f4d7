"""The runs and studies below a folder, newest first, and the one that `last` names. No torch.

A folder with sweep.json is a study of mprun, one with multirun.yaml a sweep of `mprun -m`: their
runs belong to them. Of a run only the head of its summary is read. A record that cannot be read is
listed with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import msgspec

from mprun.errors import UsageError
from mprun.records.console.formatting import counted
from mprun.records.reader import read_json
from mprun.records.run_folder import FILE, TRACKERS, read_study_plan
from mprun.records.run_record import METRICS, SCHEMA_VERSION, Metric, MetricRow, Scores, Status

OUTPUTS = Path("outputs")  # Where runs and studies are by default
LAST = "last"
RUNS = ("train",)
STUDIES = ("sweep", "advise", "double", "train -m")
MULTIRUN_FILE = "multirun.yaml"
RUN_FILES = {"summary.json", METRICS}
NOT_SEARCHED = ("checkpoints", TRACKERS)


# Not the whole `run_record.Summary`: a list needs few fields, and msgspec skips the others
class _Head(msgspec.Struct):
    """What is read of a summary."""

    status: Status
    started_at: str
    recipe: str
    seed: int
    variant: str
    metric: Metric
    test: Scores
    metrics: dict[str, MetricRow] = {}
    error: str | None = None
    observed: bool = False


@dataclass(frozen=True, kw_only=True)
class ListedRecord:
    """A run, or a study with its runs."""

    path: str
    command: str  # What wrote it: train, observe, or one of `STUDIES`
    started_at: datetime  # In UTC; of a study, when its first run started
    status: Status | Literal["incomplete", "damaged"]
    recipe: str = ""
    mode: str = ""  # The label of its variant; of a study, how many there are
    seed: int | None = None
    metric: str = ""
    higher_is_better: bool = True
    value: float | None = None
    """Of the metric on test data, else on validation or training data; None if it is not known."""
    error: str | None = None
    planned: int = 1  # Runs that a study has or will have
    runs: tuple[ListedRecord, ...] = ()  # Of a study, newest first


def listed(folder: Path) -> list[ListedRecord]:
    """The runs and studies below a folder; of a study's folder, its runs."""
    return _newest_first(_below(folder, is_top=True))


def resolved_last(text: str, *commands: str) -> str:
    """`text`, or the newest folder that these commands made if it is `last`.

    What is called `last` is itself. Where no study is asked for, the runs in studies count. Raises
    `UsageError` if there is none below outputs/.
    """
    if text != LAST or os.path.lexists(LAST):
        return text
    records = listed(OUTPUTS)
    if not {*commands} & {*STUDIES}:
        records = _newest_first(run for x in records for run in (x.runs or (x,)))
    for record in records:
        if record.command in commands and record.status != "damaged":
            return record.path
    raise UsageError(
        f"'{LAST}': there is no folder of mprun {' or '.join(commands)} below {OUTPUTS}/ here; "
        "start mprun where it is, or name one (mprun ls FOLDER lists those below FOLDER)"
    )


def _newest_first(records: Iterable[ListedRecord]) -> list[ListedRecord]:
    return sorted(records, key=lambda x: (x.started_at, x.path), reverse=True)


def _below(folder: Path, is_top: bool = False) -> Iterator[ListedRecord]:
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except FileNotFoundError:  # it was removed meanwhile
        return
    except OSError as error:
        yield _damaged(folder, f"cannot be read ({error.strerror})")
        return
    names = {entry.name for entry in entries}
    if names & RUN_FILES:
        yield _run(folder)
        return
    folders = (
        Path(entry.path)
        for entry in entries
        if entry.name not in NOT_SEARCHED and entry.is_dir(follow_symlinks=False)
    )  # links are not followed: one to a folder above would never end
    records = (record for path in folders for record in _below(path))
    if is_top or not names & {FILE, MULTIRUN_FILE}:
        yield from records
    else:
        yield _study(folder, tuple(_newest_first(records)))


def _damaged(folder: Path, reason: str) -> ListedRecord:
    return ListedRecord(
        path=str(folder),
        command="train",
        started_at=_changed_at(folder),
        status="damaged",
        error=reason.replace(f"{folder}/", "", 1),
    )


def _changed_at(folder: Path) -> datetime:
    return datetime.fromtimestamp(folder.stat().st_mtime, timezone.utc)


def _run(folder: Path) -> ListedRecord:
    try:
        head = read_json(folder / "summary.json", _Head, SCHEMA_VERSION)
        started_at = datetime.fromisoformat(head.started_at).astimezone(timezone.utc)
    except FileNotFoundError:
        return _damaged(folder, "ended before it had a summary.json")
    except (UsageError, ValueError, OverflowError) as error:  # the latter two: no date
        return _damaged(folder, str(error))
    metric = head.metric
    of = head.metrics.get(metric.name)
    scores = (of.test, of.validation, of.train) if of else (head.test.value(metric.name),)
    value = next((x for x in scores if x is not None), None)
    return ListedRecord(
        path=str(folder),
        command="observe" if head.observed else "train",
        started_at=started_at,
        status=head.status,
        recipe=head.recipe,
        mode=head.variant,
        seed=None if head.observed else head.seed,
        metric=metric.name,
        higher_is_better=metric.higher_is_better,
        value=None if value is None else float(value),
        error=head.error,
    )


def _study(folder: Path, runs: tuple[ListedRecord, ...]) -> ListedRecord:
    command, planned, variants = STUDIES[-1], len(runs), len({run.mode for run in runs})
    if (folder / FILE).exists():
        try:
            plan = read_study_plan(folder)
        except UsageError as error:
            return replace(_damaged(folder, str(error)), runs=runs)
        command, variants = plan.command, len(plan.variants)
        # With looks the number of runs is known only at the end
        fewest = len(plan.seeds) if plan.looks is None else plan.looks.seeds[0]
        planned = variants * fewest if plan.looks is None else max(len(runs), variants * fewest)
    first = next((run for run in runs if run.status != "damaged"), None)
    completed = sum(run.status == "completed" for run in runs)
    return ListedRecord(
        path=str(folder),
        command=command,
        started_at=min((run.started_at for run in runs), default=_changed_at(folder)),
        status="completed" if completed == planned else "incomplete",
        recipe=", ".join(dict.fromkeys(run.recipe for run in runs if run.recipe)),
        mode=counted(variants, "variant"),
        metric=first.metric if first else "",
        higher_is_better=first is None or first.higher_is_better,
        planned=planned,
        runs=runs,
    )
