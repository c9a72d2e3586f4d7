"""Finds the op of a step that made a number that is not finite, and what that number spoiled.

`NonfiniteWatcher` sees each op below autograd and autocast, casts included. An op that makes a NaN
or an infinity out of finite numbers is its origin. A result of inputs that are not finite has the
inputs' origins: so a gradient that is NaN leads to the op where it began. There are exceptions:

    constants   an infinity among the op's own numbers, as in `masked_fill(mask, -inf)`: the program
                wrote it. A NaN made of constants alone (a row that is masked whole) is a new origin
    outside     inputs that were not finite before the first op: the data, a weight

The op, run again in float64, tells a number that was too large for its dtype from one that is not
finite in any precision. Optimizers write to parameters unseen: `StateCheck` checks what outlasts a
step after it. Compiled regions run op by op.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision import _torch
from mprun.precision.nested import tensors_in
from mprun.precision.policy import dtype_name
from mprun.watch.nonfinite.fp_exception import UNSEEN, FpException, TensorStats
from mprun.watch.op_watcher import (
    PLAIN_TYPES,
    CodeLine,
    OpCall,
    OpTensor,
    OpWatcher,
    RunOp,
    ValueRange,
    current_line,
    is_finite,
    numbers,
    op_spec,
    recomputed,
    value_range,
    written_arguments,
)

COMPILED = "compiled regions run op by op while each op is inspected for floating-point exceptions"
DESCRIBED = 16  # Inputs of one op that are described: an op over lists has one for each parameter
# Ops that make 0 of an infinity and seldom mean it; `tanh`, `exp` and masks do mean it
DIVISIONS = ("div", "addcdiv", "reciprocal", "rsqrt")


def stats(name: str, x: Tensor, known: ValueRange | None = None) -> TensorStats:
    """The statistics of a tensor; `known` is an earlier range of it, if it was written to since."""
    bare = TensorStats(name, dtype_name(x.dtype), tuple(map(int, x.shape)))
    measured = known or value_range(x)
    if measured is None:
        return bare
    if measured.finite:
        return replace(bare, low=measured.low, high=measured.high, nan=0, inf=0)
    if known is not None:  # the numbers are gone
        return bare
    values = numbers(x)
    assert values is not None
    with _torch.no_dispatch(), torch.no_grad():
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        low, high = value_range(values[torch.isfinite(values)]) or (None, None)
    return replace(bare, low=low, high=high, nan=nan, inf=inf)


# ---- origins -------------------------------------------------------------------------------------


class OpSite(NamedTuple):
    """Where an op runs."""

    phase: str
    module: str  # Empty for the model itself, and outside of it
    in_model: bool
    line: CodeLine | None = None


@dataclass(eq=False)
class Origin:
    """An op that made numbers that are not finite, or another source of them."""

    exception: FpException
    reached: dict[str, None] = field(default_factory=dict)
    """The values it spoiled that outlast the step, in order."""
    divided_by: str | None = None  # The first op that divides by its infinity
    lasts: bool = False  # Whether what it spoiled outlasts a skipped step, too

    @property
    def deliberate(self) -> bool:
        """Whether the program wrote it, or it existed before: a fault if it reaches a result."""
        return self.exception.kind in ("constant", "outside")


Origins = frozenset[Origin]


def mark_reached(origins: Iterable[Origin], what: str) -> None:
    """Note that these origins spoiled `what`: a gradient, the loss.

    A mask is not blamed if there is also a fault or an infinity from outside.
    """
    every = list(origins)
    faults = [x for x in every if not x.deliberate]
    outside = [x for x in every if x.exception.kind == "outside"]
    for origin in faults or outside or every:  # constants are blamed last
        origin.reached[what] = None


def _storage_of(x: Tensor) -> Tensor:
    """A tensor on the storage with the numbers of `x`: of a sparse one, its values."""
    values = numbers(x)
    return x if values is None else values


def memory_key(x: Tensor) -> int:
    """A key of the storage with a tensor's numbers, the same for its views."""
    return _torch.storage_key(_storage_of(x))


