"""Every op of a training step, as it runs.

A dispatch mode sees each op below autograd and autocast, casts included. `OpWatcher` is that mode.
It also knows the module and the phase of each op (`StepTracker`). Its subclasses decide what to do
with an op: `OpRecorder` notes dtypes and times, `MemoryRecorder` counts memory, and `nonfinite`
searches for NaN and infinities. For them there is the line of code that ran an op, the range of a
tensor's values, and the same op in float64 (`recomputed`). No dispatch mode sees the ops of a
measurement, so it changes nothing; on CUDA the host waits for the device.
"""

from __future__ import annotations

import functools
import inspect
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mprun
from mprun.precision import Precision, _torch, devices
from mprun.precision.nested import tensors_in
from mprun.precision.policy import dtype_name
from mprun.watch.step_events import Listeners, StepTracker

RunOp = Callable[[], Any]


class OpWatcher(_torch.DispatchMode):
    """Hands each op to `on_op` while it is entered; it may be entered twice."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = StepTracker()
        self._muted = False

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        """Handle the op `func(*args, **kwargs)`: call `run` once and return its result."""
        raise NotImplementedError

    @contextmanager
    def following(
        self, model: nn.Module, *optimizers: Optimizer | None, listeners: Listeners = ()
    ) -> Iterator[None]:
        """A context: know modules of `model`, steps of `optimizers`; notify `listeners`."""
        try:
            with self.tracker.following(model, *optimizers, listeners=listeners):
                yield
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop the data of steps that are done."""

    @contextmanager
    def muted(self) -> Iterator[None]:
        """A context in which ops run without `on_op`."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._muted or _torch.has_zeros(func, args):
            return func(*args, **kwargs)

        def run() -> Any:
            self._muted = True  # ops that a mode below runs in its place are not the model's
            try:
                return func(*args, **kwargs)
            finally:
                self._muted = False

        return self.on_op(func, args, kwargs, run)


class TensorRecord(NamedTuple):
    """A tensor that an op read or made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    memory: tuple[int, int]
    """Storage and number of writes: of two live tensors with the same numbers in it, equal."""
    layout: tuple[int, ...]  # Offset and strides in the storage


@dataclass(frozen=True)
class RecordedOp:
    """One op that ran."""

    name: str  # ATen's, without the overload: `addmm`
    phase: str  # One of `step_events.PHASES`
    module: str  # The path of the module, empty outside of the model
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    began_s: float  # By `time.perf_counter`
    time_s: float
    is_view: bool  # Whether it only gives its input another shape, offset or strides
    call: Any  # The result of the recorder's `call`, after the op

    @property
    def is_cast(self) -> bool:
        """Whether it copies a tensor into another dtype."""
        copies = self.name == "_to_copy" and len(self.inputs) == 1
        return copies and self.inputs[0].dtype != self.outputs[0].dtype


FIX = (
    "make the tensor in the model's dtype (for example torch.zeros(..., dtype=x.dtype)), or take a "
    "mode that casts (precision=bf16_mixed, precision=fp16_mixed)"
)


class OpFault(NamedTuple):
    """An op that raised an error."""

    op: str
    module: str  # Path of the module whose forward pass ran; empty for the root or none
    phase: str
    dtypes: tuple[str, ...]  # Distinct floating dtypes of its inputs, in order

    def __str__(self) -> str:
        of = f" of module {self.module}" if self.module else ""
        inputs = f" with inputs in {' and '.join(self.dtypes)}" if self.dtypes else ""
        fix = f"; {FIX}" if len(self.dtypes) > 1 else ""
        return f"{self.op} in the {self.phase} pass{of}{inputs}{fix}"


