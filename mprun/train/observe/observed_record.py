"""The record of an observed training, by the recorder of mprun's own loop, and its report.

A full disk ends the record, never the training. A loop logs losses of steps, and scores of
validation and test:

    run.log(loss=loss)                           the training loss of the step that was just taken
    run.log(accuracy=0.9)                        another figure of the training
    run.log(validation_loss=0.3)                 also val_ or eval_: a validation
    run.log(test_loss=0.3, test_accuracy=0.9)    the final test

Without a validation, a training is judged by its last tenth, at least 20 steps. It has failed if
its loss is not finite to the end, or if the loss scale skips all of these steps (`LastPart`).
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.errors import UsageError
from mprun.precision import NativeArithmetic
from mprun.precision._torch import is_compiled, is_transformed, original_module
from mprun.records.console.formatting import size_text
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import (
    BackendRow,
    BatchRow,
    DataRow,
    Epoch,
    LossScaleRow,
    Metric,
    PrecisionRow,
    Scores,
    Summary,
    TrainScore,
    page_fault_share,
)
from mprun.train.callbacks import StepLine
from mprun.train.clock import StepStatistics, StepTime
from mprun.train.machine.conditions import allocator
from mprun.train.observe.step_probes import NonfiniteStep, device_of
from mprun.train.recorder import ConditionsRecorder, Recorder, new_summary
from mprun.train.stopwatch import Stopwatch
from mprun.watch.audit import Audit

logger = logging.getLogger("mprun")

SOURCE = "observed"  # The data source of a loop that mprun does not own


def first_summary(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    row: PrecisionRow,
    mode: str,
    name: str | None,
    seed: int,
    metric: Metric,
) -> Summary:
    """The summary before the first step; see `mprun.observe`."""
    return new_summary(
        device_of(model),
        [],
        recipe=class_name(model),
        seed=seed,
        precision=mode,
        variant=name or mode,
        variant_hash="",
        requested=row,
        effective=row,
        execution="native",
        backend=BackendRow(
            memory_format=_memory_format(model),
            optimizer_impl=_implementation(optimizers[0]),
            compile=any(map(is_compiled, model.modules())),
            threads=torch.get_num_threads(),
            allocator=allocator(),
        ),
        data=DataRow(
            name=SOURCE,
            source=SOURCE,
            train_samples=None,
            validation_samples=None,
            test_samples=None,
        ),
        batch=BatchRow(micro=0, accumulate=1, effective=0, base=0, lr_rule="none"),
        batch_size=0,
        loss_scale=LossScaleRow(kind="none", initial=1.0, final=1.0),
        metric=metric,
        observed=True,
    )


def configuration(
    model: nn.Module, optimizers: Sequence[Optimizer], summary: Summary
) -> dict[str, Any]:
    """What tells one variant of a loop from another, as config.yaml has it."""
    options = [_options(optimizer) for optimizer in optimizers]
    several = {str(n): row for n, row in enumerate(options)}
    return {
        "observed": {
            "name": summary.variant,
            "model": class_name(model),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        "precision": {"name": summary.precision, **asdict(summary.effective)},
        "optimizer": options[0] if len(options) == 1 else several,
        "batch": asdict(summary.batch),
        "compile": summary.backend.compile,
        "seed": summary.seed,
    }


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """Class and plain options; the learning rate is the first one's, before any schedule."""
    group = optimizer.param_groups[0]
    plain = {
        key: value
        for key, value in group.items()
        # a schedule changes `lr`; `attempts` and `seed` of mprun's optimizers differ between runs
        if isinstance(value, int | float | str) and key not in ("lr", "attempts", "seed")
    }
    lr = float(group.get("initial_lr", group.get("lr", 0.0)))
    return {"name": class_name(optimizer), "lr": lr, **plain}


def class_name(x: object) -> str:
    """The class, without wrappers that `torch.compile` makes."""
    return type(original_module(x) if isinstance(x, nn.Module) else x).__name__


def _memory_format(model: nn.Module) -> str:
    images = [p for p in model.parameters() if p.dim() == 4]  # weights of 2-d convolutions
    last = torch.channels_last
    # a 1 x 1 kernel is contiguous in both formats, and tells nothing
    wide = [p for p in images if not p.is_contiguous() and p.is_contiguous(memory_format=last)]
    return "channels_last" if wide else "contiguous"


def _implementation(optimizer: Optimizer) -> str:
    group = optimizer.param_groups[0]
    if type(optimizer).__module__.startswith("mprun."):
        return "mprun"
    return "fused" if group.get("fused") else "foreach" if group.get("foreach") else "default"