class NonfiniteWatcher(OpWatcher):
    """Inspects each op that makes numbers, while it is entered.

    Args:
        model: whose modules are named.
        name: returns the name of a tensor that existed before the first op, None if it has none.
        on_scaler_check: is called before a loss scaler checks the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        name: Callable[[Tensor], str | None],
        on_scaler_check: Callable[[], None],
    ) -> None:
        super().__init__()
        self.scaler_overflowed = False
        """Whether a loss scaler reported an overflow in this step's gradients."""
        self.loss_scale: float | None = None
        """The loss scale by which the scaler divided the gradients."""
        self.kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        """The class of each module."""
        self.origins: list[Origin] = []
        """Those of this step, in order."""
        self._spoiled: dict[int, tuple[_torch.StorageWeakRef, Origins]] = {}
        """Storage to the origins of what is not finite in it."""
        self._name, self._on_scaler_check = name, on_scaler_check
        self._lines: dict[int, CodeLine | None] = {}
        """Autograd node to the line of its forward op."""
        self._step = 0
        self._went_backward = False

    def begin_step(self, step: int) -> None:
        """Step number `step` begins: the autograd graphs of the last one are gone."""
        self._step, self.origins, self._went_backward = step, [], False
        self.scaler_overflowed, self.loss_scale = False, None
        self._lines.clear()
        self.tracker.forget_graph()
        # What is left belongs to weights and state: steps before have reported these.
        self._spoiled = {k: known for k, known in self._spoiled.items() if not known[0].expired()}

    def origins_of(self, x: Tensor) -> Origins:
        """The origins of a tensor that is not finite; empty where none is known."""
        known = self._spoiled.get(memory_key(x))
        return frozenset() if known is None else known[1]

    def spoil(self, x: Tensor, origins: Origins) -> None:
        """Add origins to those of a tensor."""
        # The reference holds the key, which no other storage can get then, but not the memory
        reference = _torch.StorageWeakRef(_storage_of(x).untyped_storage())
        self._spoiled[memory_key(x)] = (reference, self.origins_of(x) | origins)

    def add(
        self,
        kind: str,
        op: str,
        site: OpSite,
        inputs: Iterable[TensorStats],
        outputs: Iterable[TensorStats],
        exact: TensorStats | None = None,
        reason: str | None = None,
    ) -> Origin:
        """A new origin of this step; the arguments are fields of `FpException`."""
        exception = FpException(
            verdict="absorbed",  # until its consequences are known
            kind=kind,
            step=self._step,
            last_step=self._step,
            op=op,
            phase=site.phase,
            module=site.module,
            module_kind=self.kinds.get(site.module, "") if site.in_model else "",
            location=site.line and str(site.line),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            in_float64=exact,
            reason=reason,
        )
        self.origins.append(origin := Origin(exception))
        return origin

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        if self.tracker.context().phase == "optimizer":
            return run()
        site, spec = self._site(), op_spec(func)
        if func is _torch.SCALER_CHECK:
            self._on_scaler_check()
        targets = list(tensors_in(v for _, v in written_arguments(func, args, kwargs)))
        before = {id(x): value_range(x) for x in targets}
        saved: dict[int, Tensor] = {}
        # Ops over lists are not run again: they would need a copy of all parameters.
        if spec.reads_written and not spec.listwise and spec.runs_again:
            with _torch.no_dispatch(), torch.no_grad():
                saved = {id(x): x.clone() for x in targets if type(x) in PLAIN_TYPES}
        result = run()
        if spec.makes_numbers:
            self._inspect(OpCall(func, args, kwargs, result, before, saved), site)
        if func is _torch.SCALER_CHECK:
            self.scaler_overflowed |= bool(args[1].item())
            self.loss_scale = 1 / args[2].item()  # the op multiplies by the inverse
        return result

    def _site(self) -> OpSite:
        phase, module = self.tracker.context()
        line = current_line()
        if phase == "backward":
            line = line or self._lines.get(_torch.backward_node() or 0)
        else:  # for the backward op of the node that was just made
            self._lines.setdefault(_torch.next_node() - 1, line)
        return OpSite(phase, module or "", module is not None, line)

    def _inspect(self, call: OpCall, site: OpSite) -> None:
        results = [OpTensor(name, x, value_range(x)) for name, x in call.outputs()]
        if not all(is_finite(result.range) for result in results):
            self._add_bad(call, site, results)
        elif self._spoiled and site.phase != "backward" and _divides(call):
            self._note_division(call, site)
        if site.phase in ("forward", "backward"):
            self._went_backward = site.phase == "backward"

    def _add_bad(self, call: OpCall, site: OpSite, results: list[OpTensor]) -> None:
        origins = self._origins(call, site, results)
        after = "a scalar computed after the backward pass"
        for _, x, measured in results:
            if is_finite(measured):
                continue
            self.spoil(x, origins)
            # A scalar outside of the model is the loss, or computed from it
            if site.phase == "other" and x.numel() == 1:
                mark_reached(origins, after if self._went_backward else "the loss")

    def _origins(self, call: OpCall, site: OpSite, results: list[OpTensor]) -> Origins:
        """The origins of an op's results that are not finite: its inputs' or the op itself."""
        origins: set[Origin] = set()
        was_nan = False
        for name, x, known in call.inputs():
            given = known or value_range(x)
            if given is not None and not given.finite:
                origins |= self.origins_of(x) or {self._from_outside(call, site, name, x)}
                was_nan |= given.has_nan
        constants = all(origin.exception.kind == "constant" for origin in origins)
        # A softmax of a row that is masked whole: its NaN is no consequence that the program meant
        makes_nan = not was_nan and any(result.range.has_nan for result in results if result.range)
        if origins and not (constants and makes_nan):
            return frozenset(origins)
        # An infinity among the arguments: what the program wrote needs no float64
        written = not origins and not all(map(isfinite, call.numbers()))
        return frozenset({self._new_origin(call, site, results, written)})

    def _new_origin(
        self, call: OpCall, site: OpSite, results: list[OpTensor], written: bool
    ) -> Origin:
        bad = [n for n, result in enumerate(results) if not is_finite(result.range)]
        every = None if written else recomputed(call)
        exact = None if every is None else stats(results[bad[0]].name, every[bad[0]])
        kind = "constant" if written else kind_of(results[bad[0]].range, exact)
        made = (stats(results[n].name, results[n].tensor) for n in bad)
        return self.add(kind, call.name, site, _read_by(call), made, exact)

    def _from_outside(self, call: OpCall, site: OpSite, name: str, x: Tensor) -> Origin:
        label = self._name(x) or f"a tensor ({name} of {call.name})"
        origin = self.add("outside", call.name, site, _read_by(call), [stats(label, x)])
        self.spoil(x, frozenset({origin}))
        return origin

    def _note_division(self, call: OpCall, site: OpSite) -> None:
        """Its result is finite: if it divides by an infinity that overflowed, it is wrong."""
        inside = f" in {site.module}" if site.module else ""
        for _, x, known in call.inputs():
            if is_finite(known or value_range(x)):
                continue
            for origin in self.origins_of(x):
                if origin.exception.kind == "overflow" and origin.divided_by is None:
                    origin.divided_by = f"{call.name}{inside}, {site.phase}"


