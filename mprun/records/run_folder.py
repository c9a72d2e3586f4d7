"""The folder of a run while the run writes it, and the plan in the folder of a study. No torch.

In metrics.jsonl an epoch has a line `epoch` with its training scores and, before it, a line
`validation` if it was validated; `train.validations` adds such lines inside of epochs.
`summary.json` shows a choice of a long run's epochs; these lines are all of them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import msgspec
from filelock import FileLock, Timeout

from mprun.errors import MachineFailedError, UsageError
from mprun.records.files import (
    jsonable,
    refuse_links,
    remove_leftovers,
    write_atomic,
    write_json,
    write_new,
)
from mprun.records.reader import converted, read_json, read_json_lines
from mprun.records.run_config import FILE as LOGGER
from mprun.records.run_record import METRICS, Epoch, Number, Scores, Summary, placed_lines

FULL = (errno.ENOSPC, errno.EDQUOT)  # No room on the disk, or none for this user

RECIPE = "recipe.py"  # The copy of a recipe that is a file

# What a run reads and writes in its folder
ENTRIES = (
    RECIPE,
    *("config.yaml", "metrics.jsonl", "summary.json", "fp_exceptions.json", "traceback.txt"),
    *("checkpoints", "checkpoints/last.pt", "checkpoints/.lock", "tensorboard", LOGGER),
)

TRACKERS = "trackers"  # A folder beside the runs, for the files of loggers


class RunFolder:
    """A run's folder, which one process at a time writes.

    A new run's contains no run. Of a resumed one, metrics.jsonl ends before the first line that
    `keep` rejects.

    Raises:
        UsageError: it contains a run or a link in place of one of its files, another process uses
            it, or it cannot be written.
        MachineFailedError: the disk is full.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        self.path = path
        self._lock = FileLock(path / "checkpoints" / ".lock", timeout=0)
        self._metrics: TextIO | None = None
        try:
            refuse_links(path, ENTRIES)
            path.mkdir(parents=True, exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)  # the lock's folder
            self._lock.acquire()  # before anything is removed or opened for writing
            for folder in (path, path / "checkpoints"):
                remove_leftovers(folder)
            self._metrics = self._open(keep)
        except FileExistsError:
            self.close()
            raise UsageError(
                f"run.dir={path} already contains a run (or is a file); choose another folder, "
                f"or continue that run with run.resume={path}"
            ) from None
        except Timeout:
            raise UsageError(
                f"run.dir={path}: another mprun is running there; choose another folder"
            ) from None
        except UsageError:  # a damaged line: only when a run is resumed
            self.close()
            raise
        except OSError as error:
            self.close()
            kind = MachineFailedError if error.errno in FULL else UsageError
            raise kind(
                f"run.dir={path} cannot be written ({error.strerror}); choose another folder"
            ) from None

    def _open(self, keep: Callable[[dict[str, Any]], bool] | None) -> TextIO:
        file = self.path / METRICS
        if keep is None:
            # x fails if a run is there; a folder that a run took and left empty is taken over
            return file.open("w" if has_begun(self.path) else "x", encoding="utf-8")
        if file.exists():
            _cut(self.path, keep)
        return file.open("a", encoding="utf-8")

    def write(self, name: str, content: str | bytes | None) -> Path:
        """Replace a file of the record, or remove it (None); its path."""
        path = self.path / name
        if content is None:
            path.unlink(missing_ok=True)
        else:
            data = content.encode(errors="replace") if isinstance(content, str) else content
            write_atomic(path, data)
        return path

    def lines(self, lines: list[dict[str, Any]]) -> None:
        """Append lines to metrics.jsonl; they are on disk when this returns."""
        assert self._metrics is not None
        self._metrics.write(_as_text(lines))
        self._metrics.flush()

    def sync(self) -> None:
        """Bring the lines so far to the disk itself, where they survive a power failure."""
        assert self._metrics is not None
        os.fsync(self._metrics.fileno())

    def summary(self, summary: Summary) -> None:
        """Replace summary.json; the time is noted in it."""
        summary.written_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self.restore(summary)

    def restore(self, summary: Summary) -> None:
        """Replace summary.json by one that was there before."""
        write_json(self.path / "summary.json", asdict(summary))

    def close(self) -> None:
        """Close metrics.jsonl and unlock the folder."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # a full disk has been reported before
                self._metrics.close()
        self._lock.release()


def _cut(run: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """End metrics.jsonl before the first line that is cut short, or that `keep` rejects."""
    file = run / METRICS
    shorter = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        with shorter.open("x", encoding="utf-8") as copy:
            # one at a time, because the lines of a long run do not fit into memory
            for line in itertools.takewhile(keep, placed_lines(run)):
                copy.write(_as_text([line]))
            copy.flush()
            os.fsync(copy.fileno())
        shorter.replace(file)
    finally:
        shorter.unlink(missing_ok=True)


def has_begun(folder: Path) -> bool:
    """Whether a run took a folder and ended before it recorded anything in it."""
    checkpoints, metrics = folder / "checkpoints", folder / METRICS
    try:
        names = {path.name for path in folder.iterdir() if path.suffix != ".tmp"}
        locked = {path.name for path in checkpoints.iterdir()} <= {".lock"}
        recorded = metrics.exists() and metrics.stat().st_size > 0
    except OSError:
        return False
    return names <= {checkpoints.name, metrics.name} and locked and not recorded


def _as_text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(jsonable(x), separators=(",", ":")) + "\n" for x in lines)


SCHEMA_VERSION = 1
FILE = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class LookPlan:
    """When a study with `seeds=auto` looks at its verdicts, and by what it judges."""

    seeds: tuple[int, ...]  # A look after the first so many seeds; the last is the limit
    levels: tuple[float, ...]  # The chance of a false claim that each look adds
    metric: str
    split: str  # Whose samples it is of: test, validation or train
    margin: float  # Of accuracies and other fractions
    relative_margin: float  # Of other metrics, as a share of the baseline's
    weights: str  # Which weights are judged: auto (averaged, if every run has them), averaged, last


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """The runs of a study."""

    command: str  # The command: sweep, advise or double
    variants: dict[str, tuple[str, ...]]  # Name to overrides; the first is the baseline
    seeds: tuple[int, ...]
    config_dir: str | None  # The user's own folder of configs
    of_trials: tuple[str, ...]
    """Overrides of all trials that define no variant: shorter training, no test set."""
    not_tried: dict[str, str] = field(default_factory=dict)  # Variants left out, to the reason
    looks: LookPlan | None = None  # None: every variant has all seeds


# Characters of a variant's name in a folder's name: file systems allow 255 bytes, and a seed and
# the suffixes of temporary files follow
LONGEST = 100


def file_names(variants: Iterable[str]) -> dict[str, str]:
    """A unique name for each variant that every file system accepts."""
    slugs: dict[str, str] = {}
    for variant in variants:
        safe = "".join(c if c.isalnum() or c in "._+=-" else "_" for c in variant)[:LONGEST]
        name, n = safe, 1  # two names may differ only in replaced characters, or behind the end
        while name in slugs.values():
            n += 1
            name = f"{safe}~{n}"
        slugs[variant] = name
    return slugs


def study_of_runs(runs: Sequence[Path]) -> Path | None:
    """The folder of the study that all these folders of runs are in; None without one."""
    folders = {run.resolve().parent for run in runs}
    folder = folders.pop() if len(folders) == 1 else None
    return folder if folder is not None and (folder / FILE).exists() else None


def write_study_plan(folder: Path, plan: StudyPlan) -> None:
    """Write sweep.json; raises `FileExistsError` where another process was quicker."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(plan)}, indent=1)
    # processes that begin one study together have to carry out one plan: the first one's
    write_new(folder / FILE, text.encode())


