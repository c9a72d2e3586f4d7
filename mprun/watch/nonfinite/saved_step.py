"""A training step that can be run again: remembered while it runs, and saved as a file.

A step with a NaN is only known when its backward pass is over. By then its random numbers are
drawn, its running statistics have moved and its batch is about to be freed. So `StepCapture`
remembers every step until it ends:

    inputs          references to the arguments of each call of the model
    random states   before each call
    buffers         copies from before the first call
    gradients       references to those that backward passes bring to the model's outputs

Nothing of this changes a result. `benchmarks.observe` measures its cost, a fraction of a
millisecond a step. The file holds tensors and plain values (`torch.save`, `weights_only=True`).
"""

from __future__ import annotations

import io
import platform
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun import __version__
from mprun.errors import UsageError
from mprun.precision import _torch, devices
from mprun.precision.nested import all_tensors
from mprun.precision.policy import dtype_name
from mprun.records.files import write_atomic
from mprun.records.reader import converted
from mprun.watch.step_events import StepListener

FORMAT = "mprun step"
FORMAT_VERSION = 1
UNSAVED = "mprun: not saved"
# The names are checked before PyTorch parses them: a file may come from anyone
DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")
AUTOCAST_DTYPES = ("float16", "bfloat16", "float32")
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
SMALL_BYTES = 2**16  # Floating buffers up to this size are copied in every step
# Calls of one step that are remembered, the last ones: a loop that never steps must not collect its
# inputs for ever
MAX_CALLS = 256
# Numbers of an output that are checked for NaN: logits of a large vocabulary would take longer
MAX_CHECKED = 2**20


# ---- the file ------------------------------------------------------------------------------------


@dataclass
class AutocastState:
    """The state of autocast for a kind of device."""

    device: str  # cpu, cuda, ..
    enabled: bool
    dtype: str  # PyTorch's name without the package


@dataclass
class SavedCall:
    """One call of the model."""

    args: list[Any]
    kwargs: dict[str, Any]
    needs_grad: list[bool]
    """Whether each tensor in `args` and `kwargs`, in their order, required a gradient."""
    random: dict[str, Any]  # The random states before it, by `random_snapshot`
    autocast: list[AutocastState]
    output_grads: list[list[Tensor]]
    """Per tensor in the output that needs a gradient: those that backward passes brought it."""


@dataclass
class SavedStep:
    """A step of training, before its first op."""

    format: str
    format_version: int
    step: int
    reason: str  # Why it was saved
    model: str  # The class of the model
    optimizers: list[str]  # The class of each optimizer
    device: str  # Of the model
    threads: int
    versions: dict[str, str]  # Of python, torch and mprun
    parameters: dict[str, Tensor]  # By the names of `Module.named_parameters`
    buffers: dict[str, Tensor]
    """By the names of `Module.named_buffers`, as they were before the first call."""
    frozen: list[str]  # Parameters that do not need gradients
    in_evaluation: list[str]
    """Modules that are not in training mode; the model itself is the empty name."""
    calls: list[SavedCall]
    batches: list[Any]  # Those that the loop gave; empty if it gave none
    autocast: str | None
    """The dtype of autocast inside of the model; None without it, or where it is not known."""
    notes: list[str] = field(default_factory=list)  # What could not be saved as it was

    def as_plain(self) -> dict[str, Any]:
        """For `torch.save`."""
        calls = [{**vars(c), "autocast": [vars(state) for state in c.autocast]} for c in self.calls]
        return {**vars(self), "calls": calls}


