"""Casts of weights that one forward pass repeats, sums and buffers in 16 bits, dtypes by module.

`torch.autocast` casts a float32 weight where an op needs it in 16 bits, and keeps the result for
the next op that does; `CastCounts._reason` lists what it does not keep. A layer that runs in a loop
(a recurrent cell, shared layers) then reads and writes all of its weights each time, and autograd
keeps each copy until the backward pass.

It also measures each `cumsum` with a result in 16 bits against float64, and notes which 16-bit
buffers are written to from when it is made until its findings are asked for.

Casts below autograd are counted, of autocast and of the model's own code, but not inside of what
`torch.compile` made. No bit of a result changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision import _torch
from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW
from mprun.records.console.formatting import size_text

# Why the casts were made again -> what to do
FIXES = {
    "frozen": "autocast keeps casts of trainable weights only: convert frozen ones once, with "
    "module.to(torch.bfloat16)",
    "cache": "take cache_enabled=False out of torch.autocast",
    "view": "autocast keeps no casts of views (weight.t(), a slice): give the weight itself to the "
    "op, as F.linear(x, weight) does",
    "region": "enter torch.autocast once, around the whole forward pass: its casts are dropped "
    "where a region ends",
}
# Of a sum's differences, relative to what is summed (rms); results in 16 bits are within 0.4 %
MAX_SUM_ERROR = 0.02
FLOAT32_SUM = "sum in float32, x.float().cumsum(dim), and subtract before the result is cast back"
FLOAT32_BUFFER = (
    "keep the buffer in float32 (.float() after the model's own cast); cast what is read"
)


@dataclass(frozen=True)
class AuditFinding:
    """One thing that is wrong."""

    kind: str
    """One of `KINDS`."""
    module: str
    """A name of `named_modules()`; empty for the model itself."""
    text: str
    """What is wrong."""
    fix: str
    """What to do, in one line."""


class CastKey(NamedTuple):
    """Casts with the same key make the same numbers."""

    parameter: str
    dtype: torch.dtype
    offset: int  # Of the part of the parameter that is cast, in numbers
    numbers: int


@dataclass(frozen=True)
class RepeatedCast:
    """Weights that were cast several times in one call of the model."""

    parameter: str  # A name of `named_parameters()`
    dtype: torch.dtype  # The dtype they were cast to
    count: int  # How often; of a parameter that is cast in parts, the part with most casts
    nbytes: int  # Bytes that casts after the first read and write
    reason: str  # Why they were cast again: a key of `FIXES`


class CastCounts(_torch.DispatchMode):
    """Counts the casts of a model's parameters while it is entered: around one call of the model.

        with mprun.numerics.CastCounts(model) as casts:
            loss = model(batch)
        loss.backward()
        print(mprun.audit(model, optimizer, casts))

    Args:
        model: on any device; its parameters stay the same while this is used.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = dict(model.named_parameters())
        self._names = {
            _torch.storage_key(_torch.local_tensor(p)): n for n, p in self._parameters.items()
        }
        self._counts: Counter[CastKey] = Counter()
        self._reasons: dict[str, str] = {}
        self._modules = {module: name for name, module in model.named_modules()}
        self._sum = MAX_SUM_ERROR, "", torch.float32
        """The largest error of a cumulative sum in 16 bits, its module and its dtype."""
        low = {name: x for name, x in model.named_buffers() if x.dtype in LOW}
        self._buffers = {n: (x, _torch.write_count(x), x.detach().clone()) for n, x in low.items()}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code stays compiled inside: yes, else its results had other bits."""
        return True

    @contextmanager
    def next_call(self, entries: Sequence[nn.Module]) -> Iterator[None]:
        """A context in which the next call of each of `entries`, and no later one, is counted."""
        watched: set[nn.Module] = set()
        calls: list[nn.Module] = []

        def begin(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():  # its casts are not seen
                return
            if module not in watched and not _torch.in_backward():  # there it is a recomputation
                watched.add(module)
                calls.append(module)
                self.__enter__()

        def end(module: nn.Module, args: Any, outputs: Any) -> None:
            if not torch.compiler.is_compiling() and calls and calls[-1] is module:
                calls.pop()
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        with ExitStack() as stack:
            for module in entries:
                stack.enter_context(module.register_forward_pre_hook(begin, prepend=True))
                # also where `forward` raises: the mode would stay entered
                stack.enter_context(module.register_forward_hook(end, always_call=True))
            yield

    def repeated(self) -> list[RepeatedCast]:
        """The parameters that were cast to a dtype more than once, in the model's order."""
        counts: dict[tuple[str, torch.dtype], int] = {}
        nbytes: Counter[tuple[str, torch.dtype]] = Counter()
        for key, count in self._counts.items():
            which = (key.parameter, key.dtype)
            counts[which] = max(count, counts.get(which, 0))
            # A cast reads the parameter and writes the copy; the first one is needed
            each = self._parameters[key.parameter].element_size() + key.dtype.itemsize
            nbytes[which] += (count - 1) * key.numbers * each
        order = {name: n for n, name in enumerate(self._parameters)}
        return [
            RepeatedCast(name, dtype, count, nbytes[name, dtype], self._reasons[name])
            for (name, dtype), count in sorted(counts.items(), key=lambda x: order[x[0][0]])
            if count > 1
        ]

    def findings(self, model: nn.Module) -> Iterator[AuditFinding]:
        """A finding for each reason and dtype, with the fewest modules of `model` concerned."""
        yield from self._in_16_bits(model)
        among = {self._parameters[key.parameter] for key in self._counts}
        groups: dict[tuple[str, torch.dtype], dict[nn.Parameter, RepeatedCast]] = {}
        for cast in self.repeated():
            held = groups.setdefault((cast.reason, cast.dtype), {})
            held[self._parameters[cast.parameter]] = cast
        for (reason, dtype), casts in groups.items():
            for fewest in fewest_modules(model, {*casts}, among):
                name = _smallest(model, fewest, {*casts})
                rows = [casts[p] for p in model.get_submodule(name).parameters() if p in casts]
                yield AuditFinding("repeated_cast", name, _text(rows, dtype), FIXES[reason])

    def _in_16_bits(self, model: nn.Module) -> Iterator[AuditFinding]:
        """Cumulative sums, and buffers that were replaced or written to since the beginning."""
        error, module, dtype = self._sum
        if error > MAX_SUM_ERROR:
            text = f"differences of neighbours in a cumsum in {dtype_name(dtype)} are off by "
            text += f"{error:.1%} of what is summed (rms)"
            yield AuditFinding("sum_in_16_bits", module, text, FLOAT32_SUM)
        now = dict(model.named_buffers())
        changed = [
            (n, x.dtype)
            for n, (x, count, before) in self._buffers.items()
            # batch norms write to their buffers without counting it
            if now.get(n) is not x or _torch.write_count(x) > count or not torch.equal(x, before)
        ]
        for dtype in LOW:
            if names := [n for n, own in changed if own is dtype]:
                least = torch.finfo(dtype).eps / 4  # half a unit, relative to the number
                text = (
                    f"a step writes {names[0]} ({len(names)} such) in {dtype_name(dtype)}: half a "
                    f"unit is {least:.2%} or more, so an average with momentum 0.999 stands still "
                    f"while it is less than {least / 0.001:.0%} off what it follows"
                )
                module = names[0].rpartition(".")[0]
                yield AuditFinding("buffer_in_16_bits", module, text, FLOAT32_BUFFER)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch.op_name(func) == "_to_copy":
            self._note(args[0], kwargs.get("dtype"))
        result = func(*args, **kwargs)
        if _torch.op_name(func) == "cumsum" and result.dtype in LOW and result.numel() > 1:
            self._note_sum(args[0], args[1], result)
        return result

    def _note_sum(self, x: Tensor, dim: int, sums: Tensor) -> None:
        with _torch.outside_of_modes():
            exact = x.double().narrow(dim, 1, x.shape[dim] - 1)  # the differences of an exact sum
            error = float((sums.double().diff(dim=dim) - exact).norm() / exact.norm())
        if error > self._sum[0]:
            callers = (frame.f_locals.get("self") for frame in _torch.calling_frames())
            names = (self._modules.get(x) for x in callers if isinstance(x, nn.Module))
            self._sum = error, next((x for x in names if x is not None), ""), sums.dtype

    def _note(self, x: Tensor, dtype: torch.dtype | None) -> None:
        local = _torch.local_tensor(x)
        if dtype in (None, x.dtype) or local.layout is not torch.strided:
            return
        name = self._names.get(_torch.storage_key(local))
        if name is not None and dtype is not None:
            self._counts[CastKey(name, dtype, int(local.storage_offset()), local.numel())] += 1
            self._reasons[name] = self._reason(self._parameters[name], x)

    @staticmethod
    def _reason(parameter: nn.Parameter, x: Tensor) -> str:
        # PyTorch's cache has casts of leaves that require gradients, and of whole tensors, alone
        if not parameter.requires_grad:
            return "frozen"
        if not torch.is_autocast_cache_enabled():
            return "cache"
        # It is emptied where the outermost region ends: a region entered again casts again
        return "region" if _torch.viewed(x) is x else "view"


