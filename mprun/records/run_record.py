"""Records: what a run leaves behind, and how it is read again. No torch.

A run's folder holds

    config.yaml      the resolved configuration
    metrics.jsonl    a line per step, validation or event, appended as the run goes
    summary.json     one object, `Summary` below, written at the start (status "running"), replaced
                     whenever an epoch ends, and at the end
    fp_exceptions.json   with `debug.fp_exceptions`: each distinct exception, in full
    checkpoints/     what a run can be continued from

Other programs read these files: names and meanings are fixed, `SCHEMA_VERSION` moves when one
changes. Accuracies are fractions from 0 to 1, dtypes PyTorch's names, and JSON has no word for NaN
and infinities, so they are the strings "nan", "inf" and "-inf". What does not apply is null.

Files are replaced whole: written under a temporary name, synced, renamed. A reader, or a crash,
meets the old summary or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from filelock import FileLock, Timeout

from mprun.errors import UsageError
from mprun.records.reader import read_json

SCHEMA_VERSION = 1

Status = Literal["running", "completed", "interrupted", "failed"]
Number = float | Literal["nan", "inf", "-inf"]


@dataclass(kw_only=True)
class Hardware:
    """The machine."""

    device: str
    name: str
    cores: int
    memory_bytes: int | None
    accelerated: dict[str, bool]


@dataclass(kw_only=True)
class PrecisionRow:
    """A policy's columns."""

    param_dtype: str
    compute_dtype: str
    output_dtype: str
    casting: str
    op_lists: str
    layers: dict[str, str]
    rounding: str
    rounding_scope: str
    overflow: str
    accum_dtype: str
    momentum_dtype: str
    variance_dtype: str
    partials_dtype: str
    tf32: bool


@dataclass(kw_only=True)
class Substitution:
    """An op computed in another dtype than asked for."""

    op: str
    dtype: str
    reason: str


@dataclass(kw_only=True)
class BackendRow:
    """Choices that change speed, not meaning."""

    memory_format: str
    optimizer_impl: str
    compile: bool
    threads: int


@dataclass(kw_only=True)
class DataRow:
    """The samples."""

    name: str
    source: str
    train_samples: int
    validation_samples: int
    test_samples: int


@dataclass(kw_only=True)
class BatchRow:
    """Batch sizes: micro x accumulate = effective; base is what the recipe or the user set."""

    micro: int
    accumulate: int
    effective: int
    base: int
    lr_rule: str


@dataclass(kw_only=True)
class StepTimes:
    """Milliseconds per optimizer step over `n` timed steps, `warmup` more left out."""

    median: float | None
    p10: float | None
    p90: float | None
    n: int
    warmup: int


@dataclass(kw_only=True)
class DataTimes:
    """Milliseconds a step waited for its batch."""

    median: float | None
    p90: float | None


MEMORY_CATEGORIES = (
    *("parameters", "buffers", "gradients"),
    *("optimizer_state", "activations", "temporary"),
)
"""The parts of a step's memory; they sum to its peak."""


@dataclass(kw_only=True)
class Memory:
    """Bytes alive at the peak of a training step; the six parts sum to `peak`."""

    peak: int | None
    parameters: int | None
    buffers: int | None
    gradients: int | None
    optimizer_state: int | None
    activations: int | None
    temporary: int | None
    data: int
    allocator_peak: int | None


@dataclass(kw_only=True)
class LossScaleRow:
    """The loss scale at the run's ends."""

    kind: str
    initial: float
    final: float


@dataclass(kw_only=True)
class FpExceptionsRow:
    """Floating-point exceptions: what is done about them, and how many there were by verdict.

    A finding spoiled the loss, a gradient, a weight, a buffer, optimizer state or a result; an
    expected one did in a step that dynamic loss scaling skipped; an absorbed one spoiled nothing.
    """

    action: str
    finding: int
    expected: int
    absorbed: int
    dropped_steps: int


