"""What is looked at in single steps at the start, none of which is timed.

step 1      the state of autocast at every layer
step 2      the casts of the model's first call; the audit, where the gradients are complete
steps 3, 4  memory op by op, if it is asked for; optimizers have made their state by then
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor, nn
from torch.optim import Optimizer

from mprun._torch import is_compiled, storage_key, tree_leaves
from mprun.errors import first_line
from mprun.integrations.gradient_check import gradients
from mprun.integrations.observed_precision import AutocastReader
from mprun.integrations.step_hooks import entries
from mprun.numerics.audit import Audit, audit
from mprun.numerics.cast_counts import CastCounts
from mprun.numerics.memory_recorder import MemoryRecorder

AUDITED_STEP = 2
RECORDED_STEPS = (3, 4)


class StepProbes:
    """Looks at single steps.

    Args:
        model, optimizers: what trains.
        memory: whether memory is counted by category.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], memory: bool) -> None:
        self._model, self._optimizers = model, optimizers
        self._stack = ExitStack()
        self._recorder: MemoryRecorder | None = None
        self.autocast = AutocastReader(model)
        self.audit: Audit | None = None
        self.notes: list[str] = []
        """What could not be looked at, and why."""
        self.memory_bytes: dict[str, int] = {}
        """Bytes by category at the larger peak of the recorded steps."""
        self._gradient_bytes = 0
        self._casts: CastCounts | None = None
        self._recorded = RECORDED_STEPS if memory and self._can_record() else ()

    def is_timed(self, step: int) -> bool:
        """Whether nothing is looked at in this step."""
        return step > AUDITED_STEP and step not in self._recorded

    def before(self, step: int) -> None:
        """The step number `step` is the next one: called before anything of it runs."""
        if step == 1:
            self._stack.enter_context(self.autocast.attached())
        if step == AUDITED_STEP and not any(map(is_compiled, self._model.modules())):
            self._casts = CastCounts(self._model)
            self._stack.enter_context(self._casts.next_call(entries(self._model)))
        if step in self._recorded:
            self._record()

    def on_call(self, step: int) -> None:
        """The model is called in this step."""
        if step == 1:
            self.autocast.note()

    def on_gradients(self, step: int, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete."""
        if self._recorder is not None:
            self._recorder.tracker.begin_update()
            self._recorder.on_update_begin(optimizer, (), {})
        if step == AUDITED_STEP:
            self._gradient_bytes += _bytes(gradients(optimizer))
            self._audit(optimizer)

    def on_updated(self, optimizer: Optimizer) -> None:
        """An update is done."""
        if self._recorder is not None:
            self._recorder.tracker.end_update()
            self._recorder.on_update_end(optimizer)

    def after(self, step: int) -> None:
        """The step is over."""
        if step <= AUDITED_STEP or step in self._recorded:
            self.close()

    def bytes_by_category(self) -> dict[str, int]:
        """Bytes by category: at the peak, if memory was recorded, else of what outlives a step."""
        if self.memory_bytes:
            return self.memory_bytes
        states = [x for optimizer in self._optimizers for x in optimizer.state.values()]
        return {
            "parameters": _bytes(self._model.parameters()),
            "buffers": _bytes(self._model.buffers()),
            "gradients": self._gradient_bytes,
            "optimizer_state": _bytes(x for x in tree_leaves(states) if isinstance(x, Tensor)),
        }

    def close(self) -> None:
        """Stop looking."""
        self._stack.close()
        if self._recorder is not None:
            totals = self._recorder.step_memory().totals
            if totals["peak"] > self.memory_bytes.get("peak", 0):
                self.memory_bytes = totals
            self._recorder = None

    def _can_record(self) -> bool:
        reason = ""
        if len(self._optimizers) > 1:
            reason = "there are several optimizers"
        elif any(map(is_compiled, self._model.modules())):
            reason = "ops of compiled code are not seen"
        if reason:
            self.notes.append(f"activations were not counted: {reason}")
        return not reason

    def _record(self) -> None:
        recorder = MemoryRecorder(self._model, self._optimizers[0])
        recorder.begin(())
        self._stack.callback(recorder.end)
        self._stack.enter_context(recorder.following(self._model, listeners=[recorder]))
        for handle in recorder.gradient_hooks():
            self._stack.callback(handle.remove)
        self._stack.enter_context(recorder)
        self._recorder = recorder

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