PREFIXES = {"validation": "validation", "val": "validation", "eval": "validation", "test": "test"}
# Metrics whose better direction is known
LOWER, HIGHER = ("loss", "perplexity", "mae"), ("accuracy", "f1")


def metric_of(given: str | tuple[str, str]) -> tuple[str, bool]:
    """A metric's name, and whether higher is better.

    Raises:
        ValueError: the direction is neither known nor given.
    """
    if isinstance(given, str) and given in (*LOWER, *HIGHER):
        return given, given in HIGHER
    if not isinstance(given, str) and len(given) == 2 and given[1] in ("max", "min"):
        return given[0], given[1] == "max"
    known = ", ".join((*LOWER, *HIGHER))
    raise ValueError(
        f'metric={given!r}; legal: {known}, or a name with its better direction: ("bleu", "max")'
    )


def split_of(name: str) -> tuple[str, str]:
    """train, validation or test, and the name without the prefix."""
    for separator in ("_", "/"):
        prefix, _, rest = name.partition(separator)
        if rest and prefix in PREFIXES:
            return PREFIXES[prefix], rest
    return "train", name


def checked(name: str, value: object) -> Tensor | float:
    """A value that can be logged; a tensor without its graph.

    Raises:
        TypeError: it is not a number.
        ValueError: it is a tensor of several.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            shape = list(value.shape)
            raise ValueError(f"{name} has the shape {shape}; legal: a number or a scalar tensor")
        if value.device.type == "cpu":
            return float(value.detach())
        return value.detach().clone()  # loops add to their loss in place
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {type(value).__name__}; legal: a number or a scalar tensor")
    return float(value)


class Means:
    """Means of training values since the last validation."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """The values of one step."""
        for name, value in values.items():
            self._values[name].append((step, value))

    def take(self, after: int = 0) -> Scores:
        """The means over the steps after this one; counting begins again.

        A value that was logged in none of these steps is the last one that was.
        """
        means = {}
        for name, logged in self._values.items():
            last = [value for step, value in logged if step > after]
            means[name] = fmean(last or [logged[-1][1]])
        self._values.clear()
        return scores_of(means)


def scores_of(values: Mapping[str, float]) -> Scores:
    """The record of named scores."""
    rest: dict[str, Any] = {k: v for k, v in values.items() if k not in ("loss", "accuracy")}
    return Scores(
        loss=values.get("loss"), accuracy=values.get("accuracy"), samples=None, metrics=rest or None
    )


# The mean over all steps hides what the model became; 20 losses bound the noise of their mean
SHARE, MIN_STEPS = 0.1, 20


def last_steps(steps: int) -> int:
    """How many steps of a training with so many are its last part."""
    return min(steps, max(MIN_STEPS, ceil(steps * SHARE)))


class LastPart:
    """Follows the steps to the end of a training."""

    def __init__(self) -> None:
        self._steps = 0
        self._skipped_from: int | None = None
        """The first of the steps that were skipped, all of them since."""
        self._broken_from: int | None = None
        """The first step whose loss was not finite, as no known loss has been since."""
        self._broken_loss = 0.0
        self._took_broken = False
        """Whether a step with such a loss was taken."""

    def add(self, step: int, loss: float | None, skipped: bool) -> None:
        """The next step; its loss is NaN or infinite where any loss was, None if not known."""
        self._steps = step
        self._skipped_from = (self._skipped_from or step) if skipped else None
        if loss is None:
            return
        if isfinite(loss):
            self._broken_from, self._took_broken = None, False
            return
        self._broken_from, self._broken_loss = self._broken_from or step, loss
        self._took_broken |= not skipped

    def failure(self) -> str:
        """Why the model does not train at the end; empty if it does."""
        last, least = self._steps, last_steps(self._steps)
        since = self._broken_from
        # a step that was taken spoiled the weights; skipped ones are a failure only if they last
        if since is not None and (self._took_broken or last - since + 1 >= least):
            skipped = "" if self._took_broken else "; the loss scale skips them, and cannot help"
            where = f"from step {since} to" if since < last else "at"
            return f"the loss is {self._broken_loss} {where} the last step, {last}{skipped}"
        since = self._skipped_from
        if since is not None and last - since + 1 >= least:
            return (
                f"no step was taken from step {since} to the last one, {last}: their gradients "
                "overflowed, and the loss scale skipped them"
            )
        return ""


def samples_of(args: Any) -> int:
    """The first dimension of the first tensor in these arguments; 0 if it is not known."""
    for x in args.values() if isinstance(args, Mapping) else args:
        if isinstance(x, Tensor) and x.dim():
            return 0 if is_transformed(x) else int(x.shape[0])
        if isinstance(x, tuple | list | Mapping) and (count := samples_of(x)):
            return count
    return 0


@dataclass
class ObservedStep:
    """One step, while it is taken and until it is written."""

    step: int
    lr: float = 0.0
    skipped: bool = False
    data_time_ms: float | None = None
    """None after an evaluation, whose time cannot be separated from the wait."""
    calls: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Module (by `id`) to the samples of each call of it; a step without a call has no time."""
    timed: bool = True
    values: dict[str, Tensor | float] = field(default_factory=dict)  # What the loop logged for it
    finite: list[Tensor | bool] = field(default_factory=list)
    """Whether each loss that went backward is finite."""

    @property
    def batches(self) -> list[int]:
        """The samples of each micro-batch.

        Of several models those of the one that got most: one may get what another one returned.
        """
        return max(self.calls.values(), key=sum, default=[])


