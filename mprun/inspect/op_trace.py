"""Records the ops of a plan's training step, with the Python call and the rule of each.

    rule       why an op ran in its dtype: its list, promotion, in-place, first input, a layer's own
               dtype, casts disabled, autocast's list, or nothing ("as it is")

With op lists, the caster itself reports the rules. With autocast, the same lists as data
(`op_lists=native`) say which list an op is on; a test checks that they agree with autocast.
`trace.py` makes rows of the recorded ops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch

from mprun.precision import Arithmetic, Caster, NativeArithmetic, WrappedArithmetic, devices
from mprun.precision.op_lists import OpLists, Table, op_lists, region
from mprun.precision.op_lists.lists import shipped_lists
from mprun.precision.op_lists.rules import Casts
from mprun.train.assemble.parts import build_arithmetic, build_caster, build_parts, build_precision
from mprun.train.assemble.plan import Plan
from mprun.train.data import Batch
from mprun.train.loop import Trainer
from mprun.watch.op_watcher import OpFault, OpRecorder, OpWatcher, RecordedOp

# Names of the lists' rules in a trace; the other rules keep their names
LISTED = {"lower": "listed lower", "fp32": "listed fp32"}


class PythonCall(NamedTuple):
    """A Python call that ran ops."""

    number: int
    name: str
    rule: str


class CallStack:
    """Follows which Python call runs, and by which rule: a watcher for op lists.

    `prefix` is put before the rule of a list, for lists that describe autocast.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._stack: list[PythonCall] = []
        self._count = 0
        self.failed = ""
        """The name of the call in which an op failed first."""

    @contextmanager
    def op(self, name: str, rule: str) -> Iterator[None]:
        self._count += 1
        listed = self._prefix + rule if self._prefix else LISTED.get(rule, rule)
        label = listed if rule in (*LISTED, "promote") else rule  # the others are no list's
        self._stack.append(PythonCall(self._count, name, label))
        try:
            yield
        except RuntimeError:
            self.failed = self.failed or name
            raise
        finally:
            self._stack.pop()

    def cast(self, have: torch.dtype, want: torch.dtype) -> None:
        """Nothing to do: the recorder sees the cast itself."""

    def current(self) -> PythonCall | None:
        """The call whose ops run now."""
        return self._stack[-1] if self._stack else None


class LabelledCaster(Caster):
    """A caster whose rules are reported to `calls` by lists that cast nothing."""

    def __init__(self, caster: Caster, lists: OpLists, calls: CallStack) -> None:
        self._caster = caster
        self.columns = caster.columns
        # dtype and device have no effect: `_NoCasts` casts nothing
        self._table = Table(lists, torch.float32, _NoCasts(), "cpu", calls)

    @contextmanager
    def region(self) -> Iterator[None]:
        with self._caster.region(), region(self._table):
            yield

    def step_region(self) -> AbstractContextManager[object]:
        return self._caster.step_region()

    def layer_region(self, dtype: torch.dtype) -> Callable[[], AbstractContextManager[object]]:
        return self._caster.layer_region(dtype)

    def end_step(self) -> None:
        self._caster.end_step()


class _NoCasts(Casts):
    def to(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x


def _caster(plan: Plan, calls: CallStack) -> Caster:
    """The plan's caster, or one around it that reports its rules."""
    if plan.op_lists is not None:
        return build_caster(plan, calls)
    if plan.policy.casting == "autocast":
        lists = shipped_lists("native", plan.device.type)  # autocast's own lists, as data
    else:
        lists = op_lists((), (), first_input=False)
    return LabelledCaster(build_caster(plan), lists, calls)


def watched_arithmetic(inner: Arithmetic, recorder: OpWatcher) -> Arithmetic:
    """An arithmetic whose ops a watcher sees as the model calls them."""
    # else the recorder would see the ops that emulate in place of the model's
    native = isinstance(inner, NativeArithmetic)
    return inner if native else WrappedArithmetic(inner, lambda: recorder)


class StepRecorder:
    """Trains the model of a plan step by step, and records the ops of a step.

    Where ops are timed the device is waited for after each.
    """

    def __init__(self, plan: Plan, is_timed: bool) -> None:
        self._wait = partial(devices.synchronize, plan.device)
        self._ops: list[RecordedOp] = []
        calls = CallStack("autocast: " if plan.policy.casting == "autocast" else "")
        wait: Callable[[], None] = self._wait if is_timed else lambda: None
        self._recorder = OpRecorder(self._ops.append, calls.current, wait)
        arithmetic = watched_arithmetic(build_arithmetic(plan), self._recorder)
        self._parts = build_parts(plan, build_precision(plan, _caster(plan, calls), arithmetic))
        self._trainer = Trainer(self._parts, plan.limits)

    def first_batch(self) -> Batch:
        """The batch of the plan's first step."""
        return next(self._parts.train.epoch(self._parts.order.draw()))

    @property
    def fault(self) -> OpFault | None:
        """The op that failed; None if the error came from elsewhere."""
        return self._recorder.fault

    def record(self, batch: Batch) -> list[RecordedOp]:
        """The ops of a training step on a batch."""
        self._ops.clear()
        with self._recorder.following(self._parts.model, self._parts.optimizer), self._recorder:
            self._trainer.optimizer_step(batch)
        return list(self._ops)

    def time_s(self, batch: Batch) -> float:
        """Seconds of a training step that is not recorded."""
        self._wait()  # else the time has work that was queued before
        began = time.perf_counter()
        self._trainer.optimizer_step(batch)
        self._wait()
        return time.perf_counter() - began
