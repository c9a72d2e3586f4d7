"""The mode that sees each op of a step, and finds those that made a number that is not finite.

An op that makes a NaN or an infinity out of finite numbers is its origin. A result of inputs that
are not finite has the inputs' origins: so a gradient that is NaN leads to the op where the problem
began. There are two exceptions:

    constants   an infinity among the op's own numbers, as in `masked_fill(mask, -inf)`: the program
                wrote it
    outside     inputs that were not finite before the first op: the data, a weight

A NaN made of constants alone, as by the softmax of a row that is masked whole, is a new origin.

The kind is decided by running the op again in float64: a number that is finite there was too large
for the dtype; one that is infinite or NaN there too is so in any precision.

The mode sees an op below autograd and autocast, casts included. It does not see the ops that
emulated or substituted arithmetic runs instead, and looks at none of an optimizer, whose results
`StateCheck` checks after the step. While it is entered, PyTorch runs compiled regions op by op.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mprun
from mprun.precision import Precision
from mprun.precision._torch import (
    SCALER_CHECK,
    StorageWeakRef,
    backward_node,
    calling_frames,
    is_backward_call,
    next_node,
    no_dispatch,
    storage_key,
)
from mprun.precision.nested import tensors_in
from mprun.watch.nonfinite.fp_exception import FpException, TensorStats
from mprun.watch.nonfinite.op_call import (
    PLAIN_TYPES,
    OpCall,
    ValueRange,
    is_finite,
    numbers,
    op_spec,
    recomputed,
    stats,
    value_range,
    written_arguments,
)
from mprun.watch.op_watcher import OpWatcher, RunOp

COMPILED = "compiled regions run op by op while each op is inspected for floating-point exceptions"
DESCRIBED = 16  # Inputs of one op that are described: an op over lists has one for each parameter
# Ops that make 0 of an infinity and seldom mean it; `tanh`, `exp` and masks do mean it
DIVISIONS = ("div", "addcdiv", "reciprocal", "rsqrt")


# ---- the line of code ----------------------------------------------------------------------------

TORCH = Path(torch.__file__).parent
MPRUN = Path(mprun.__file__).parent
RECIPES = MPRUN / "recipes"
PYTHON = Path(sysconfig.get_path("stdlib"))
# Installed packages lie inside of Python's library, and are the user's code.
PACKAGES = (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")))
INTERACTIVE = ("<stdin>", "<ipython")  # Other names in <> are code that a library generated
# The code that calls a model in mprun's loop: no caller of it is the user's code
LOOP = inspect.getfile(Precision)


class CodeLine(NamedTuple):
    """A line of code."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.number} ({self.function})"


