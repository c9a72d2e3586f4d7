"""A training step as a file: what is needed to run it again, as tensors and plain values.

A file of `torch.save` that loads with `weights_only=True`. Lists, tuples and dictionaries keep
their nesting. Other containers become plain ones: a named tuple becomes a tuple, a dataclass or
another mapping (Transformers' `ModelOutput` and `BatchEncoding`) a dictionary with its fields. A
NumPy array becomes a tensor. Whatever else a model is called with cannot be saved; a mapping with
the single key `UNSAVED` and the name of its type takes its place.

Random states are those of all generators that a model may draw from: PyTorch's (the CPU's and those
of the model's CUDA devices), Python's and, where it is imported, NumPy's. To take a snapshot draws
no number. It costs about 50 us, most of it for Python and NumPy, whose states are 2.5 kB each.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun import devices
from mprun.errors import UsageError
from mprun.nested import all_tensors
from mprun.records.reader import converted

FORMAT = "mprun step"
FORMAT_VERSION = 1
UNSAVED = "mprun: not saved"
DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")
AUTOCAST_DTYPES = ("float16", "bfloat16", "float32")
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass
class AutocastState:
    """The state of autocast for a kind of device."""

    device: str
    """cpu, cuda, ..."""
    enabled: bool
    dtype: str
    """PyTorch's name without the package."""


@dataclass
class SavedCall:
    """One call of the model."""

    args: list[Any]
    kwargs: dict[str, Any]
    needs_grad: list[bool]
    """Whether each tensor in `args` and `kwargs`, in their order, required a gradient."""
    random: dict[str, Any]
    """The random states before it; see `RandomSnapshot`."""
    autocast: list[AutocastState]
    output_grads: list[list[Tensor]]
    """Per tensor in the output that needs a gradient: those that backward passes brought it."""


@dataclass
class SavedStep:
    """A step of training, before its first op."""

    format: str
    format_version: int
    step: int
    reason: str
    """Why it was saved."""
    model: str
    """The class of the model."""
    optimizers: list[str]
    """The class of each optimizer."""
    device: str
    """Of the model."""
    threads: int
    versions: dict[str, str]
    """Of python, torch and mprun."""
    parameters: dict[str, Tensor]
    """By the names of `Module.named_parameters`."""
    buffers: dict[str, Tensor]
    """By the names of `Module.named_buffers`, as they were before the first call."""
    frozen: list[str]
    """Parameters that do not need gradients."""
    in_evaluation: list[str]
    """Modules that are not in training mode; the model itself is the empty name."""
    calls: list[SavedCall]
    batches: list[Any]
    """Those that the loop gave; empty if it gave none."""
    autocast: str | None
    """The dtype of autocast inside of the model; None without it, or where it is not known."""
    notes: list[str] = field(default_factory=list)
    """What could not be saved as it was."""

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


class PlainCopy:
    """Makes tensors and plain values of anything; collects what changed.

    Attributes:
        needs_grad: whether each saved tensor required a gradient.
        changed: the types that became others, each once.
        unsaved: the types that cannot be saved, each once.
    """

    def __init__(self) -> None:
        self.needs_grad: list[bool] = []
        self.changed: dict[str, str] = {}
        self.unsaved: dict[str, None] = {}

    def of(self, value: Any) -> Any:
        """`value` as tensors and plain values."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, PLAIN):
            return _exact(value)
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, list | tuple):
            items = [self.of(x) for x in value]
            kind = list if isinstance(value, list) else tuple
            return self._instead(value, kind(items), kind)
        if isinstance(value, Mapping):
            return self._instead(value, {_exact(k): self.of(v) for k, v in value.items()}, dict)
        if is_dataclass(value) and not isinstance(value, type):
            row = {f.name: self.of(getattr(value, f.name, None)) for f in fields(value)}
            return self._instead(value, row, dict)
        if type(value).__module__ == "numpy" and value.dtype.kind in "biufc":
            return self._instead(value, torch.as_tensor(value).clone(), Tensor)
        return self._left_out(value)

    def _tensor(self, x: Tensor) -> Any:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_meta:
            return self._left_out(x)
        self.needs_grad.append(x.requires_grad)
        return bare(x)

    def _instead(self, value: Any, made: Any, kind: type) -> Any:
        if type(value) is not kind:
            self.changed[type(value).__name__] = kind.__name__
        return made

    def _left_out(self, value: Any) -> dict[str, str]:
        self.unsaved[type(value).__name__] = None
        return {UNSAVED: type(value).__name__}


def bare(x: Tensor) -> Tensor:
    """The tensor without its graph, and without the rest of the memory that it is a view of."""
    x = x.detach()
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def unsaved_types(value: Any) -> list[str]:
    """The types in a saved value that could not be saved."""
    if isinstance(value, dict) and set(value) == {UNSAVED}:
        return [str(value[UNSAVED])]
    children: list[Any] = []
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    return [kind for child in children for kind in unsaved_types(child)]


def _exact(value: Any) -> Any:
    """A number or text without a class of its own, such as that of an enum."""
    for kind in PLAIN:
        if type(value) is kind:
            return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


class RandomSnapshot(NamedTuple):
    """The states at one moment."""

    cpu: Tensor
    """uint8, as of `torch.get_rng_state`."""
    devices: dict[str, Tensor]
    """An accelerator (`cuda:0`) to its state."""
    python: tuple[Any, ...]
    numpy: Any
    """None where NumPy's was not in use."""

    def as_plain(self) -> dict[str, Any]:
        """As tensors, lists and numbers."""
        version, words, gauss = self.python
        numpy = None
        if self.numpy is not None:
            kind, state = self.numpy["bit_generator"], self.numpy["state"]
            cached = int(self.numpy["has_gauss"]), float(self.numpy["gauss"])
            numpy = [str(kind), state["key"].tolist(), int(state["pos"]), *cached]
        python = [version, list(words), gauss]
        return {"cpu": self.cpu, "devices": self.devices, "python": python, "numpy": numpy}


def random_snapshot(of: Iterable[torch.device]) -> RandomSnapshot:
    """The states now; of accelerators those of `of`."""
    numpy = sys.modules.get("numpy.random")
    return RandomSnapshot(
        torch.get_rng_state(),
        devices.random_states(of),
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),  # in half the time of a tuple
    )


def restore_random(saved: dict[str, Any]) -> None:
    """Set the generators to states that `as_plain` gave; an accelerator's where there is one.

    Raises:
        Exception: of any kind, where the states are none.
    """
    torch.set_rng_state(saved["cpu"])
    devices.restore_random_states(saved["devices"])
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    if saved["numpy"] is not None:
        import numpy as np

        kind, keys, position, has_gauss, cached = saved["numpy"]
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
