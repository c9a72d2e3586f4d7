"""The metrics of a recipe: what they may be, one pass of them over an epoch or a set, their state.

Metrics see a training step's outputs after the clock stopped.

The state of a metric is its `state_dict` (of torchmetrics: once its states are persistent), or its
attributes, as far as a checkpoint can hold them: numbers, text, tensors, and lists, tuples and
dicts of these. Functions, classes, dtypes and devices among them do not change. A metric with other
attributes has no state, nor has one whose own state_dict leaves something out: with it, a new copy
would compute another value. A checkpoint cannot continue such a metric.
"""

from __future__ import annotations

import copy
import io
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.errors import MprunError, RunFailedError, UsageError, hint
from mprun.metrics import SHIPPED, scores_and_targets
from mprun.precision import devices
from mprun.precision.nested import all_tensors, leaves, map_tensors
from mprun.recipe import Recipe
from mprun.records.reader import LARGEST
from mprun.records.run_record import Number
from mprun.train.data import Batch
from mprun.train.loss_terms import PREFIX, shown
from mprun.train.parallel.ranks import Ranks
from mprun.train.user_code import described, is_out_of_memory

DIRECTIONS = ("max", "min")
RESERVED = ("loss", "samples")  # Names of other figures in records
_LEGAL = (
    "legal: an object with update(output, batch) and compute(), a pair (metric, select), where "
    "select(output, batch) returns the arguments of metric.update, or one of the names "
    + ", ".join(SHIPPED)
)


class RecipeMetric(NamedTuple):
    """A metric, and what it gets of a batch."""

    metric: Any
    select: Callable[[Any, Any], Any] | None = None
    """Returns the arguments of `update`; None: the output and the batch."""

    def update(self, output: Any, batch: Any) -> None:
        """Add a batch."""
        if self.select is None:
            self.metric.update(output, batch)
            return
        args = self.select(output, batch)
        if isinstance(args, Mapping):
            self.metric.update(**args)
        else:
            self.metric.update(*(args if isinstance(args, tuple | list) else (args,)))


def metrics_of(recipe: Recipe) -> dict[str, RecipeMetric]:
    """The metrics of a recipe, which are not updated themselves.

    Raises:
        UsageError: one of them is no metric, or has a name that is taken.
    """
    if type(recipe).metrics is Recipe.metrics:
        return {}
    with torch.random.fork_rng([]):  # one that draws weights does not change the run's
        given: Any = recipe.metrics()
    if _is_of_torchmetrics(given, "MetricCollection"):
        given = {"collection": given}
    if not isinstance(given, Mapping):
        raise UsageError(
            f"metrics() returned {shown(given)}; legal is a dict of name to metric, or a "
            "MetricCollection of torchmetrics"
        )
    metrics: dict[str, RecipeMetric] = {}
    for name, value in given.items():
        is_pair = isinstance(value, tuple) and len(value) == 2
        metric, select = value if is_pair else (value, None)
        parts = {name: metric}
        if _is_of_torchmetrics(metric, "MetricCollection"):  # it gives names of its own
            parts = dict(metric.items(keep_base=False, copy_state=False))
        for own, part in parts.items():
            if own in metrics:
                raise UsageError(f"metrics() names two metrics {own!r}; rename one")
            metrics[checked_name(own)] = _metric(own, part, select)
    return metrics


def _is_of_torchmetrics(value: Any, name: str) -> bool:
    """Whether it is an instance of a class of torchmetrics, which may not be installed."""
    module = sys.modules.get("torchmetrics")  # not imported: no metric is of it
    return module is not None and isinstance(value, getattr(module, name))