@dataclass(kw_only=True)
class Metric:
    """What the recipe is judged by."""

    name: str
    higher_is_better: bool


@dataclass(kw_only=True)
class Scores:
    """Means over samples."""

    loss: Number | None
    accuracy: float | None


@dataclass(kw_only=True)
class TrainScore:
    """Mean training loss of the last epoch."""

    loss: Number | None


@dataclass(kw_only=True)
class Epoch:
    """One epoch's scores."""

    epoch: int
    train: Scores
    validation: Scores


@dataclass(kw_only=True)
class Summary:
    """Everything a comparison needs to know of a run."""

    schema_version: int
    status: Status
    error: str | None
    started_at: str
    mprun_version: str
    git_commit: str | None
    versions: dict[str, str | None]
    hardware: Hardware
    recipe: str
    seed: int
    precision: str
    variant: str
    variant_hash: str
    requested: PrecisionRow
    effective: PrecisionRow
    execution: str
    substitutions: list[Substitution]
    backend: BackendRow
    data: DataRow
    batch: BatchRow
    batch_size: int
    epochs: int | None
    steps: int
    skipped_steps: int
    step_time_ms: StepTimes
    data_time_ms: DataTimes
    samples_per_second: float | None
    wall_time_s: float
    memory_bytes: Memory
    loss_scale: LossScaleRow
    metric: Metric
    history: list[Epoch]
    train: TrainScore
    test: Scores
    fp_exceptions: FpExceptionsRow | None = None
    warnings: list[str] = field(default_factory=list)
    """What the user was warned of, a sentence each; fields without effect are among them."""


def variant_config(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration without seed, paths and loggers: what makes a variant."""
    config: dict[str, Any] = json.loads(json.dumps(resolved))
    for key in ("seed", "run", "logger"):
        config.pop(key, None)
    config.get("data", {}).pop("root", None)
    config.get("preset", {}).pop("name", None)  # what it sets stays
    for key in ("log_every", "checkpoint_every_steps"):
        config.get("train", {}).pop(key, None)
    if config.get("debug", {}).get("fp_exceptions") == "skip":  # it may drop steps
        config["debug"] = {"fp_exceptions": "skip"}
    else:
        config.pop("debug", None)
    for key in ("lower_file", "fp32_file", "promote_file", "strict", "verbose"):
        config.get("op_lists", {}).pop(key, None)  # the names in the files stay
    return config


def variant_hash(resolved: Mapping[str, Any]) -> str:
    """Twelve hex digits of what makes a variant.

    Runs with one hash differ in nothing a comparison should keep apart.
    """
    text = json.dumps(variant_config(resolved), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def jsonable(value: Any) -> Any:
    """`value` with the floats JSON cannot write as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return value


def number(value: Number) -> float:
    """A recorded number as a float, the three strings included."""
    return float(value)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a temporary file beside it, synced, then renamed.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def dated_folder() -> Path:
    """Make a folder under outputs/, named by date and time, that belongs to this process alone.

    Every name that mprun chooses itself comes from here. `mkdir` fails where the name exists, in
    one step of the file system: of processes that begin in the same second each gets a folder of
    its own, the later ones with -2, -3, ... at the end.

    Raises:
        UsageError: it cannot be made.
    """
    now = datetime.now()
    day, clock = Path("outputs") / now.strftime("%Y-%m-%d"), now.strftime("%H-%M-%S")
    for n in itertools.count(1):
        folder = day / (clock if n == 1 else f"{clock}-{n}")
        try:
            day.mkdir(parents=True, exist_ok=True)
            if _is_made(folder):
                return folder
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be made ({error.strerror}); start mprun in a folder that can be "
                "written"
            ) from None
    raise AssertionError("counting does not end")


def _is_made(folder: Path) -> bool:
    """Make `folder`; False where the name is taken, or its parent was removed just now."""
    try:
        folder.mkdir()
    except (FileExistsError, FileNotFoundError):
        return False
    return True