def _read_by(call: OpCall) -> Iterator[TensorStats]:
    return (stats(*x) for x in call.inputs()[:DESCRIBED])


def kind_of(measured: ValueRange | None, exact: TensorStats | None = None) -> str:
    """overflow, infinite or invalid, by the result in float64 if that is known."""
    if exact is not None:
        return "invalid" if exact.nan else "infinite" if exact.inf else "overflow"
    return "invalid" if measured is not None and measured.has_nan else "overflow"


def _divides(call: OpCall) -> bool:
    """Whether an op divides, `x ** -2` included."""
    name = call.name.strip("_")
    negative = any(isinstance(x, int | float) and x < 0 for x in call.args)
    return name in DIVISIONS or (name == "pow" and negative)


# ---- what outlasts a step ------------------------------------------------------------------------


class StateTensor(NamedTuple):
    """A tensor that outlasts a step."""

    label: str  # Its name in reports: `parameter fc1.weight`, `exp_avg of fc1.weight`
    owner: str  # The name of its parameter, or its own
    tensor: Tensor


class StateCheck:
    """Checks the tensors of a model and its optimizers, if it is trained, that outlast a step.

    The watcher knows the origins, and receives new ones.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        watcher: NonfiniteWatcher,
    ) -> None:
        self._model, self._optimizers, self._watcher = model, optimizers, watcher
        self._inputs: list[weakref.ref[Tensor]] = []  # weak: batches are the loop's
        self._labels: list[tuple[Tensor, str]] = []
        self._of_gradients: dict[str, Origins] = {}
        """Parameter to the origins of its gradient, if that is not finite in this step."""
        self._bad = {x.label for x in self._items() if not is_finite(value_range(x.tensor))}

    def begin_step(self) -> None:
        """A step begins."""
        for of_step in (self._of_gradients, self._inputs, self._labels):
            of_step.clear()

    def label(self, x: Tensor, name: str) -> None:
        """Call a tensor `name` in this step's reports; it stays in memory until the next step."""
        self._labels.append((x, name))

    def inputs(self, tensors: Iterable[Tensor]) -> None:
        """The model is called with these."""
        self._inputs += map(weakref.ref, tensors)

    def name_of(self, x: Tensor) -> str | None:
        """The name of a tensor: parameter, buffer, gradient, the model's input."""
        key = memory_key(x)
        named = [(item.tensor, item.label) for item in (*self._items(), *self._gradients())]
        named += [(given, "the model's input") for given in self._live_inputs()]
        return next((name for x, name in (*self._labels, *named) if memory_key(x) == key), None)

    def check_gradients(self) -> None:
        """Check the gradients before they are unscaled, clipped or used."""
        for item in self._gradients():
            if is_finite(measured := value_range(item.tensor)):
                continue
            origins = self._watcher.origins_of(item.tensor)
            origins = origins or self._unseen(item, "backward", kind_of(measured), UNSEEN)
            mark_reached(origins, item.label)
            self._of_gradients[item.owner] = origins

    def check_after_step(self) -> None:
        """Check the tensors that the step wrote; those that were bad before are not reported."""
        bad = set()
        by_optimizer: dict[str, Origins] = {}
        for item in self._items():
            if is_finite(measured := value_range(item.tensor)):
                continue
            bad.add(item.label)
            if item.label not in self._bad:  # else reported by an earlier step, or a mask
                origins = (
                    self._watcher.origins_of(item.tensor)
                    or self._of_gradients.get(item.owner)
                    # clipping divides by the norm of all gradients, and so spoils each of them
                    or frozenset[Origin]().union(*self._of_gradients.values())
                    or by_optimizer.get(item.owner)  # what spoiled a parameter spoils its state
                    or self._by_optimizer(item, kind_of(measured))
                )
                by_optimizer[item.owner] = origins
                self._watcher.spoil(item.tensor, origins)
                mark_reached(origins, item.label)
                for origin in origins:
                    origin.lasts = True
        self._bad = bad

    def _by_optimizer(self, item: StateTensor, kind: str) -> Origins:
        """The origin of numbers that an optimizer wrote, although the gradients are finite."""
        owner = dict(self._parameters()).get(item.owner)
        held = [
            (optimizer, owner, group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if owner is not None and any(p is owner for p in group["params"])
        ]
        optimizer = held[0][0] if held else next(iter(self._optimizers), None)
        reason = next((text for row in held if (text := _eps_reason(*row))), None)
        if reason is not None and kind == "overflow":
            kind = "infinite"  # a division by 0, in any precision
        return self._unseen(item, "optimizer", kind, f"{type(optimizer).__name__}.step", reason)

    def _unseen(
        self, item: StateTensor, phase: str, kind: str, op: str, reason: str | None = None
    ) -> Origins:
        """The origin of numbers that no op of PyTorch wrote where it was watched."""
        of_owner = [x for x in self._items() if x.owner == item.owner and x.label != item.label]
        gradients = [g for g in self._gradients() if g.owner == item.owner and phase != "backward"]
        read = (stats(x.label, x.tensor) for x in gradients)
        made = (stats(x.label, x.tensor) for x in (item, *of_owner))
        site = OpSite(phase, item.owner.rpartition(".")[0], in_model=True)
        return frozenset({self._watcher.add(kind, op, site, read, made, reason=reason)})

    def _gradients(self) -> Iterator[StateTensor]:
        for name, p in self._parameters():
            if p.grad is not None:
                yield StateTensor(f"gradient of {name}", name, p.grad)
        for x in self._live_inputs():
            if x.is_leaf and x.grad is not None:
                yield StateTensor("gradient of the model's input", "", x.grad)

    def _live_inputs(self) -> Iterator[Tensor]:
        """The model's inputs in this step that are still alive."""
        yield from (x for ref in self._inputs if (x := ref()) is not None)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the model, and those that only the optimizers have."""
        named: dict[str, Any] = dict(self._model.named_parameters())
        yield from named.items()
        known = {id(p) for p in named.values()}
        for g, group in enumerate(g for x in self._optimizers for g in x.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in known:
                    yield f"parameter {i} of group {g}", p

    def _items(self) -> Iterator[StateTensor]:
        for name, p in self._parameters():
            yield StateTensor(f"parameter {name}", name, p)
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        yield StateTensor(f"{key} of {name}", name, value)
        for name, buffer in self._model.named_buffers():
            yield StateTensor(f"buffer {name}", name, buffer)


def _eps_reason(optimizer: Optimizer, p: Tensor, group: dict[str, Any]) -> str | None:
    """Why an optimizer divided by 0: a moment is 0, and its `eps` is 0 in the parameter's dtype."""
    eps = group.get("eps")
    if not isinstance(eps, float) or not eps > 0 == float(torch.tensor(eps, dtype=p.dtype)):
        return None
    # A quotient by sqrt(moment) + eps, of which both are 0
    bad = ~torch.isfinite(p.detach())
    state = optimizer.state.get(p, {}).values()
    moments = [x for x in state if isinstance(x, Tensor) and x.shape == p.shape]
    if not any(bool((bad & (x == 0)).any()) for x in moments):
        return None
    return f"the optimizer's eps={eps:g} is 0 in {dtype_name(p.dtype)}"