def read_study_plan(folder: Path) -> StudyPlan:
    """The plan in a study's folder; raises `UsageError` if there is none, or as `read_json`."""
    try:
        return read_json(folder / FILE, StudyPlan, SCHEMA_VERSION)
    except FileNotFoundError as error:
        raise UsageError(
            f"run.resume={folder}: {folder / FILE} cannot be read ({error.strerror}); is {folder} "
            "a study?"
        ) from None


class _ScoreLine(msgspec.Struct):
    """A line `epoch` or `validation`."""

    kind: str
    step: Annotated[int, msgspec.Meta(ge=1, le=2**53)]  # Whole numbers are exact in float64 so far
    loss: Number | None
    epoch: int = 0
    accuracy: float | None = None
    samples: int | None = None
    metrics: dict[str, Number | None] | None = None

    @property
    def scores(self) -> Scores:
        return Scores(
            loss=self.loss, accuracy=self.accuracy, samples=self.samples, metrics=self.metrics
        )


def _score_lines(run: Path, kinds: Sequence[str], having: bytes) -> Iterator[_ScoreLine]:
    """The lines of these kinds; only lines with the bytes `having` are parsed."""
    for line in read_json_lines(run / METRICS, having):
        if line.get("kind") in kinds:
            yield converted(run / METRICS, line, _ScoreLine)


def epoch_lines(epoch: Epoch, step: int) -> list[dict[str, Any]]:
    """The lines of an epoch that ended with this step."""
    lines = []
    if epoch.validation.named:
        lines.append(score_line("validation", epoch.epoch, step, epoch.validation))
    return [*lines, score_line("epoch", epoch.epoch, step, epoch.train)]


def score_line(kind: str, epoch: int, step: int, scores: Scores) -> dict[str, Any]:
    """The line `epoch` or `validation` of the scores after this step of an epoch."""
    known = {k: v for k, v in vars(scores).items() if k in ("loss", "accuracy") or v}
    return {"kind": kind, "step": step, "epoch": epoch, **known}


def read_epochs(run: Path) -> Iterator[Epoch]:
    """The epochs in a run's metrics.jsonl, one at a time, in their order."""
    validations: dict[int, Scores] = {}
    # lines of steps have no accuracy
    for row in _score_lines(run, ("epoch", "validation"), having=b'"accuracy"'):
        if row.kind == "validation":
            validations[row.epoch] = row.scores  # the epoch's last one is that of its end
        else:
            validation = validations.pop(row.epoch, Scores(loss=None, accuracy=None))
            yield Epoch(epoch=row.epoch, train=row.scores, validation=validation)


class ValidationLoss(NamedTuple):
    """The mean loss over the whole validation set after `step` optimizer steps."""

    step: int
    loss: float


def read_validation_losses(run: Path) -> list[ValidationLoss]:
    """The validation losses in a run's metrics.jsonl, with rising steps.

    Validations of a part of the samples are left out: their losses are of other samples. Raises as
    `read_json_lines` does.
    """
    losses: dict[int, float] = {}
    for row in _score_lines(run, ("validation",), having=b'"validation"'):
        if row.loss is not None and row.samples is None:
            losses[row.step] = float(row.loss)
    return [ValidationLoss(step, losses[step]) for step in sorted(losses)]
