"""What is looked at in single steps of a loop, and whether its gradients are finite.

Nothing of the start is timed:

    step 1        the state of autocast at every layer
    step 2        the casts of the model's first call; the audit, where the gradients are complete
    steps 3, 4    memory op by op, if it is asked for; optimizers have made their state by then

Steps that a loss scale skips do not count from step 2 on: the next one is looked at in their place.

The loop has no configuration, so its precision is read: each column of the policy from what decides
it, which are the parameters, their gradients, the optimizer, the backend switches, and autocast in
the first step. The mode is the one whose row of the table fits, else `custom`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.errors import first_line
from mprun.optim.optimizers import rounding_columns
from mprun.precision import Precision
from mprun.precision._torch import is_compiled, storage_key, stored_values, tree_leaves
from mprun.precision._torch_switches import tf32_is_on
from mprun.precision.policy import Policy, dtype_name, most_used, policy
from mprun.records.mode_names import SHIPPED_MODES
from mprun.records.run_record import PrecisionRow
from mprun.watch.audit import Audit, audit
from mprun.watch.cast_counts import CastCounts
from mprun.watch.memory_recorder import MemoryRecorder
from mprun.watch.op_watcher import is_finite, value_range
from mprun.watch.step_events import StepListener, entries


@dataclass(frozen=True)
class NonfiniteStep:
    """The first step with a NaN or an infinity."""

    step: int
    names: tuple[str, ...]  # What was not finite, in the model's order, up to 20
    file: Path | None  # The saved step, for `mprun replay`


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's next step reads."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [stored_values(g.detach()) for g in held if g is not None]


def all_finite(tensors: list[Tensor]) -> Tensor | bool:
    """Whether every value is finite, by sums that read each once; False if a sum overflows, too.

    A boolean on the CPU; elsewhere a tensor, which is read later so that nothing waits for it.
    """
    with torch.no_grad():
        # a sum is finite only if each of its values is
        if all(x.is_cpu for x in tensors):
            return isfinite(sum([float(_sum(x)) for x in tensors]))
        sums = [_sum(x).to(tensors[0].device, torch.float32) for x in tensors]
        return torch.stack(sums).isfinite().all()


def _sum(x: Tensor) -> Tensor:
    if x.dtype is torch.float32 and x.is_contiguous():  # a call of BLAS: the fastest reduction
        flat = x.view(-1)
        return flat.dot(flat)
    return x.sum(dtype=torch.float32)


def nonfinite_names(tensors: Mapping[str, Tensor | None]) -> Iterator[str]:
    """The names of those with a NaN or an infinity, value by value."""
    for name, x in tensors.items():
        if x is not None and not is_finite(value_range(x)):
            yield name


CUSTOM = "custom"  # The name of a mode that no row of the table fits


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter; the CPU without any."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def observed_row(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    autocast: torch.dtype | None,
    precision: Precision | None = None,
) -> PrecisionRow:
    """The columns of a training, with the rounding and moments of its first optimizer.

    A `Precision` of the loop decides the casts, else autocast, in the dtype that layers are in.
    """
    floating = [p for p in model.parameters() if p.is_floating_point()]
    param = most_used((p.dtype, p.numel()) for p in floating)
    trained = [p for p in floating if p.requires_grad]
    accumulated = most_used((p.grad_dtype or p.dtype, p.numel()) for p in trained)
    casting, compute = ("none", param) if autocast is None else ("autocast", autocast)
    row: dict[str, Any] = {
        "param_dtype": dtype_name(param),
        "accum_dtype": dtype_name(accumulated),
        "output_dtype": dtype_name(compute),
        "op_lists": "none",
        "layers": {},
        "tf32": tf32_is_on(device_of(model)),
        "casting": casting,
        "compute_dtype": dtype_name(compute),
        **rounding_columns(optimizers[0], [p.dtype for p in floating]),
        **({} if precision is None else precision.columns),
    }
    return PrecisionRow(**row)


# The columns in which the modes differ
MODE_COLUMNS = (
    *("param_dtype", "compute_dtype", "casting", "rounding", "rounding_scope", "tf32", "gemms"),
)


def mode_name(row: PrecisionRow) -> str:
    """The mode with these columns, or `CUSTOM`."""

    def fits(mode: Policy) -> bool:
        return all(getattr(mode, column) == getattr(row, column) for column in MODE_COLUMNS)

    return next((name for name in SHIPPED_MODES if fits(policy(name))), CUSTOM)


RECORDED_STEPS = 2  # After the audit: optimizers have made their state by then


class StepProbes(StepListener):
    """Inspects single steps; with `memory`, it counts the memory by category."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], memory: bool) -> None:
        self._model, self._optimizers = model, optimizers
        self._is_compiled = any(map(is_compiled, model.modules()))
        self._stack = ExitStack()
        self._step = self._taken = 0
        self.looks = True
        """Whether something is looked at in this step: it is not timed."""
        self._recorder: MemoryRecorder | None = None
        self._autocast: Counter[torch.dtype] = Counter()
        """How many calls of layers in the first step autocast would cast to a dtype."""
        self.audit: Audit | None = None
        self.notes: list[str] = []
        """What could not be looked at, and why."""
        self.memory_bytes: dict[str, int] = {}
        """Bytes by category at the larger peak of the recorded steps."""
        self._gradient_bytes: dict[int, int] = {}
        """Optimizer (by `id`) to bytes of its gradients in the audited step."""
        self._casts: CastCounts | None = None
        self._to_record = RECORDED_STEPS if memory and self._can_record() else 0

    @property
    def autocast(self) -> torch.dtype | None:
        """What autocast casts most calls of layers to; None without autocast."""
        return self._autocast.most_common(1)[0][0] if self._autocast else None

    def before(self, step: int) -> None:
        """The step number `step` is the next one: called before anything of it runs."""
        self._step = step
        # compiled code has no ops of PyTorch to count, and hooks in it would be traced
        if step == 1 and not self._is_compiled:
            for layer in self._model.modules():
                if next(layer.parameters(recurse=False), None) is not None:
                    # a region that `forward` enters itself is only seen from inside
                    handle = layer.register_forward_pre_hook(self._note_autocast)
                    self._stack.callback(handle.remove)
        # the optimizer has its state after a step that was taken
        audits = self._taken > 0 and not self._is_audited
        records = self._is_audited and self._to_record > 0
        self.looks = self._taken == 0 or audits or records
        if audits:
            self._casts = CastCounts(self._model)
            if not self._is_compiled:
                self._stack.enter_context(self._casts.next_call(entries(self._model)))
        if records:
            self._recorder = MemoryRecorder(self._model, self._optimizers[0], True)
            # hooks of the optimizer cannot be added here, while it calls them
            self._stack.enter_context(self._recorder.recording())

    @property
    def _is_audited(self) -> bool:
        return len(self._gradient_bytes) == len(self._optimizers)

    def on_micro_batch(self, module: nn.Module | None, inputs: tuple[Any, Any]) -> None:
        if self._step == 1:
            self._note_autocast()

    def _note_autocast(self, *_: Any) -> None:
        kind = device_of(self._model).type
        if torch.is_autocast_enabled(kind):
            self._autocast[torch.get_autocast_dtype(kind)] += 1

    def on_update_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._recorder is not None:
            self._recorder.tracker.begin_update()
            self._recorder.on_update_begin(optimizer, args, kwargs)
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        if self._casts is not None and (overflow is None or not overflow.item()):
            self._gradient_bytes[id(optimizer)] = _bytes(gradients(optimizer))
            self._audit(optimizer)

    def on_update_end(self, optimizer: Optimizer) -> None:
        if self._recorder is not None:
            self._recorder.tracker.end_update()
            self._recorder.on_update_end(optimizer)

    def after(self, skipped: bool) -> None:
        """The step is over."""
        self._taken += not skipped
        if skipped:  # the memory of a step that is taken is asked for
            self._recorder = None
        self._to_record -= self._recorder is not None
        if self.looks:
            self.close()

    def note_missing(self) -> None:
        """The training is over: note what no step showed."""
        if not self._is_audited:
            text = "no audit, and the memory of gradients is not known: fewer than two steps"
            self.notes.append(f"{text} were taken (those that a loss scale skips do not count)")

    def bytes_by_category(self) -> dict[str, Any]:
        """Bytes by category: at the peak, if memory was recorded, else of what outlives a step."""
        if self.memory_bytes:
            return self.memory_bytes
        states = [x for optimizer in self._optimizers for x in optimizer.state.values()]
        return {
            "parameters": _bytes(self._model.parameters()),
            "buffers": _bytes(self._model.buffers()),
            "gradients": sum(self._gradient_bytes.values()) if self._is_audited else None,
            "optimizer_state": _bytes(x for x in tree_leaves(states) if isinstance(x, Tensor)),
        }

    def close(self) -> None:
        """Stop looking."""
        self._stack.close()
        self._casts = None
        if self._recorder is not None:
            totals = self._recorder.step_memory().totals
            if totals["peak"] > self.memory_bytes.get("peak", 0):
                self.memory_bytes = totals
            self._recorder = None

    def _can_record(self) -> bool:
        several = len(self._optimizers) > 1
        if several or self._is_compiled:
            reason = "several optimizers" if several else "ops of compiled code are not seen"
            self.notes.append(f"activations were not counted: {reason}")
        return not (several or self._is_compiled)

    def _audit(self, optimizer: Optimizer) -> None:
        if len(self._optimizers) > 1:
            text = "no audit: several optimizers; call mprun.audit(model, optimizer) for each"
            self.notes = [*dict.fromkeys([*self.notes, text])]
            return
        try:
            self.audit = audit(self._model, optimizer, self._casts)
        except Exception as error:  # a look must never end a training
            self.notes.append(f"no audit: {first_line(error)}")


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages, each counted once."""
    storages = {storage_key(x): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