class OpRecorder(OpWatcher):
    """Records each op while it is entered, and calls `on_record` after it.

    `call` returns the value of an op's `call`, for example the Python call it belongs to;
    `synchronize` waits for the device.
    """

    def __init__(
        self,
        on_record: Callable[[RecordedOp], None],
        call: Callable[[], Any] = lambda: None,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._on_record = on_record
        self._call = call
        self._synchronize = synchronize
        self._cast_storages: list[Any] = []
        self.fault: OpFault | None = None
        """The last op that raised an error, where one did."""

    def forget(self) -> None:
        self._cast_storages.clear()

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        name, context = _torch.op_name(func), self.tracker.context()
        phase, module = context.phase, context.module or ""
        inputs = tuple(_records((args, kwargs)))
        # Of the kernel and the dispatcher, not of the Python code around it. On CUDA each op is
        # waited for, so times sum to more than a step that overlaps ops
        self._synchronize()
        began = time.perf_counter()
        try:
            result = run()
        except Exception:
            self.fault = OpFault(name, module, phase, floating_dtypes((args, kwargs)))
            raise
        self._synchronize()
        time_s = time.perf_counter() - began
        outputs = tuple(_records(result))
        if not inputs and not outputs:  # a profiler's mark
            return result
        op = RecordedOp(
            name, phase, module, inputs, outputs, began, time_s, _is_view(func), self._call()
        )
        if op.is_cast:  # freed memory would be given out again, and two casts taken for one
            self._cast_storages += [x.untyped_storage() for x in (args[0], result)]
        self._on_record(op)
        return result


def _records(tree: Any) -> Iterator[TensorRecord]:
    for x in tensors_of(tree):
        memory = _torch.storage_key(x), _torch.write_count(x)
        layout = (x.storage_offset(), *x.stride()) if x.layout == torch.strided else ()
        nbytes = x.numel() * x.element_size()
        yield TensorRecord(x.dtype, tuple(x.shape), nbytes, memory, tuple(map(int, layout)))


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The tensors in a structure of arguments or results, in order."""
    return (x for x in _torch.tree_leaves(tree) if isinstance(x, Tensor))


def floating_dtypes(tree: Any) -> tuple[str, ...]:
    """The distinct floating dtypes of the tensors in a structure of arguments, in order."""
    names = (dtype_name(x.dtype) for x in tensors_of(tree) if x.is_floating_point())
    return tuple(dict.fromkeys(names))


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = (r.alias_info for r in _torch.schema_of(func).returns)
    return any(a is not None and not a.is_write for a in aliases)


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
    for frame in _torch.calling_frames():
        code = frame.f_code
        if not is_library(code.co_filename):
            return CodeLine(code.co_filename, frame.f_lineno, code.co_name)
        if _torch.is_backward_call(code) or code.co_filename == LOOP:
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


# ---- the range of a tensor's values --------------------------------------------------------------

REDUCIBLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class ValueRange(NamedTuple):
    """The least and the largest value; both are NaN where any value is."""

    low: float
    high: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def has_nan(self) -> bool:
        return math.isnan(self.low)  # `aminmax` gives NaN for both where any value is


def value_range(x: Tensor) -> ValueRange | None:
    """The range of a floating tensor; None for any other, an empty one, or one without data."""
    values = numbers(x)
    if values is None:
        return None
    with _torch.no_dispatch():
        # One pass over memory, which costs about as much as a ReLU (on one core, 1 million float32:
        # 164 us against 95; float16: 101 against 102). `isfinite(x).all()` takes 18 to 22 times as
        # long
        low, high = torch.ops.aten.aminmax.default(values)
        return ValueRange(low.item(), high.item())


def is_finite(measured: ValueRange | None) -> bool:
    """Whether a tensor of this range has neither NaN nor infinities."""
    return measured is None or measured.finite


def is_plain(x: Tensor) -> bool:
    """Whether it is an ordinary strided tensor of real floating numbers."""
    # The exact types: a subclass (DTensor, torchao's) has its numbers elsewhere
    return type(x) in PLAIN_TYPES and x.dtype in REDUCIBLE and x.layout is torch.strided


def numbers(x: Tensor) -> Tensor | None:
    """The floating numbers of any kind of tensor as a strided one; None where it has none."""
    if is_plain(x):
        return x if x.numel() and x.device.type != "meta" else None
    x = _torch.local_tensor(x)
    has_floats = x.is_floating_point() or x.is_complex()
    if not has_floats or _torch.is_fake(x) or x.device.type == "meta":
        return None
    with _torch.no_dispatch(), torch.no_grad():
        x = _torch.stored_values(x)
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        if x.dtype not in REDUCIBLE:  # 8 bits
            x = x.float()
    return x if x.numel() else None


# ---- an op with its arguments --------------------------------------------------------------------

aten = torch.ops.aten

# Ops that write into a tensor without reading it
OVERWRITES = (aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_)

# Prefixes of ops that do the same to each tensor of lists
LISTWISE = ("_foreach_", "_fused_", "_amp_foreach_")

STATISTICS = ("running_mean", "running_var")

# Arguments with bytes that a forward kernel left for its backward kernel. Their layout is that of
# one dtype and library: oneDNN's LSTM in another dtype writes outside of its memory with them.
WORKSPACES = ("workspace", "reserve", "reserveSpace")

LARGEST = 2**26  # Elements of an op's inputs up to which it is run again: half a GiB in float64


class OpTensor(NamedTuple):
    """A tensor that an op read or made."""

    name: str  # In the op's schema
    tensor: Tensor
    range: ValueRange | None  # None: without floating numbers, or not taken


class OpSpec(NamedTuple):
    """The properties of an op that do not depend on its arguments."""

    makes_numbers: bool
    """Whether its results are inspected: not views, not memory without numbers in it yet."""
    written: tuple[tuple[int, str], ...]  # Position and name of the arguments it writes to
    reads_written: bool  # Whether it reads those as well
    listwise: bool  # Whether it does the same to each tensor of lists
    first_alone: bool  # Whether only the first result matters
    runs_again: bool
    """Whether it gives the same in another dtype: not with random numbers or a workspace."""


@functools.cache
def op_spec(func: Any) -> OpSpec:
    """The spec of an `OpOverload`."""
    arguments, name = _torch.schema_of(func).arguments, _torch.op_name(func)
    updates_statistics = "batch_norm" in name and "backward" not in name
    written = tuple(
        (i, a.name)
        for i, a in enumerate(arguments)
        if (a.alias_info is not None and a.alias_info.is_write)
        or (updates_statistics and a.name in STATISTICS)
    )
    moves = func.is_view or torch.Tag.inplace_view in func.tags
    # Memory that nothing was written to: what it holds is left from freed tensors
    bare = name.startswith(("empty", "new_empty", "_empty", "resize"))
    out = any(argument.is_out for argument in arguments)
    return OpSpec(
        makes_numbers=not (moves or bare),
        written=written,
        reads_written=not (out or func.overloadpacket in OVERWRITES),
        listwise=name.startswith(LISTWISE),
        first_alone=name.startswith("_scaled_dot_product"),  # the others are padded
        runs_again=torch.Tag.nondeterministic_seeded not in func.tags
        and not any(a.name in WORKSPACES for a in arguments),
    )


class OpCall(NamedTuple):
    """An op with its arguments and its result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    before: Mapping[int, ValueRange | None] = {}
    """The ranges of the tensors it wrote to, before it did, by `id`."""
    saved: Mapping[int, Tensor] = {}
    """Copies of those tensors as they were, by `id`; empty where it will not be run again."""

    @property
    def name(self) -> str:
        """ATen's, without the overload."""
        return _torch.op_name(self.func)

    def outputs(self) -> Iterator[tuple[str, Tensor]]:
        """Its results, each with its name."""
        seen, result = set(), self.result
        if op_spec(self.func).first_alone and isinstance(result, tuple | list):
            result = result[:1]
        written = written_arguments(self.func, self.args, self.kwargs)
        for name, value in chain(written, [("result", result)]):
            for x in tensors_in([value]):
                if id(x) not in seen:
                    seen.add(id(x))
                    yield name, x

    def inputs(self) -> list[OpTensor]:
        """The tensors it read; those it wrote to have the range of before."""
        spec = op_spec(self.func)
        unread = set() if spec.reads_written else {name for _, name in spec.written}
        names = (a.name for a in _torch.schema_of(self.func).arguments)
        named = zip(names, self.args, strict=False)
        return [
            OpTensor(name, x, self.before.get(id(x)))
            for name, value in chain(named, self.kwargs.items())
            if name not in unread
            for x in tensors_in([value])
        ]

    def numbers(self) -> Iterator[float]:
        """The floats among its arguments."""
        for value in chain(self.args, self.kwargs.values()):
            items = value if isinstance(value, list | tuple) else (value,)
            yield from (x for x in items if isinstance(x, float))


def written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments an op writes to, with their names."""
    for position, name in op_spec(func).written:
        value = args[position] if position < len(args) else kwargs.get(name)
        if value is not None:
            yield name, value


def _able(device: torch.device, dtype: torch.dtype) -> torch.device:
    """The device, or the CPU where it has no such dtype."""
    able = dtype != torch.float64 or devices.backend(device).float64
    return device if able else devices.CPU


def recomputed(
    call: OpCall, value: Callable[[Tensor], Tensor | None] = lambda x: None
) -> list[Tensor] | None:
    """The results of an op in float64, on the CPU where its device has none, as `call.outputs()`.

    None where it is not possible: the op draws random numbers, reads a workspace of its forward
    kernel, is very large, has no kernel for float64, or overwrote inputs of which no copy exists.
    `value` returns numbers to use in place of a tensor's own, or None.
    """
    spec = op_spec(call.func)
    size = sum(x.numel() for x in tensors_of((call.args, call.kwargs)))
    if not spec.runs_again or size > LARGEST:
        return None
    written = written_arguments(call.func, call.args, call.kwargs)
    targets = {id(x) for x in tensors_in(v for _, v in written)}
    if spec.reads_written and not targets <= call.saved.keys():
        return None
    wide: dict[int, Tensor] = {}

    def widened(x: Any) -> Any:
        if isinstance(x, Tensor):
            if id(x) not in wide:  # one copy for a tensor that is given twice, as in `x.mul_(x)`
                given = value(x)
                source = call.saved.get(id(x), x) if given is None else given
                # indices and masks stay as they are
                to = torch.float64 if x.is_floating_point() else x.dtype
                source = source.to(_able(source.device, to)).to(to)
                # The op would write into the copies of before, or into the tensor itself
                wide[id(x)] = source.clone() if id(x) in targets else source
            return wide[id(x)]
        if isinstance(x, torch.device):
            return _able(x, torch.float64)
        return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

    # softmax's order to make float32 of float16 has no kernel for float64
    names = (a.name for a in _torch.schema_of(call.func).arguments)
    named = zip(names, call.args, strict=False)
    given_args = tuple(False if name == "half_to_float" else x for name, x in named)
    with _torch.no_dispatch(), torch.no_grad():
        try:
            args, kwargs = _torch.tree_map(widened, (given_args, dict(call.kwargs)))
            result = call.func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, MemoryError):  # no kernel, or no room for it
            return None
    return [x for _, x in OpCall(call.func, tuple(args), kwargs, result).outputs()]
