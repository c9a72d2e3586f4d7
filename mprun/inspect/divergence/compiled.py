"""The boundaries of modules inside compiled code.

`torch.compile` makes kernels of several modules, and hooks that take numbers out would break its
graphs, and so change what is compared. Here the hooks of a module call an op, `mprun::boundary`,
which returns its input and whose backward pass is the same op on the gradient. It is traced with
the model. Before Inductor's first pass each such op is taken out again, and its input is marked. So
all passes see the user's graph. Before code is made, each marked tensor gets a reader: an op that
copies it.

A marked tensor is therefore stored, rounded to its dtype. What reads it inside the same kernel
still gets the kernel's own number, with more digits: a cast that the compiler drops stays dropped,
and is seen at the next boundary. A backend other than Inductor runs the op as it stands.

A reader in the compiled code names a buffer, and the call before it that wrote the buffer is the
kernel. Lines of source are those of the ops between a boundary and the ones before it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from mprun import errors
from mprun.inspect.divergence.boundaries import Boundary, Place, Recording
from mprun.precision import _torch
from mprun.watch.op_watcher import is_library

MARK = "mprun_boundaries"  # In the `meta` of a graph's node
GRADIENT = "gradient at "  # Before the name of a tensor
FRAME = re.compile(r'File "(.+?)", line (\d+)')
READER = re.compile(r"mprun\.note\.default\((?:\w+\()?(\w+)\b.*?'([^']*)'\)")
CALL = re.compile(r"^\s*(?:(\w+) = )?([\w.]+)\(")
VIEW = re.compile(r"\s*(\w+) = reinterpret_tensor\((\w+),")
BUFFER = re.compile(r"\b(?!primals|tangents|arg\d)[a-z]\w*")
OTHERS = ("empty_strided", "assert_", "torch.ops.mprun")  # Calls that are no kernel
aten = torch.ops.aten
# Ops that, where the shape stays, change nothing
SAME = {f"aten.{x}.default" for x in ("view", "_unsafe_view", "alias", "detach", "clone", "expand")}
SAME.add("aten.slice.Tensor")
_taken: dict[str, Tensor] = {}  # What the ops saw, by the name of the tensor


@torch.library.custom_op("mprun::boundary", mutates_args=())
def boundary(x: Tensor, name: str) -> Tensor:
    """Notes a tensor; a copy of it, as an op may not return its input."""
    _taken.setdefault(name, x.detach().clone())
    return x.clone()


# that it writes to `sink` keeps a reader, which returns nothing, from being removed
@torch.library.custom_op("mprun::note", mutates_args=("sink",), tags=[torch.Tag.flexible_layout])
def note(x: Tensor, sink: Tensor, name: str) -> None:
    """Notes a tensor."""
    _taken.setdefault(name, x.detach().clone())


boundary.register_fake(lambda x, name: torch.empty_like(x))
boundary.register_autograd(
    lambda ctx, g: (boundary(g, GRADIENT + ctx.name), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "name", inputs[1]),
)


def named(place: Place, what: str, number: int) -> str:
    """The name of a tensor at a boundary; `what` is input or output."""
    return f"{place[0]}|{place[1]}|{what}|{number}"


BOUNDARY, NOTE = torch.ops.mprun.boundary.default, torch.ops.mprun.note.default


class CompiledBoundaries:
    """What one step of compiled code has at the boundaries of a model's modules."""

    def __init__(self, rounds_as_eager: bool = False) -> None:
        self._rounds_as_eager = rounds_as_eager
        self._lines: dict[str, str] = {}
        self._codes: list[str] = []
        self._calls: Counter[str] = Counter()

    @contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        """Inside, compiled code of the model is made anew, with readers in it."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                self._calls[path] = 0
                before, after = self._hooks(path)
                if module is model:  # its hooks would be compiled apart from its code
                    stack.enter_context(_around_forward(model, before, after))
                    continue
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            passes = (self._mark, self._add_readers, self._codes.append)
            stack.enter_context(_torch.compiled_anew(*passes, self._rounds_as_eager))
            stack.callback(_taken.clear)
            yield

    def _hooks(self, path: str) -> tuple[Any, Any]:
        calls = self._calls

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # an op in place must reach the caller's tensor, not a copy
            is_copied = not getattr(module, "inplace", False)
            return _marked((args, kwargs), f"{path}|{calls[path]}|input") if is_copied else None

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            calls[path] += 1
            return _marked(output, f"{path}|{calls[path] - 1}|output")

        return before, after

    @staticmethod
    def _mark(graph: Any) -> None:
        """Take the ops out of a graph, and mark their inputs."""
        own = [x for x in graph.nodes if x.target is BOUNDARY]
        if len(own) == sum(x.op not in ("placeholder", "output") for x in graph.nodes):
            return  # hooks alone: no code would be made of a graph without ops
        for node in own:
            x, name = node.args
            node.replace_all_uses_with(x)
            graph.erase_node(node)
            shape = x.meta["val"].shape
            while str(x.target) in SAME and x.args[0].meta["val"].shape == shape:
                x = x.args[0]  # Inductor removes an op that changes nothing
            x.meta[MARK] = (*x.meta.get(MARK, ()), (name, shape))

    def _add_readers(self, graph: Any) -> None:
        *nodes, end = graph.nodes
        for node in nodes:
            for name, shape in node.meta.get(MARK, ()):
                value = node.meta["val"]
                # a pass may have handed the mark on to another node
                if not isinstance(value, Tensor) or value.shape != shape or name in self._lines:
                    continue  # or the backward graph is given what the forward one made
                self._lines[name] = _lines(node)
                kind = {"dtype": torch.uint8, "device": value.device}
                with graph.inserting_before(end):
                    sink = graph.call_function(aten.empty.memory_format, ([1],), kind)
                    reader = graph.call_function(NOTE, (node, sink, name))
                sink.meta["val"], reader.meta["val"] = value.new_empty(1, dtype=torch.uint8), None

    def kernels(self) -> dict[str, tuple[str, str]]:
        """The kernel and the lines of source of each tensor that was read."""
        known = {name: kernel for code in self._codes for name, kernel in _kernels(code)}
        return {name: (known.get(name, ""), lines) for name, lines in self._lines.items()}

    @staticmethod
    def seen(eager: Recording) -> dict[Place, Boundary]:
        """The calls of an eager step that this one has as well, with its own numbers."""
        own = {place: _with_noted(x) for place, x in eager.boundaries.items()}
        return {place: x for place, x in own.items() if x is not None}


@contextmanager
def _around_forward(model: nn.Module, before: Any, after: Any) -> Iterator[None]:
    """Inside, the forward of a model calls these hooks."""
    own, given = vars(model).get("forward"), model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(model, args, kwargs) or (args, kwargs)
        return after(model, args, given(*args, **kwargs))

    vars(model)["forward"] = forward
    try:
        yield
    finally:
        del vars(model)["forward"]
        vars(model).update({} if own is None else {"forward": own})


def _marked(value: Any, name: str) -> Any:
    numbers = count()

    def mark(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        own = f"{name}|{next(numbers)}"
        # the model may differentiate by a parameter, and a copy would be no part of the graph
        is_copied = not isinstance(x, nn.Parameter) and x.layout == torch.strided
        return boundary(x, own) if is_copied else x

    return _torch.tree_map(mark, value)  # PyTorch's, which its compiler traces


def _with_noted(eager: Boundary) -> Boundary | None:
    """A boundary with the compiled code's numbers; None where one is missing."""

    def noted(what: str, like: Mapping[int, Tensor], first: str = "") -> dict[int, Tensor]:
        found = {n: _taken.get(first + named(eager.place, what, n)) for n in like}
        return {n: x for n, x in found.items() if x is not None and x.shape == like[n].shape}

    inputs, outputs = (dict(enumerate(x)) for x in (eager.inputs, eager.outputs))
    own, made = noted("input", inputs), noted("output", outputs)
    if own.keys() != inputs.keys() or made.keys() != outputs.keys():
        return None
    new = replace(eager, inputs=[*own.values()], outputs=[*made.values()])
    new.input_gradients = noted("input", eager.input_gradients, GRADIENT)
    new.output_gradients = noted("output", eager.output_gradients, GRADIENT)
    return new


def _lines(node: Any) -> str:
    """The lines of the ops that a node is made of, back to the boundaries before it."""
    places, nodes = set[tuple[str, int]](), [node]
    for here in nodes:  # grows
        frames = FRAME.findall(here.meta.get("stack_trace") or "")
        places.update([(f, int(line)) for f, line in frames if not is_library(f)][-1:])
        nodes += [x for x in here.all_input_nodes if x not in nodes and MARK not in x.meta]
    return ", ".join(str(errors.Place(*place)) for place in sorted(places))


def _kernels(code: str) -> Iterator[tuple[str, str]]:
    """The tensors that output code reads, each with the kernel that wrote it."""
    writers: dict[str, str] = {}
    for line in code.splitlines():
        reader, view, call = READER.search(line), VIEW.match(line), CALL.match(line)
        if reader is not None:
            yield reader[2], writers.get(reader[1], "")
        elif view is not None and view[2] in writers:
            writers[view[1]] = writers[view[2]]
        elif call is not None and not call[2].startswith(OTHERS):
            # the first call with a buffer writes it, later ones read it
            for buffer in [call[1]] if call[1] else BUFFER.findall(line):
                writers.setdefault(buffer, call[2].removesuffix(".run"))