def saved_step(content: Any, path: Path) -> SavedStep:
    """The content of the file `path` as a saved step.

    Raises:
        UsageError: it is no such step, is damaged, or a later version of mprun wrote it.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(
            f"{path} is not a saved step; legal is a file that mprun.observe(..., "
            "on_nonfinite='save') wrote"
        )
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise UsageError(f"{path} has format {version}, this mprun reads up to {FORMAT_VERSION}")
    saved = converted(path, content, SavedStep)
    for reason in _faults(saved):
        raise UsageError(f"{path} is damaged: {reason}")
    return saved


def _faults(saved: SavedStep) -> Iterator[str]:
    """What types cannot express."""
    if not saved.calls:
        yield "it has no call of the model"
    states = [state for call in saved.calls for state in call.autocast]
    for device in (saved.device, *(state.device for state in states)):
        if not DEVICE.fullmatch(device):
            yield f"{device!r:.40} is not a device"
    for dtype in (*(state.dtype for state in states), saved.autocast):
        if dtype not in (*AUTOCAST_DTYPES, None):
            yield f"{dtype!r:.40} is not a dtype of autocast"
    tensors = (*saved.parameters.values(), *saved.buffers.values(), *all_tensors(saved.batches))
    inputs = all_tensors([[call.args, call.kwargs, call.output_grads] for call in saved.calls])
    if any(x.is_meta or x.layout != torch.strided for x in (*tensors, *inputs)):
        yield "a tensor has no values"


# ---- tensors and plain values --------------------------------------------------------------------


class PlainCopy:
    """Makes tensors and plain values of anything.

    A named tuple becomes a tuple, a dataclass or another mapping a dictionary, a NumPy array a
    tensor. In place of anything else stands a mapping of `UNSAVED` to the name of its type.

    Attributes:
        needs_grad: whether each saved tensor required a gradient.
        unsaved: the types that cannot be saved, each once.
    """

    def __init__(self) -> None:
        self.needs_grad: list[bool] = []
        self.unsaved: dict[str, None] = {}

    def of(self, value: Any) -> Any:
        """`value` as tensors and plain values."""
        if isinstance(value, Tensor):
            if not is_ordinary(value):
                return self._left_out(value)
            self.needs_grad.append(value.requires_grad)
            return bare(value)
        if isinstance(value, PLAIN):
            return _exact(value)
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, list | tuple):
            items = [self.of(x) for x in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, Mapping):
            return {_exact(k): self.of(v) for k, v in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return {f.name: self.of(getattr(value, f.name, None)) for f in fields(value)}
        # By name: NumPy is not imported for it. The kinds are bool, integers, floats and complex
        if type(value).__module__ == "numpy" and value.dtype.kind in "biufc":
            return torch.as_tensor(value).clone()
        return self._left_out(value)

    def _left_out(self, value: Any) -> dict[str, str]:
        self.unsaved[type(value).__name__] = None
        return {UNSAVED: type(value).__name__}


def is_ordinary(x: Tensor) -> bool:
    """Whether all its numbers are in its own memory: no subclass, sparse or meta tensor."""
    return type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta


def bare(x: Tensor) -> Tensor:
    """The tensor without its graph, and without the rest of the memory that it is a view of."""
    x = x.detach()
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def unsaved_types(value: Any) -> list[str]:
    """The types in a saved value that could not be saved."""
    if isinstance(value, dict) and set(value) == {UNSAVED}:
        return [str(value[UNSAVED])]
    children = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple)
    return [kind for child in (children if nested else ()) for kind in unsaved_types(child)]


def _exact(value: Any) -> Any:
    """A number or text without a class of its own, such as that of an enum."""
    if type(value) in PLAIN:
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


# ---- random states -------------------------------------------------------------------------------


def random_snapshot(of: Iterable[torch.device]) -> dict[str, Any]:
    """The states of all generators that a model may draw from, those of accelerators of `of`."""
    host = devices.host_random_states()
    return {"cpu": torch.get_rng_state(), "devices": devices.random_states(of), **host}


def restore_random(saved: dict[str, Any]) -> None:
    """Set the generators to states of `random_snapshot`; an accelerator's where there is one.

    Raises:
        Exception: of any kind, where the states are none.
    """
    torch.set_rng_state(saved["cpu"])
    devices.restore_random_states(saved["devices"])
    devices.restore_host_random_states(saved)


# ---- a step while it runs ------------------------------------------------------------------------


@dataclass(eq=False)
class ObservedCall:
    """A call of the model in the current step."""

    call: SavedCall  # Its arguments and gradients are still the loop's
    writes: list[tuple[Tensor, int]]
    """The tensors in the arguments, and how often each was written to before the call.

    An input that is changed in place later is noted in the file, not copied at every step.
    """
    has_nan: list[Tensor | bool] = field(default_factory=list)
    """Whether each tensor in the output has a NaN; those that are too large are not looked at."""


class StepCapture(StepListener):
    """Remembers the current step of a loop that `StepHooks` follows, and saves it on demand."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._model = _torch.original_module(model)
        # In order: the first one is that of the model in the file
        devices = dict.fromkeys(p.device for p in model.parameters())
        self._devices = list(devices) or [torch.device("cpu")]
        self._kinds = list(dict.fromkeys((self._devices[0].type, "cpu")))
        self._buffers = BufferCopies(model)
        self._calls: deque[ObservedCall] = deque(maxlen=MAX_CALLS)
        self._noted: deque[ObservedCall] = deque(maxlen=MAX_CALLS)
        """The batches that the loop gave, each as a call: a loop may call parts of the model."""
        self._seen = 0
        """Calls of this step."""
        self._open: ObservedCall | None = None
        self._of_leaves: list[Any] = []
        """Handles of hooks on outputs that are parameters, which outlast the step."""

    def next_step(self) -> None:
        """The step is over: forget it."""
        for call in self._calls:
            for arrived in call.call.output_grads:  # their graph may refer to this list in turn
                arrived.clear()
        for handle in self._of_leaves:
            handle.remove()
        self._of_leaves.clear()
        self._calls.clear()
        self._noted.clear()
        self._seen, self._open = 0, None

    def note_batch(self, batch: Any) -> None:
        """The loop trains on this batch now: what a replay's `step(model, batch)` gets."""
        self._noted.append(self._call((batch,), {}))

    def outputs_with_nan(self) -> Iterator[str]:
        """The small outputs of the step with a NaN: a NaN need not reach the gradients."""
        for n, has_nan in ((n, x) for call in self._calls for n, x in enumerate(call.has_nan)):
            if has_nan:
                yield f"output {n} of the model"

    def save(self, path: Path, step: int, reason: str, autocast: torch.dtype | None = None) -> None:
        """Write the step to a file, as a whole; call it before the optimizer changes the weights.

        `autocast` is its dtype inside of the model, if it is known.

        Raises:
            ValueError: the model was not called in this step, and the loop gave no batch.
            TypeError: a parameter is no ordinary tensor, such as one that FSDP divided.
            OSError: the file cannot be written.
        """
        if not self._calls and not self._noted:
            raise ValueError(f"step {step} cannot be saved: the model was not called in it")
        with _torch.outside_of_modes():
            buffer = io.BytesIO()  # in memory first: a file appears whole, or not at all
            torch.save(self._saved(step, reason, autocast).as_plain(), buffer)
        write_atomic(path, buffer.getvalue())

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        self._open = self._call(*inputs)
        self._calls.append(self._open)
        self._seen += 1

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservedCall:
        """A call that begins now; before the first one of a step, buffers are copied."""
        if not self._calls and not self._noted:
            self._buffers.update()
        writes = [(x, _torch.write_count(x)) for x in all_tensors((args, kwargs))]
        autocast = [
            AutocastState(k, torch.is_autocast_enabled(k), dtype_name(torch.get_autocast_dtype(k)))
            for k in self._kinds
        ]
        random = random_snapshot(self._devices)
        return ObservedCall(SavedCall([*args], kwargs, [], random, autocast, []), writes)

    def on_forward_end(self, path: str, outputs: Any) -> None:
        call, self._open = self._open, None
        if call is None:  # the step ended inside of the call
            return
        for x in all_tensors(outputs):
            call.has_nan.append(_has_nan(x.detach()))
            if x.requires_grad:
                arrived: list[Tensor] = []
                call.call.output_grads.append(arrived)
                handle = x.register_hook(arrived.append)
                if x.is_leaf:  # hooks of other tensors die with the graph
                    self._of_leaves.append(handle)

    def _saved(self, step: int, reason: str, autocast: torch.dtype | None) -> SavedStep:
        copy, model = PlainCopy(), self._model
        parameters = dict(model.named_parameters())
        calls = [_plain(observed.call) for observed in self._calls or self._noted]
        batches = [copy.of(observed.call.args[0]) for observed in self._noted]
        copies = [copy, *(of_call for _, of_call in calls)]
        return SavedStep(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            step=step,
            reason=reason,
            model=type(model).__name__,
            optimizers=[type(x).__name__ for x in self._optimizers],
            device=str(self._devices[0]),
            threads=torch.get_num_threads(),
            versions={
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "mprun": __version__,
            },
            parameters={name: _checked(name, p) for name, p in parameters.items()},
            buffers={name: _checked(name, x) for name, x in self._buffers.by_name().items()},
            frozen=[name for name, p in parameters.items() if not p.requires_grad],
            in_evaluation=[name for name, m in model.named_modules() if not m.training],
            calls=[call for call, _ in calls],
            batches=batches,
            autocast=None if autocast is None else dtype_name(autocast),
            notes=self._notes(copies),
        )

    def _notes(self, copies: Sequence[PlainCopy]) -> list[str]:
        notes = []
        if self._seen > len(self._calls):
            notes.append(f"of {self._seen} calls of the model the last {MAX_CALLS} are saved")
        for i, call in enumerate(self._calls or self._noted, start=1):
            for j, (x, count) in enumerate(call.writes):
                if _torch.write_count(x) != count:
                    notes.append(
                        f"tensor {j} of the model's inputs in call {i} was changed in place after "
                        "the call: the changed values are saved"
                    )
        unsaved = dict.fromkeys(kind for copy in copies for kind in copy.unsaved)
        return notes + [f"{kind} cannot be saved" for kind in unsaved]


