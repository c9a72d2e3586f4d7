"""What a step needs to be run again, kept while it runs, at the price of references.

Whether a step makes a NaN is known when its gradients exist. By then its inputs, its random numbers
and the statistics of its normalizations are overwritten. So each call of the model leaves a note of
what it got: references to its arguments, the states of the random numbers, copies of the buffers.
The weights are those of the step's beginning until the optimizer steps. A hook at the outputs keeps
the gradient that the loss sends into the model: with it the backward pass can be repeated without
the loss.

No hook draws a random number, makes a node of the graph or changes an argument.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun._torch import compiles_itself, in_backward, original_module, write_count
from mprun.integrations.saved_step import SavedCall, SavedStep, plain, write_step
from mprun.nested import all_tensors


@dataclass
class _Call:
    """A call of the model, by reference."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: dict[str, Any]
    autocast: str | None
    evaluating: list[str]
    versions: list[int]
    outputs: list[Tensor] = field(default_factory=list)
    output_gradients: dict[int, Tensor] = field(default_factory=dict)


MOST_CHECKED = 2**20
"""Numbers of an output that are checked for NaN: logits of a large vocabulary would take longer."""


class StepCapture:
    """Keeps what the current step needs to be saved.

    Args:
        model: the model, which the loop calls.
        optimizers: its optimizers; unused, since the step is saved before they change anything.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        self._model = model
        self._stack = ExitStack()
        self._calls: list[_Call] = []
        self._batches: list[Any] = []
        self._noted: list[_Call] = []
        """The noted batches as calls, for a loop that calls parts of the model instead of it."""
        self._buffers: dict[str, Tensor] = {}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def attach(self) -> None:
        """Follow the model until `close`."""
        before, after = self._before, self._after
        if compiles_itself(self._model):
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        for handle in (
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after),
        ):
            self._stack.callback(handle.remove)

    def close(self) -> None:
        """Stop following, and forget."""
        self._stack.close()
        self.next_step()

    def next_step(self) -> None:
        """The step is over."""
        self._calls, self._batches, self._noted, self._buffers = [], [], [], {}

    def note_batch(self, batch: Any) -> None:
        """Remember the batch of the next call, targets included."""
        self._batches.append(batch)
        self._noted.append(self._call((batch,), {}))

    def save(self, path: Path, step: int, reason: str, autocast: torch.dtype | None = None) -> None:
        """Write the current step; call it before the optimizer changes a weight.

        Args:
            path: of the file.
            step: its number.
            reason: why it is saved.
            autocast: the dtype of autocast inside of the model, if it is known.

        Raises:
            OSError: the file cannot be written.
        """
        left_out: list[str] = []
        buffers = self._buffers or dict(self._model.named_buffers())
        calls = self._calls or self._noted
        saved = SavedStep(
            step=step,
            reason=reason,
            model=type(original_module(self._model)).__name__,
            parameters={n: p.detach() for n, p in original_module(self._model).named_parameters()},
            buffers=plain(buffers, left_out),
            calls=[self._saved(call, left_out) for call in calls],
            batches=plain(self._batches, left_out),
            autocast=None if autocast is None else str(autocast).removeprefix("torch."),
            left_out=sorted(set(left_out)),
            versions={"torch": str(torch.__version__), "python": sys.version.split()[0]},
            device=str(self._device),
        )
        write_step(path, saved)

    def outputs_with_nan(self) -> Iterator[str]:
        """The small outputs of the step with a NaN: a NaN need not reach the gradients."""
        for n, x in ((n, x) for call in self._calls for n, x in enumerate(call.outputs)):
            if x.is_floating_point() and x.numel() <= MOST_CHECKED and x.isnan().any():
                yield f"output {n} of the model"

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward() or not torch.is_grad_enabled():
            return
        self._calls.append(self._call(args, kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """A call that begins now; the first one of a step keeps the buffers."""
        model = original_module(self._model)
        if not self._calls and not self._noted:
            self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return _Call(
            args,
            kwargs,
            random_states(self._device),
            autocast_dtype(self._device),
            [name for name, m in model.named_modules() if not m.training],
            [write_count(x) for x in all_tensors((args, kwargs))],
        )

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or not torch.is_grad_enabled() or not self._calls:
            return
        call = self._calls[-1]
        for n, x in enumerate(all_tensors(output)):
            call.outputs.append(x.detach())
            if x.requires_grad:
                x.register_hook(_keeper(call.output_gradients, n))

    def _saved(self, call: _Call, left_out: list[str]) -> SavedCall:
        tensors = all_tensors((call.args, call.kwargs))
        return SavedCall(
            args=plain(list(call.args), left_out),
            kwargs=plain(call.kwargs, left_out),
            random=_plain_states(call.random),
            autocast=call.autocast,
            evaluating=call.evaluating,
            output_gradients={n: x.detach().clone() for n, x in call.output_gradients.items()},
            changed=list(_changed(tensors, call.versions)),
        )


def _keeper(kept: dict[int, Tensor], n: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        kept[n] = gradient if n not in kept else kept[n] + gradient

    return keep


def _changed(tensors: Sequence[Tensor], versions: Sequence[int]) -> Iterator[str]:
    for n, (x, version) in enumerate(zip(tensors, versions, strict=True)):
        if write_count(x) != version:
            yield f"tensor {n} of the arguments, shape {list(x.shape)}"


def autocast_dtype(device: torch.device) -> str | None:
    """The dtype of autocast now; None without it."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all random numbers that a model may draw."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(legacy=True),
    }


def _plain_states(states: dict[str, Any]) -> dict[str, Any]:
    version, keys, gauss = states["python"]
    plain_states = {**states, "python": [version, list(keys), gauss]}
    if states["numpy"] is not None:
        kind, words, *rest = states["numpy"]
        plain_states["numpy"] = [str(kind), [int(x) for x in words], *map(float, rest)]
    return plain_states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Go back to states of a `SavedCall`."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    if states["numpy"] is not None:
        import numpy as np

        kind, words, position, has_gauss, cached = states["numpy"]
        words = np.array(words, dtype=np.uint32)
        np.random.set_state((kind, words, int(position), int(has_gauss), cached))