@contextlib.contextmanager
def dated_folder_if_used() -> Iterator[Path]:
    """A folder from `dated_folder`, removed at the end if nothing was put into it."""
    folder = dated_folder()
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # one that holds something stays
            for path in (folder, *list(folder.parents)[:2]):
                path.rmdir()


def new_folder(wanted: str | None) -> Path:
    """The folder `run.dir` names, or one with the date, made; for commands that leave no run.

    Raises:
        UsageError: it cannot be written, or holds something already.
    """
    if wanted is None:
        return dated_folder()
    folder = Path(wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(folder.iterdir(), None)
    except OSError as error:
        raise UsageError(f"run.dir={folder} cannot be written ({error.strerror})") from None
    if taken is not None:
        raise UsageError(f"run.dir={folder} holds {taken.name} already; choose another folder")
    return folder


class RunFolder:
    """A run's folder, owned by one process at a time.

    Args:
        path: the folder; a new run needs one that holds no run yet.
        keep: for a run being resumed, which lines of metrics.jsonl stay; None for a new run.

    Raises:
        UsageError: it holds a run already, another process runs there, or it cannot be written.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        self.path = path
        self._lock = FileLock(path / "checkpoints" / ".lock", timeout=0)
        self._metrics: TextIO | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            self._lock.acquire()
            self._metrics = self._open(keep)
        except FileExistsError:
            self.close()
            raise UsageError(
                f"run.dir={path} holds a run already (or is a file); choose another folder, "
                f"or continue that run with run.resume={path}"
            ) from None
        except Timeout:
            raise UsageError(
                f"run.dir={path}: another mprun is running there; choose another folder"
            ) from None
        except ValueError as error:  # no JSON, or no text at all: only where a run is resumed
            self.close()
            raise UsageError(f"{path / 'metrics.jsonl'} is damaged: {error}") from None
        except OSError as error:
            self.close()
            raise UsageError(
                f"run.dir={path} cannot be written ({error.strerror}); choose another folder"
            ) from None

    def _open(self, keep: Callable[[dict[str, Any]], bool] | None) -> TextIO:
        file = self.path / "metrics.jsonl"
        if keep is None:
            return file.open("x", encoding="utf-8")
        lines = [x for x in read_lines(self.path) if keep(x)] if file.exists() else []
        write_atomic(file, _as_text(lines).encode())
        return file.open("a", encoding="utf-8")

    def config(self, yaml_text: str) -> None:
        """Write config.yaml."""
        write_atomic(self.path / "config.yaml", yaml_text.encode())

    def lines(self, lines: list[dict[str, Any]]) -> None:
        """Append lines to metrics.jsonl; they are on disk when this returns."""
        assert self._metrics is not None
        self._metrics.write(_as_text(lines))
        self._metrics.flush()

    def summary(self, summary: Summary) -> None:
        """Replace summary.json."""
        text = json.dumps(jsonable(asdict(summary)), indent=1, allow_nan=False)
        write_atomic(self.path / "summary.json", f"{text}\n".encode())

    def fp_exceptions(self, found: dict[str, Any]) -> None:
        """Replace fp_exceptions.json."""
        text = json.dumps(jsonable(found), indent=1, allow_nan=False)
        write_atomic(self.path / "fp_exceptions.json", f"{text}\n".encode())

    def close(self) -> None:
        """Close metrics.jsonl and let others have the folder."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # a full disk was reported when it was met
                self._metrics.close()
        self._lock.release()


def _as_text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(jsonable(x), separators=(",", ":")) + "\n" for x in lines)


def read_summary(run: Path) -> Summary:
    """The summary of a run's folder.

    Raises:
        UsageError: there is none, it is damaged, or a later version of mprun wrote it.
    """
    path = run / "summary.json"
    try:
        return read_json(path, Summary, SCHEMA_VERSION)
    except FileNotFoundError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; is {run} a run?") from None


def read_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut short by a crash is left out."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    found = []
    for line in lines[:-1]:
        found.append(json.loads(line))
    return found