def fewest_modules(
    model: nn.Module, wanted: set[nn.Parameter], among: set[nn.Parameter], prefix: str = ""
) -> Iterator[str]:
    """The names of the fewest modules that have all `wanted` parameters and no others of `among`.

    A module that has both kinds as its own parameters is named too.
    """
    held = among.intersection(model.parameters())
    if not held & wanted:
        return
    own = among.intersection(model.parameters(recurse=False))
    if held <= wanted or own & wanted:
        yield prefix
        return
    for name, child in model.named_children():
        yield from fewest_modules(child, wanted, among, f"{prefix}.{name}" if prefix else name)


def _smallest(model: nn.Module, name: str, wanted: set[nn.Parameter]) -> str:
    """The innermost part of a module that has all of its wanted parameters."""
    module = model.get_submodule(name)
    held = wanted.intersection(module.parameters())
    for child, part in module.named_children():
        if held <= {*part.parameters()}:
            return _smallest(model, f"{name}.{child}" if name else child, wanted)
    return name


def _text(casts: list[RepeatedCast], dtype: torch.dtype) -> str:
    what = casts[0].parameter.rpartition(".")[2] if len(casts) == 1 else f"{len(casts)} parameters"
    are = "is" if len(casts) == 1 else "are"
    upto = "" if len({cast.count for cast in casts}) == 1 else "up to "
    size = sum(cast.nbytes for cast in casts)
    return (
        f"{what} {are} cast to {dtype_name(dtype)} {upto}{max(c.count for c in casts)} times in "
        f"one forward pass; the casts after the first read and write {size_text(size)} each time"
    )