def checked_name(name: Any, what: str = "metrics() names a metric") -> str:
    """The name, if it can be a column of tables and a key of the record; else a `UsageError`."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 60:
        raise UsageError(f"{what} {name!r:.80}; legal is a short text")
    if name in RESERVED or name.startswith(PREFIX):
        raise UsageError(f"{what} {name!r}, which the record uses; rename it")
    return name


def _metric(name: str, metric: Any, select: Any) -> RecipeMetric:
    if isinstance(metric, str) and metric in SHIPPED:
        metric = SHIPPED[metric]()
    elif select is None and _is_of_torchmetrics(metric, "Metric"):
        select = scores_and_targets
    has_methods = all(callable(getattr(metric, x, None)) for x in ("update", "compute"))
    if has_methods and not isinstance(metric, type) and (select is None or callable(select)):
        return RecipeMetric(metric, select)
    near = hint(metric, SHIPPED) if isinstance(metric, str) else ""
    kind = shown(metric if select is None or callable(select) else (metric, select))
    if isinstance(metric, type):
        kind = f"the class {metric.__name__}, not an object of it"
    raise UsageError(f"metrics()[{name!r}] is {kind}{near}; {_LEGAL}")


def check_metric(recipe: Recipe) -> None:
    """Check that `METRIC` names what a run of this recipe measures.

    Raises:
        UsageError: it does not, or one of the recipe's metrics is none.
    """
    metric: Any = recipe.METRIC
    name = type(recipe).__name__
    if isinstance(metric, str) or not isinstance(metric, tuple | list) or len(metric) != 2:
        raise UsageError(f'{name}.METRIC = {metric!r}: legal is a pair such as ("loss", "min")')
    judged, direction = metric
    if direction not in DIRECTIONS:
        raise UsageError(f'{name}.METRIC = {metric!r}: the second is "max" or "min"')
    legal = ["loss", *metrics_of(recipe)]
    if "accuracy" not in legal and type(recipe).correct is not Recipe.correct:
        legal.insert(0, "accuracy")
    is_part = isinstance(judged, str) and judged.startswith(PREFIX)
    if judged not in legal and not is_part:
        near = hint(judged, legal) if isinstance(judged, str) else ""
        raise UsageError(
            f"{name}.METRIC = {metric!r}: nothing measures {judged!r}{near}; legal: "
            f"{', '.join(legal)}, {PREFIX}NAME for a part of the loss, or a name that metrics() "
            "returns (accuracy needs a function correct or such a metric)"
        )


class MetricPass:
    """The metrics over one epoch or one set; outputs are on `device`.

    Of several processes (`ranks`) each sees a part of the batches.
    """

    def __init__(
        self,
        metrics: Mapping[str, RecipeMetric],
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._given = metrics
        # copies: a pass starts without batches, and mixes with no other, whatever `reset` does
        self._metrics = {name: _copied(name, x, device) for name, x in metrics.items()}
        self._device = device
        self._held: list[_HeldStep] = []
        self._updates = 0
        self.lost: set[str] = set()
        """Metrics whose state before the run was resumed is not known."""

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def add(self, outputs: Sequence[Any], batch: Batch, skipped: Tensor | None = None) -> None:
        """Add a batch, unless its step was skipped."""
        if not self._metrics:
            return
        contents = [part.content for part in batch.parts]
        if skipped is None:
            self._update(outputs, contents)
        elif not devices.backend(self._device).events:  # the step has been waited for
            if not skipped.item():
                self._update(outputs, contents)
        else:
            # held until the next step is queued: the host seldom waits for the flag, and the device
            # never for the host
            self._held.append(_HeldStep(outputs, contents, skipped))
            self._release(keep=1)

    def _release(self, keep: int) -> None:
        while len(self._held) > keep:
            step = self._held.pop(0)
            if not step.was_skipped():
                self._update(step.outputs, step.contents)

    def _update(self, outputs: Sequence[Any], contents: Sequence[Any]) -> None:
        self._updates += 1
        with torch.no_grad():
            for name, metric in self._metrics.items():
                with _failing(name, "update"):
                    for output, content in zip(outputs, contents, strict=True):
                        metric.update(output, content)

    def compute(self) -> dict[str, Number | None]:
        """The value of each; None without a batch, and for those that are lost.

        Raises:
            RunFailedError: one of them is no number.
        """
        self._release(keep=0)
        whole = self._merged()
        if not whole._updates:
            return dict.fromkeys(self._metrics)
        return {
            name: None if name in whole.lost else whole._value(name, x)
            for name, x in whole._metrics.items()
        }

    def _merged(self) -> MetricPass:
        """The pass over the batches of all processes."""
        if self._ranks.size == 1 or not self._metrics:
            return self
        whole = MetricPass(self._given, self._device)
        states = self._states()
        for name, state in states.items():
            if state is None and name not in self.lost:
                raise RunFailedError(
                    f"metric {name!r} has no state that can be sent to another process; legal: "
                    "numbers and tensors as its attributes, or state_dict and load_state_dict"
                )
        for sent in self._ranks.gather({"updates": self._updates, "states": states}):
            if sent["updates"]:
                whole._merge(sent)
        return whole

    def _states(self) -> dict[str, Any]:
        """The state of each metric; None where it has none, or where it is lost."""
        if not self._updates:
            return {}
        states: dict[str, Any] = dict.fromkeys(self._metrics)
        for name, entry in self._metrics.items():
            state = None if name in self.lost else saved_state(entry.metric)
            if state is not None:
                fresh = _copied(name, self._given[name], self._device).metric
                states[name] = state if _is_whole(state, fresh, entry.metric) else None
        return states

    def _merge(self, saved: Mapping[str, Any]) -> None:
        """Add the batches of a state."""
        other = MetricPass(self._given, self._device)
        other._load(saved)
        self._updates += other._updates
        self.lost |= other.lost
        for name, entry in self._metrics.items():
            if name not in self.lost:
                with _failing(name, "merge_state"):
                    entry.metric.merge_state(other._metrics[name].metric)

    def _value(self, name: str, metric: RecipeMetric) -> Number | None:
        with _failing(name, "compute"), torch.no_grad():
            return _number(name, metric.metric.compute())

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step as `metrics`; empty without one.

        A metric whose state cannot be saved has None. With several processes it is the state of
        all, in each of them.
        """
        self._release(keep=0)
        whole = self._merged()
        if not whole._updates:
            return {}
        states = whole._states()
        kinds = {name: [x.device.type for x in all_tensors(states[name])] for name in states}
        return {"metrics": {"updates": whole._updates, "states": states, "devices": kinds}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `metrics` of a state, if it has any.

        A metric without one is lost until the next pass.
        """
        saved = state.get("metrics")
        if saved is None or not self._ranks.is_first:  # the state is that of all processes
            return
        self._load(saved)
        for name, entry in self._metrics.items():
            if name not in self.lost:
                with torch.no_grad():
                    entry.metric.compute()  # fails now if it is damaged, not at the epoch's end

    def _load(self, saved: Mapping[str, Any]) -> None:
        # torchmetrics counts updates itself, and does not know those of before
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        self._updates = saved["updates"]
        for name, entry in self._metrics.items():
            if saved["states"].get(name) is None:
                self.lost.add(name)
                continue
            kinds = saved.get("devices", {}).get(name, ())  # of another process: as it was sent
            load_state(entry.metric, placed(saved["states"][name], kinds, self._device))
            if isinstance(entry.metric, nn.Module):
                entry.metric.to(self._device)


_PLAIN = (Tensor, str, int, float, type(None))  # What `torch.load` with `weights_only` reads
# Attributes that do not change in training: not saved, and no reason to refuse a state
_CONSTANT = (
    *(types.FunctionType, types.BuiltinFunctionType, type),
    *(types.ModuleType, torch.dtype, torch.device, Enum),
)


def saved_state(metric: Any) -> Any:
    """The state of a metric, a copy that later batches do not change; None if it has none."""
    file = io.BytesIO()
    try:
        state = metric.state_dict() if _keeps_state(metric) else _attributes(metric)
        if not all(isinstance(x, _PLAIN) for x in leaves(state)):
            return None  # before it is saved, which takes long where it holds a model
        # cloned, as a part of a larger tensor would be saved with the whole of it
        torch.save(map_tensors(lambda x: x.detach().clone(), state), file)
        file.seek(0)
        return torch.load(file, weights_only=True)  # what it refuses no run could be resumed from
    except Exception:  # the metric is the user's, with its own ways to fail
        return None


def _attributes(metric: Any) -> dict[str, Any]:
    """Those that may change."""
    # contents that `vars` does not show would be lost
    has_slots = any(vars(kind).get("__slots__") for kind in type(metric).mro())
    if has_slots or isinstance(metric, dict | list | tuple | set | frozenset | nn.Module):
        raise TypeError
    return {k: v for k, v in vars(metric).items() if not isinstance(v, _CONSTANT)}


def load_state(metric: Any, state: Any) -> None:
    """Set the state of `saved_state` on a metric of the same class."""
    if _keeps_state(metric):
        metric.load_state_dict(state)
    else:
        vars(metric).update(state)


def _is_whole(state: Any, fresh: Any, metric: Any) -> bool:
    """Whether a fresh metric with this state computes what the metric does."""
    is_shipped = type(metric).__module__.startswith(("torchmetrics.", "mprun."))
    if is_shipped or not _keeps_state(metric):  # its own states, or all attributes
        return True
    try:
        expected = copy.deepcopy(metric).compute()  # a copy: some begin again when computed
    except Exception:  # too few batches to compute, perhaps: nothing is known
        return True
    try:
        load_state(fresh, copy.deepcopy(state))
        return repr(_number("", fresh.compute())) == repr(_number("", expected))
    except Exception:  # what it left out is missed
        return False


def _keeps_state(metric: Any) -> bool:
    """Whether it has a state_dict: its own, or that of torchmetrics, made persistent here."""
    if isinstance(metric, nn.Module):
        persistent: Any = getattr(metric, "persistent", None)
        if not callable(persistent):  # a plain module's state_dict lacks its attributes
            return False
        persistent(True)  # else the state_dict of torchmetrics is empty
    return all(callable(getattr(metric, x, None)) for x in ("state_dict", "load_state_dict"))


def placed(state: Any, kinds: Sequence[str], device: torch.device) -> Any:
    """A metric's state with the tensors that were not on the CPU on `device`.

    `kinds` has the device type of each of its tensors when it was saved. A checkpoint is read on
    the CPU, and only a module's own tensors could be moved afterwards.
    """
    if not kinds:
        return state
    kind = iter(kinds)
    return map_tensors(lambda x: x if next(kind) == "cpu" else x.to(device), state)


class _HeldStep:
    """A step on an accelerator of which the host does not know yet whether it was skipped."""

    def __init__(self, outputs: Sequence[Any], contents: Sequence[Any], skipped: Tensor) -> None:
        self.outputs, self.contents = outputs, contents
        # Pinned: only then is the copy queued like a kernel, and the host goes on.
        self._flag = torch.empty((), dtype=skipped.dtype, pin_memory=True)
        self._flag.copy_(skipped.detach().reshape(()), non_blocking=True)
        self._copied = devices.event(skipped.device)

    def was_skipped(self) -> bool:
        """Waits for the step, not for those queued after it."""
        self._copied.synchronize()
        return bool(self._flag.item())


def _copied(name: str, entry: RecipeMetric, device: torch.device) -> RecipeMetric:
    try:
        metric = copy.deepcopy(entry.metric)
        return entry._replace(metric=metric.to(device) if isinstance(metric, nn.Module) else metric)
    except Exception as error:  # it is the user's: anything can be wrong with it
        raise RunFailedError(
            f"metric {name!r} cannot be copied to {device} ({described(error)}); "
            "each epoch and each evaluation starts with a copy"
        ) from None


@contextmanager
def _failing(name: str, method: str) -> Iterator[None]:
    """An error of the metric's method that is raised inside names the metric."""
    try:
        yield
    except MprunError:
        raise
    except Exception as error:  # it is the user's: anything can be wrong with it
        if is_out_of_memory(error):
            raise
        raise RunFailedError(f"metric {name!r}: {method} raised {described(error)}") from error


def _number(name: str, value: Any) -> Number | None:
    if value is None:  # no batch gave it anything
        return None
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    try:
        number = float(value) if not isinstance(value, Tensor | str) else None
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise RunFailedError(
            f"metric {name!r}: compute returned {shown(value)}; legal is one number, so list "
            "those of several classes or of a collection one by one"
        )
    # readers of the record refuse larger numbers
    return math.copysign(math.inf, number) if abs(number) > LARGEST else number
