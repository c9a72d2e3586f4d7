"""The mode that reports each op with its tensors, its module, its phase and its line of code.

It sees an op below autograd and autocast, casts included. It does not see the ops that emulated or
substituted arithmetic runs instead. While it is entered, PyTorch runs compiled regions op by op.

The line is that of the innermost stack frame that belongs neither to PyTorch, nor to mprun, nor to
Python's own library. Recipes are the user's code, mprun's own among them.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mprun
from mprun._torch import (
    SCALER_CHECK,
    backward_node,
    calling_frames,
    is_backward_call,
    next_node,
    no_dispatch,
)
from mprun.nested import tensors_in
from mprun.numerics.nonfinite.op_call import (
    PLAIN_TYPES,
    OpCall,
    op_spec,
    value_range,
    written_arguments,
)
from mprun.numerics.op_watcher import OpWatcher, RunOp
from mprun.precision import Precision

COMPILED = "compiled regions run op by op while each op is inspected for floating-point exceptions"

TORCH = Path(torch.__file__).parent
MPRUN = Path(mprun.__file__).parent
RECIPES = MPRUN / "recipes"
PYTHON = Path(sysconfig.get_path("stdlib"))
PACKAGES = (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")))
INTERACTIVE = ("<stdin>", "<ipython")
LOOP = inspect.getfile(Precision)
"""The code that calls a model in mprun's loop: no caller of it is the user's code."""


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


class OpSite(NamedTuple):
    """Where an op runs."""

    phase: str
    module: str
    module_kind: str
    line: CodeLine | None


class NonfiniteWatcher(OpWatcher):
    """Calls `inspect` with each op that makes numbers, and where it ran, while it is entered.

    Args:
        model: whose modules are named.
        inspect: gets each op.
        on_scaler_check: is called before a loss scaler checks the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        inspect: Callable[[OpCall, OpSite], None],
        on_scaler_check: Callable[[], None],
    ) -> None:
        super().__init__()
        self.scaler_overflowed = False
        """Whether a loss scaler reported an overflow in this step's gradients."""
        self.loss_scale: float | None = None
        """The loss scale by which the scaler divided the gradients."""
        self.kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        """The class of each module."""
        self._inspect = inspect
        self._on_scaler_check = on_scaler_check
        self._lines: dict[int, CodeLine | None] = {}

    def begin_step(self) -> None:
        """A step begins: the autograd graphs of the last one are gone."""
        self.scaler_overflowed, self.loss_scale = False, None
        self._lines.clear()
        self.tracker.forget_graph()

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        site, spec = self._site(), op_spec(func)
        if func is SCALER_CHECK:
            self._on_scaler_check()
        targets = list(tensors_in(v for _, v in written_arguments(func, args, kwargs)))
        before = {id(x): value_range(x) for x in targets}
        saved: dict[int, Tensor] = {}
        # Ops of the optimizer and over lists are not run again: they would need a copy of all
        # parameters.
        optimizes = spec.listwise or site.phase == "optimizer"
        if spec.reads_written and not optimizes and spec.runs_again:
            with no_dispatch(), torch.no_grad():
                saved = {id(x): x.clone() for x in targets if type(x) in PLAIN_TYPES}
        result = run()
        if spec.makes_numbers:
            self._inspect(OpCall(func, args, kwargs, result, before, saved), site)
        if func is SCALER_CHECK:
            self.scaler_overflowed |= bool(args[1].item())
            self.loss_scale = 1 / args[2].item()
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


def current_line() -> CodeLine | None:
    """The line of code that runs the caller's op; None if only libraries are on the stack."""
    for frame in calling_frames():
        code = frame.f_code
        if not is_library(code.co_filename):
            return CodeLine(code.co_filename, frame.f_lineno, code.co_name)
        if is_backward_call(code) or code.co_filename == LOOP:
            return None
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