ELSEWHERE = "(not of this model)"
Tensors = Mapping[str, list[Tensor]]  # By the name of the parameter or buffer that they belong to


@dataclass(frozen=True)
class DtypeRow:
    """The numbers of one dtype in a part of a model."""

    role: str  # parameters, gradients, buffers or optimizer state
    dtype: str
    module: str
    """A name of `named_modules()`, with * for numbers where it stands for several; empty for the
    model."""
    modules: int  # How many it stands for
    numbers: int

    def __str__(self) -> str:
        several = f" ({self.modules} modules)" if self.modules > 1 else ""
        where = self.module or "the model"
        return f"{self.role:<16}{self.dtype:<10}{self.numbers:>14,}  {where}{several}"


def dtype_rows(model: nn.Module, optimizer: Optimizer | None) -> tuple[DtypeRow, ...]:
    """Parameters, gradients, buffers and optimizer state by dtype and module."""
    named = dict(model.named_parameters())
    content: dict[str, Tensors] = {
        "parameters": {name: [p] for name, p in named.items()},
        "gradients": {name: [p.grad] for name, p in named.items() if p.grad is not None},
        "buffers": {name: [x] for name, x in model.named_buffers()},
        "optimizer state": _states(named, optimizer),
    }
    return tuple(row for role, tensors in content.items() for row in _rows(role, tensors))


def totals(rows: Iterable[DtypeRow]) -> dict[str, dict[str, int]]:
    """Role to dtype to how many numbers, the most frequent dtype first."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row.role, Counter())[row.dtype] += row.numbers
    return {role: dict(of_role.most_common()) for role, of_role in counts.items()}


def _states(named: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> Tensors:
    """The tensors of an optimizer's state by parameter; single numbers, such as `step`, are not
    counted."""
    names = {p: name for name, p in named.items()}
    tensors: dict[str, list[Tensor]] = {}
    states: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for p, state in states.items():
        held = [x for x in state.values() if isinstance(x, Tensor) and x.dim()]
        if held:
            tensors.setdefault(names.get(p, f"{ELSEWHERE}."), []).extend(held)
    return tensors


def _rows(role: str, tensors: Tensors) -> Iterator[DtypeRow]:
    counts: dict[tuple[str, str], tuple[set[str], int]] = {}
    for module, dtype, numbers in _parts("", tensors):
        # `layers.0.norm` and `layers.1.norm` are one row: parts that differ in a number of the name
        words = ["*" if word.isdigit() else word for word in module.split(".")]
        modules, total = counts.get((".".join(words), dtype), (set(), 0))
        counts[".".join(words), dtype] = (modules | {module}, total + numbers)
    for (pattern, dtype), (modules, numbers) in counts.items():
        where = pattern if len(modules) > 1 else next(iter(modules))
        yield DtypeRow(role, dtype, where, len(modules), numbers)


def _parts(prefix: str, tensors: Tensors) -> Iterator[tuple[str, str, int]]:
    """Module, dtype and count of numbers: one for each largest part of one dtype."""
    counts: Counter[str] = Counter()
    for x in (x for held in tensors.values() for x in held):
        counts[dtype_name(x.dtype)] += x.numel()
    children: dict[str, dict[str, list[Tensor]]] = {}
    own: dict[str, list[Tensor]] = {}
    for name, held in tensors.items():
        child, dot, _ = name.removeprefix(f"{prefix}." if prefix else "").partition(".")
        if dot:
            children.setdefault(child, {})[name] = held
        else:
            own[name] = held
    if len(counts) == 1 or not children:
        yield from ((prefix, dtype, numbers) for dtype, numbers in counts.items())
        return
    if own:
        yield from _parts(prefix, own)
    for child, held_below in children.items():
        yield from _parts(f"{prefix}.{child}" if prefix else child, held_below)
