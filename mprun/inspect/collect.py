"""Statistics of a training step's numbers, layer by layer, while it runs.

    weights               each parameter, before the step
    activations           the model's inputs, and the output of each module
    activation_gradients  the loss's gradients by those
    weight_gradients      the loss's gradients by each parameter, of each backward pass
    updates               what the step adds to each parameter (`updates.py`)

Hooks read and change nothing: a run with them has the same weights, bit for bit. A module that
returns the output of one inside it has no row of its own. Forward passes without gradients are not
measured; recomputed ones count once. Gradients are divided by the loss scale. In a float16 run the
smallest are 0 already: for a recommended loss scale, measure steps in float32 or bfloat16, or at a
scale that loses few.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from mprun.inspect.histograms import (
    LayerGradients,
    Noise,
    ScaleAdvice,
    histogram,
    judge,
    noise_of,
    recommend,
)
from mprun.inspect.numerics import KINDS, Histogram, ScaleVerdict
from mprun.precision._torch import (
    in_backward,
    is_transformed,
    node_number,
    outside_of_modes,
    viewed,
    write_count,
)
from mprun.precision.formats import BlockFormat, Format
from mprun.watch.op_watcher import tensors_of
from mprun.watch.step_events import StepListener, StepTracker
from mprun.watch.updates import (
    ExactUpdate,
    LostUpdates,
    exact_updates,
    exact_weights,
    lost_updates,
    power,
)

GRADIENTS = ("activation_gradients", "weight_gradients")
INPUT = "(input)"  # The row of the model's inputs, which are no module's output
ROOT = "(model)"  # The name of the model itself, whose path is empty
PARAMETER = "parameter"


class GradientSource(NamedTuple):
    """The tensor that a gradient belongs to."""

    module: str  # The path of the module, or the parameter's name
    op: str  # The op of the forward pass whose output it is the gradient of, or `PARAMETER`
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.module if self.op == PARAMETER else f"{self.op} in {self.module}"


class LargestGradients(StepListener):
    """Records the largest magnitude of each source; NaN and infinities as infinite.

    A loss scale must not be too large for *any* number of the backward pass. Many of these numbers
    are the gradient of no module's output: those inside attention, or of weights before they are
    cast back to float32. So autograd's graph is walked from the outputs of the model, and a hook on
    every node measures the gradients that the node receives. Numbers inside a single kernel cannot
    be measured, nor anything inside compiled code. `unscaled` returns the divisor of magnitudes,
    the loss scale, in the backward pass.
    """

    def __init__(self, unscaled: Callable[[], float] = lambda: 1.0) -> None:
        self.magnitudes: dict[GradientSource, float] = {}
        self.tracker = StepTracker()
        self._scale = unscaled
        self._active = False
        self._names: dict[int, str] = {}

    def worst(self) -> tuple[float, GradientSource | None]:
        """The largest that float16 has to represent: of those in float16, or of all if none is."""
        # Of autocast's gradients, those in float32 cannot overflow at any scale that is used
        low = {p: v for p, v in self.magnitudes.items() if p.dtype == torch.float16}
        low = low or self.magnitudes
        source = max(low, key=lambda p: low[p], default=None)
        return (0.0, None) if source is None else (low[source], source)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Measure what `model` computes while this is entered, backward passes included."""
        with self.tracker.following(model, listeners=[self]), self.parameter_hooks(model):
            yield

    @contextmanager
    def parameter_hooks(self, model: nn.Module) -> Iterator[None]:
        """Measure the parameters' gradients; for callers whose tracker notifies this already."""
        self._names = {id(p): name for name, p in model.named_parameters()}
        with ExitStack() as stack:
            for name, p in model.named_parameters():
                if p.requires_grad:
                    measure = partial(self._measure, name, PARAMETER)
                    stack.enter_context(p.register_hook(lambda g, measure=measure: measure((g,))))
            try:
                yield
            finally:
                self._active = False

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        self._active = True
        self.tracker.forget_graph()

    def on_forward_end(self, path: str, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self.follow(outputs)

    def follow(self, outputs: Any) -> None:
        """Hook the nodes that led to `outputs` since the model was last called."""
        todo = [x.grad_fn for x in tensors_of(outputs) if x.grad_fn is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            number = node_number(node)
            if number is None or number < self.tracker.first_node:
                continue  # a parameter's, or made before: of another call
            op = node.name().rpartition("Backward")[0] or node.name()  # Addmm of AddmmBackward0
            where = _parameter_behind(node, self._names) or (self._module(number), op)
            node.register_prehook(partial(self._measure, *where))  # dies with the node
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)

    def _module(self, number: int) -> str:
        module = self.tracker.module_of(number, own_thread=True)
        return "the loss" if module is None else module or ROOT

    def _measure(self, module: str, op: str, gradients: tuple[Tensor | None, ...]) -> None:
        if not self._active:
            return
        for gradient in gradients:
            if gradient is not None and gradient.numel() and gradient.is_floating_point():
                self._add(GradientSource(module, op, gradient.dtype), gradient)

    def _add(self, source: GradientSource, gradient: Tensor) -> None:
        with outside_of_modes():
            # vector_norm takes 25 times as long on a CPU
            size = float(gradient.abs().max()) / self._scale()
        size = size if math.isfinite(size) else math.inf
        self.magnitudes[source] = max(self.magnitudes.get(source, 0.0), size)


def _parameter_behind(node: Node, names: Mapping[int, str]) -> tuple[str, str] | None:
    """The parameter whose gradient a node passes on: unchanged, cast or transposed."""
    following: Node | None = node
    while following is not None and following.name() in _PASSES_ON:
        following = following.next_functions[0][0]
    name = names.get(id(getattr(following, "variable", None)))
    return None if name is None else (name, PARAMETER)


# Nodes that give a gradient on with the same numbers: of `weight.t()`, and of autocast's casts
_PASSES_ON = ("TBackward0", "ToCopyBackward0", "TransposeBackward0")


# ---- statistics ----------------------------------------------------------------------------------


@dataclass
class LayerStatistics:
    """One kind of numbers of one layer, over all measured steps."""

    kind: str  # One of `KINDS`
    name: str  # The parameter's, or the module's path
    dtypes: set[torch.dtype] = field(default_factory=set)  # The dtypes of the tensors
    histogram: Histogram = field(default_factory=Histogram)
    noise: Noise = field(default_factory=Noise)
    """The noise of rounding to other formats; the signal alone where formats were not asked for."""

    def add(
        self,
        x: Tensor,
        scale: float = 1.0,
        formats: bool = True,
        further: Sequence[Format | BlockFormat] = (),
    ) -> None:
        """Count one more tensor, divided by `scale`; `further` formats as in `noise_of`."""
        self.dtypes.add(x.dtype)
        if scale != 1:  # in float64: small gradients would be rounded, or flushed, once more
            x = x.detach().double() / scale
        counts = histogram(x)
        self.histogram += counts
        self.noise += noise_of(x, counts, further) if formats else Noise(power(x))


class Statistics(StepListener):
    """Statistics of a model's steps, as `mprun.numerics.statistics(model)` gives them.

    Args:
        model: the model of the steps.
        optimizer: its optimizer; without it updates are left out.
        loss_scale: the factor of the loss: a number, a `torch.amp.GradScaler`, one of
            mprun's loss scales, or a function that gives it.
        formats: kinds whose noise in other formats is wanted; it takes most of the time.
        kinds: kinds that are measured.
        further: formats that `formats` are measured in, beside those that always are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loss_scale: Any = 1.0,
        formats: Collection[str] = KINDS,
        kinds: Collection[str] = KINDS,
        further: Sequence[Format | BlockFormat] = (),
    ) -> None:
        self.rows: dict[tuple[str, str], LayerStatistics] = {}
        self.lost: dict[str, LostUpdates] = {}
        self.scales: list[float] = []  # of each measured forward pass
        # a hand-written backward pass may run layers of its own, before a forward pass is measured
        self.largest = LargestGradients(lambda: self.scales[-1] if self.scales else 1.0)
        self._model, self._optimizer, self._loss_scale = model, optimizer, loss_scale
        self._formats, self._kinds, self._further = formats, kinds, further
        self._names = {p: name for name, p in model.named_parameters()}
        self._active = self._new_step = False
        # This call's outputs by id, with their writes; a freed tensor's id is given out again
        self._given: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._updates: dict[nn.Parameter, ExactUpdate] = {}

    # ---- results ---------------------------------------------------------------------------------

    def of(self, *kinds: str) -> dict[str, LayerStatistics]:
        """The rows of some `kinds`, by `kind name`."""
        return {f"{r.kind} {r.name}": r for r in self.rows.values() if r.kind in kinds}

    def gradients(self) -> LayerGradients:
        """The unscaled gradients, as far as a loss scale depends on them."""
        size, source = self.largest.worst()
        layers = {name: (row.histogram, row.noise) for name, row in self.of(*GRADIENTS).items()}
        return LayerGradients(size, str(source), layers)

    def recommended_loss_scale(self, headroom: float = 2.0) -> ScaleAdvice | None:
        """The loss scale to take in float16, `headroom` below overflow; None without advice."""
        return recommend(self.gradients(), headroom)

    def judge(self, scale: float) -> ScaleVerdict | None:
        """Whether a loss scale is too low, too high or fine; None where there is no advice."""
        advice = self.recommended_loss_scale()
        return None if advice is None else judge(scale, advice)

    # ---- measuring -------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[Statistics]:
        """A context in which every training step is measured."""
        self._new_step = True
        follow = self.largest.tracker.following
        listeners = (self.largest, self)
        with ExitStack() as stack:
            stack.enter_context(follow(self._model, self._optimizer, listeners=listeners))
            stack.enter_context(self.largest.parameter_hooks(self._model))
            for p, name in self._names.items():
                if p.requires_grad:
                    hook = partial(self._on_gradient, "weight_gradients", name)
                    stack.enter_context(p.register_hook(hook))
            try:
                yield self
            finally:
                self._active = False
                self._given.clear()

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        if in_backward():  # a recomputation of activation checkpointing
            return
        self._active = torch.is_grad_enabled()  # an evaluation is no step
        if not self._active:
            return
        self.scales.append(scale_of(self._loss_scale))
        if self._new_step:
            self._new_step = False
            for p, name in self._names.items():
                self._add("weights", name, p)
        self._given.clear()
        for x in _floating(inputs):
            self._add("activations", INPUT, x)

    def on_module_end(self, path: str, outputs: Any) -> None:
        if self._active:
            for x in _floating(outputs):
                if not is_transformed(x):  # inside `torch.func` there are no numbers to read
                    self._output(path or ROOT, x)

    def _output(self, path: str, x: Tensor) -> None:
        # `nn.Flatten` returns a view of all numbers, which are counted already
        whole = viewed(x) if viewed(x).numel() == x.numel() else x
        # An `id` may be given out again, and a ReLU in place changes the numbers of a tensor
        reference, writes = self._given.get(id(whole), (None, 0))
        # the write count: a tensor that was changed in place since has other numbers
        if reference is not None and reference() is whole and writes == write_count(whole):
            return
        self._given[id(whole)] = (weakref.ref(whole), write_count(whole))
        if not in_backward():  # a recomputation's values were measured
            self._add("activations", path, x)
        if x.requires_grad:
            x.register_hook(partial(self._on_gradient, "activation_gradients", path))

    def _on_gradient(self, kind: str, name: str, gradient: Tensor) -> None:
        if self._active:
            self._add(kind, name, gradient, self.scales[-1])

    def on_update_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._updates = {}
        if not self._active:
            return
        # A closure goes forward and backward, maybe several times: no copy could repeat it alone
        if args[1:] or kwargs.get("closure") is not None:
            warnings.warn(
                f"numerics: {type(optimizer).__name__}.step is given a closure and cannot be "
                "repeated; its updates are not measured",
                stacklevel=2,
            )
            return
        with outside_of_modes():  # a mode that rounds or records must not see the copy's step
            self._updates = exact_updates(optimizer)

    def on_update_end(self, optimizer: Optimizer) -> None:
        self._new_step = True
        for p, (before, change) in self._updates.items():
            name = self._names.get(p)
            if name is None:  # a parameter of another model
                continue
            self._add("updates", name, change)
            with outside_of_modes():
                after = exact_weights(p, optimizer)
                lost = lost_updates(before, change, after)
            self.lost[name] = self.lost.get(name, LostUpdates()) + lost
        self._updates = {}

    def _add(self, kind: str, name: str, x: Tensor, scale: float = 1.0) -> None:
        if not x.numel() or not x.is_floating_point() or kind not in self._kinds:
            return
        row = self.rows.setdefault((kind, name), LayerStatistics(kind, name))
        with outside_of_modes():
            row.add(x, scale, kind in self._formats, self._further)


def scale_of(loss_scale: Any) -> float:
    """The number a loss scale of any kind multiplies with."""
    if hasattr(loss_scale, "get_scale"):  # torch.amp.GradScaler
        loss_scale = loss_scale.get_scale()
    elif hasattr(loss_scale, "kind"):  # mprun's
        loss_scale = loss_scale.tensor
    elif callable(loss_scale):
        loss_scale = loss_scale()
    return 1.0 if loss_scale is None else float(loss_scale)


@contextmanager
def statistics(
    model: nn.Module, optimizer: Optimizer | None = None, loss_scale: Any = 1.0
) -> Iterator[Statistics]:
    """Measure every training step inside: `with statistics(model) as measured:`.

    Yields:
        `Statistics(model, optimizer, loss_scale)`, which outlives the region.
    """
    with Statistics(model, optimizer, loss_scale).watching() as measured:
        yield measured


def _floating(tree: Any) -> Iterator[Tensor]:
    return (x for x in tensors_of(tree) if x.is_floating_point())