class BufferCopies:
    """The buffers of a model before the current step.

    Small floating ones are copied in every step: batch normalization writes to its statistics
    without counting the write. Others are copied after a counted write: a mask never is.
    """

    def __init__(self, model: nn.Module) -> None:
        # once: to walk through all modules at every step would take a millisecond
        self._places = [
            (f"{path}.{key}".lstrip("."), _torch.own_buffers(module), key)
            for path, module in model.named_modules()
            for key, _ in module.named_buffers(recurse=False)
        ]
        self._copies: dict[str, tuple[Tensor, Tensor, int]] = {}
        """Name to a buffer, its copy, and how often it was written to before."""

    def update(self) -> None:
        """A step begins: copy the buffers that may have changed."""
        with (
            _torch.outside_of_modes()
            if _torch.dispatch_modes() or _torch.function_modes()
            else torch.no_grad()
        ):
            for name, own, key in self._places:
                x = own.get(key)
                if x is None:
                    self._copies.pop(name, None)
                else:
                    self._copies[name] = self._copied(name, x)

    def _copied(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, int]:
        known, writes = self._copies.get(name), _torch.write_count(x)
        if known is None or known[0] is not x:
            return x, x.detach().clone(), writes
        counts = x.nbytes > SMALL_BYTES or not x.is_floating_point()
        if not counts or known[2] != writes:
            known[1].copy_(x)
        return x, known[1], writes

    def by_name(self) -> dict[str, Tensor]:
        """The copies, by the names of `Module.named_buffers`."""
        return {name: copy for name, (_, copy, _) in self._copies.items()}


def _has_nan(x: Tensor) -> Tensor | bool:
    """Whether a small tensor has a NaN; on a device read later, so that nothing waits for it."""
    if not x.is_floating_point() or x.numel() > MAX_CHECKED:
        return False
    if not x.is_cpu or not x.is_contiguous():
        return x.isnan().any()
    flat = x.view(-1)
    return isnan(float(flat.dot(flat)))  # quicker; of infinities it is infinite


def _plain(call: SavedCall) -> tuple[SavedCall, PlainCopy]:
    copy = PlainCopy()
    args, kwargs = [copy.of(x) for x in call.args], {k: copy.of(v) for k, v in call.kwargs.items()}
    gradients = [[bare(g) for g in arrived] for arrived in call.output_grads]
    made = replace(
        call, args=args, kwargs=kwargs, needs_grad=copy.needs_grad, output_grads=gradients
    )
    return made, copy


def _checked(name: str, x: Tensor) -> Tensor:
    if not is_ordinary(x):
        raise TypeError(
            f"{name} is a {type(x).__name__}, which cannot be saved: legal are ordinary tensors"
        )
    return bare(x)