def current_line() -> CodeLine | None:
    """The line of code that runs the caller's op; None if only libraries are on the stack."""
    for frame in calling_frames():
        code = frame.f_code
        if not is_library(code.co_filename):
            return CodeLine(code.co_filename, frame.f_lineno, code.co_name)
        if is_backward_call(code) or code.co_filename == LOOP:
            return None  # callers of `backward` or of mprun's loop did not write this op
    return None


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file of code belongs to PyTorch, mprun or Python, and is no recipe."""
    if file.startswith("<"):
        return not file.startswith(INTERACTIVE)
    path = Path(file)
    if path.is_relative_to(TORCH) or path.is_relative_to(MPRUN):
        return not path.is_relative_to(RECIPES)
    return path.is_relative_to(PYTHON) and not any(map(path.is_relative_to, PACKAGES))


# ---- origins -------------------------------------------------------------------------------------


class OpSite(NamedTuple):
    """Where an op runs."""

    phase: str
    module: str
    module_kind: str
    line: CodeLine | None


class OpResult(NamedTuple):
    """A result of an op, or an input that was not finite before."""

    name: str
    tensor: Tensor
    range: ValueRange | None
    position: int = 0  # Its index among all results


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
    return storage_key(_storage_of(x))


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
        self._spoiled: dict[int, tuple[StorageWeakRef, Origins]] = {}
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
        reference = StorageWeakRef(_storage_of(x).untyped_storage())
        self._spoiled[memory_key(x)] = (reference, self.origins_of(x) | origins)

    def add(self, exception: FpException) -> Origin:
        """A new origin of this step."""
        self.origins.append(origin := Origin(exception))
        return origin

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        if self.tracker.context().phase == "optimizer":
            return run()
        site, spec = self._site(), op_spec(func)
        if func is SCALER_CHECK:
            self._on_scaler_check()
        targets = list(tensors_in(v for _, v in written_arguments(func, args, kwargs)))
        before = {id(x): value_range(x) for x in targets}
        saved: dict[int, Tensor] = {}
        # Ops over lists are not run again: they would need a copy of all parameters.
        if spec.reads_written and not spec.listwise and spec.runs_again:
            with no_dispatch(), torch.no_grad():
                saved = {id(x): x.clone() for x in targets if type(x) in PLAIN_TYPES}
        result = run()
        if spec.makes_numbers:
            self._inspect(OpCall(func, args, kwargs, result, before, saved), site)
        if func is SCALER_CHECK:
            self.scaler_overflowed |= bool(args[1].item())
            self.loss_scale = 1 / args[2].item()  # the op multiplies by the inverse
        return result

    def _site(self) -> OpSite:
        phase, module = self.tracker.context()
        line = current_line()
        if phase == "backward":
            line = line or self._lines.get(backward_node() or 0)
        else:  # for the backward op of the node that was just made
            self._lines.setdefault(next_node() - 1, line)
        kind = "" if module is None else self.kinds.get(module, "")
        return OpSite(phase, module or "", kind, line)

    def _inspect(self, call: OpCall, site: OpSite) -> None:
        outputs = enumerate(call.outputs())
        results = [OpResult(name, x, value_range(x), n) for n, (name, _, x) in outputs]
        bad = [result for result in results if not is_finite(result.range)]
        if bad:
            self._add_bad(call, site, bad)
        elif self._spoiled and site.phase != "backward" and _divides(call):
            self._note_division(call, site)
        if site.phase in ("forward", "backward"):
            self._went_backward = site.phase == "backward"

    def _add_bad(self, call: OpCall, site: OpSite, bad: list[OpResult]) -> None:
        origins = self._origins(call, site, bad)
        after = "a scalar computed after the backward pass"
        for result in bad:
            self.spoil(result.tensor, origins)
            # A scalar outside of the model is the loss, or computed from it
            if site.phase == "other" and result.tensor.numel() == 1:
                mark_reached(origins, after if self._went_backward else "the loss")

    def _origins(self, call: OpCall, site: OpSite, bad: list[OpResult]) -> Origins:
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
        makes_nan = not was_nan and any(result.range.has_nan for result in bad if result.range)
        if origins and not (constants and makes_nan):
            return frozenset(origins)
        # An infinity among the arguments: what the program wrote needs no float64
        written = not origins and not all(map(isfinite, call.numbers()))
        exact = None if written else recomputed(call)
        first = None if exact is None else exact[bad[0].position]
        kind = "constant" if written else None
        return frozenset({self.add(self._described(call, site, bad, kind, first))})

    def _from_outside(self, call: OpCall, site: OpSite, name: str, x: Tensor) -> Origin:
        label = self._name(x) or f"a tensor ({name} of {call.name})"
        read = [OpResult(label, x, value_range(x))]
        origin = self.add(self._described(call, site, read, "outside", None))
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

    def _described(
        self,
        call: OpCall,
        site: OpSite,
        bad: Sequence[OpResult],
        kind: str | None,
        exact: Tensor | None,
    ) -> FpException:
        """The exception that an op raised.

        Args:
            call, site: the op, and where it ran.
            bad: its results that are not finite, or the input that is not; the first one decides.
            kind: what happened, or None to decide here.
            exact: the first of `bad` in float64; None if that is not known.
        """
        known = None if exact is None else stats(bad[0].name, exact)
        return FpException(
            verdict="absorbed",  # until its consequences are known
            kind=kind or kind_of(bad[0].range, known),
            step=self._step,
            last_step=self._step,
            op=call.name,
            phase=site.phase,
            module=site.module,
            module_kind=site.module_kind,
            location=site.line and str(site.line),
            inputs=tuple(stats(*x) for x in call.inputs()[:DESCRIBED]),
            outputs=tuple(stats(result.name, result.tensor) for result in bad),
            in_float64=known,
        )


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