class ObservedRecord(Recorder):
    """Writes the record of a loop that mprun does not own; what it does not know is null.

    Raises:
        FileExistsError: the folder has a run.
        OSError: it cannot be written.
    """

    def __init__(
        self, path: Path, summary: Summary, device: torch.device, watch: Stopwatch
    ) -> None:
        if (path / "summary.json").exists():
            raise FileExistsError(f"out={path} already contains a run; choose another folder")
        try:
            folder = RunFolder(path)
        except UsageError as error:  # its message names mprun's override; the user gave `out`
            raise OSError(str(error).replace("run.dir=", "out=")) from None
        super().__init__(summary, folder, NativeArithmetic(), device, log_every=1, watch=watch)
        self.path = path
        self._conditions = ConditionsRecorder(summary)
        self._means, self.last_part = Means(), LastPart()
        self._logged: dict[int, dict[str, Any]] = {}
        """Step to what its line has in place of mprun's figures."""
        self._broken = False
        self._sizes: Counter[int] = Counter()
        """How many steps had so many samples."""
        self._unseen = 0
        """Steps without a call of the model: where they began is not known."""

    def config(self, content: dict[str, Any]) -> None:
        """Write config.yaml."""
        text = yaml.safe_dump(content, sort_keys=False)
        self._try(lambda: self._folder.write("config.yaml", text))

    def summary(self) -> None:
        """Write summary.json."""
        self._try(lambda: self._folder.summary(self._summary))

    def event(self, row: dict[str, Any]) -> None:
        """Write a line of something that happened, at once."""
        self.on_event(row)
        self._write([])

    def batch(self, step: ObservedStep) -> None:
        """The training's batch is that of this step."""
        batches, batch = step.batches, self._summary.batch
        self._summary.batch_size = batch.effective = batch.base = sum(batches)
        batch.accumulate = max(len(batches), 1)
        batch.micro = batch.effective // batch.accumulate

    def _count(self, steps: list[ObservedStep]) -> None:
        """Steps of the most common size are timed; the first one may have another."""
        by_size = {sum(step.batches): step for step in steps}
        self._sizes.update(sum(step.batches) for step in steps)
        self._unseen += sum(not step.calls for step in steps)
        common = self._sizes.most_common(1)[0][0]
        if common != self._summary.batch_size:
            self.batch(by_size[common])
            self._statistics, self._conditions = StepStatistics(), ConditionsRecorder(self._summary)
        for step in steps:
            step.timed &= bool(step.calls) and sum(step.batches) == common

    def steps(self, steps: list[ObservedStep], times: list[StepTime]) -> None:
        """Write steps that are complete."""
        if not steps:
            return
        self._count(steps)
        last, lines = self._history.last, []
        for step, time in zip(steps, times, strict=True):
            values = {name: float(value) for name, value in step.values.items()}
            if not step.skipped:
                self._means.add(step.step, values)
            # a loss that is only logged may be a mean, without the NaN that went backward
            known = values.get("loss") if all(map(bool, step.finite)) else nan
            self.last_part.add(step.step, known, step.skipped)
            self._logged[step.step] = {"loss": None, **values}
            if not step.calls:
                self._logged[step.step] |= {"step_time_ms": None, "data_time_ms": None}
            lines.append(
                StepLine(
                    step=step.step,
                    epoch=1 if last is None else last.epoch + 1,
                    loss=0.0,  # `_row` replaces it by what the loop logged
                    lr=step.lr,
                    loss_scale=1.0,  # the loop's scaler is not known
                    skipped=step.skipped,
                    step_time_ms=time.ms,
                    data_time_ms=step.data_time_ms,
                    timed=step.timed,
                    page_faults=time.page_faults,
                )
            )
        self.on_steps(lines)
        # an epoch ends with a validation here: the current one does not count yet
        self._summary.epochs = 0 if last is None else last.epoch
        self._conditions.on_steps(lines)

    def _row(self, line: StepLine) -> dict[str, Any]:
        return {**super()._row(line), **self._logged.pop(line.step)}

    def validation(self, values: dict[str, float]) -> None:
        """The model was validated after the last step."""
        last = self._history.last
        self._add(1 if last is None else last.epoch + 1, self._means.take(), values)

    def _add(self, number: int, train: Scores, validation: dict[str, float]) -> None:
        epoch = Epoch(epoch=number, train=train, validation=scores_of(validation))
        self._summary.epochs = number
        self.on_epoch_end(epoch, self._summary.steps)

    def test(self, values: dict[str, float]) -> None:
        """The model was tested."""
        known = {name: x for name, x in vars(scores_of(values)).items() if x is not None}
        self._summary.test = replace(self._summary.test, **known)

    def close(self) -> list[str]:
        """Write the last figures; returns why some are null, which the record's warnings have."""
        if self._history.last is None:  # no validation: the last part is what it is judged by
            last = last_steps(self._summary.steps)
            train = self._means.take(after=self._summary.steps - last)
            self._add(1, train, {})
            self._summary.train = TrainScore(loss=train.loss, last_steps=last)
        self.on_end(self._summary.status)
        self._conditions.on_end(self._summary.status)
        if self._unseen:  # the time of their forward passes would count as a wait for data
            self._summary.time_budget_s = None
        reasons = [*self._reasons()] if self._summary.steps else []
        self._summary.warnings += reasons
        self.summary()
        with contextlib.suppress(OSError):
            self._folder.close()
        return reasons

    def _reasons(self) -> Iterator[str]:
        """Why there is no step time, or no throughput."""
        size = self._summary.batch_size
        if self._summary.step_time_ms.median is None:
            counts = {
                "had no call that is seen (call the model itself, no method of it)": self._unseen,
                f"had other than {size} samples": self._sizes.total() - self._sizes[size],
            }
            rest = "".join(f", {count} {what}" for what, count in counts.items() if count)
            yield f"no step time: of {self._summary.steps} steps the first ones are not timed{rest}"
        elif not size:
            yield "no throughput: no call of the model shows how many samples it gets"
        elif self._summary.samples_per_second is None:
            yield "no throughput: each step follows an evaluation, which hides the wait for data"

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._try(lambda: Recorder._write(self, rows))

    def _try(self, write: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            write()
        except OSError as error:
            self._broken = True
            logger.warning("the record in %s ends here: %s", self.path, error.strerror or error)


def report_text(
    summary: Summary,
    audit: Audit | None,
    nonfinite: NonfiniteStep | None,
    notes: Sequence[str] = (),
) -> str:
    """The figures, the audit, and what could not be looked at."""
    lines = [f"FAILED: {summary.error}"] if summary.status == "failed" else []
    lines += _figures(summary)
    if nonfinite is not None:
        lines.append(f"not finite at step {nonfinite.step}: {', '.join(nonfinite.names)}")
        if nonfinite.file is not None:
            lines.append(f"    mprun replay {nonfinite.file}")
    if audit is not None:
        lines += ["", "audit", *(f"  {line}" for line in str(audit).splitlines())]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _figures(summary: Summary) -> Iterator[str]:
    row = summary.effective
    yield f"{summary.recipe} in {summary.precision}: {summary.steps} steps, {summary.status}"
    yield (
        f"precision   parameters {row.param_dtype}, computation {row.compute_dtype} "
        f"({row.casting}), rounding {row.rounding}"
    )
    step, data = summary.step_time_ms, summary.data_time_ms
    if step.median is not None and step.p10 is not None and step.p90 is not None:
        yield (
            f"step time   {step.median:.2f} ms (10 % below {step.p10:.2f}, 10 % above "
            f"{step.p90:.2f}; {step.n} steps, {step.warmup} of warm-up left out)"
        )
    if data.median is not None:
        yield f"data wait   {data.median:.2f} ms"
    if summary.samples_per_second is not None:
        yield f"throughput  {summary.samples_per_second:,.0f} samples/s"
    share = page_fault_share(summary)
    if share is not None:
        yield f"page faults {summary.page_faults_per_step:,.0f} per step, {share:.1%} of its time"
    if summary.skipped_steps:
        yield f"skipped     {summary.skipped_steps} steps, by the loss scale"
    memory = {k: size_text(v) for k, v in vars(summary.memory_bytes).items() if v}
    allocator = f"; allocator {x}" if (x := memory.pop("allocator_peak", None)) else ""
    where = f"{x} at the peak" if (x := memory.pop("peak", None)) else "each by itself"
    sizes = ", ".join(f"{k} {size}" for k, size in memory.items())
    # at the peak a category may have less than its own size: gradients are made one by one
    yield f"memory      {where}: {sizes}{allocator}"
