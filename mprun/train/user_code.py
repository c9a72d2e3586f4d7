"""Mistakes in the user's code: one line with the error, its place and, where known, a remedy.

Calls of that code are not wrapped: the place is read from the traceback, where the error is
handled. `explain_faults` records an error that ends a run.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mprun.errors import (
    MachineFailedError,
    MprunError,
    Place,
    RunFailedError,
    UsageError,
    definition,
    first_line,
    is_from_code,
    is_users,
    place_of,
    text_of,
)
from mprun.precision._torch import DispatchMode
from mprun.recipe import Recipe
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Summary
from mprun.train.checkpoint import CheckpointMisfitError
from mprun.train.loss_terms import shown

# An error of a DataLoader's worker process arrives with the worker's traceback as its text
_CAUGHT = re.compile(r"Caught (\S+) in DataLoader worker process")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def _raised_by(error: BaseException) -> tuple[str, str, list[str]]:
    """Kind, message and place of the error, or of the worker process's that it passes on."""
    text = text_of(error)
    caught = _CAUGHT.match(text)
    if caught is None:
        place = place_of(error) or _refusing(error)
        return type(error).__name__, first_line(error), [str(place)] if place else []
    frames = list(_FRAME.finditer(text))
    after = text[frames[-1].end() if frames else caught.end() :].splitlines()
    lines = [line for line in after if line and not line.startswith(" ")]
    message = lines[0].partition(": ")[2] if lines else ""
    # the last frame of the user's, not of a library that it called
    users = [str(Place(f[1], int(f[2]), f[3])) for f in frames if is_users(f[1])]
    return caught[1], message or "no message", [*users[-1:], "in a DataLoader worker"]


def _refusing(error: BaseException) -> Place | None:
    """The function of the user's that could not be called with these arguments."""
    trace = error.__traceback__
    if not isinstance(error, TypeError) or trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    # a call that is refused has no frame; PyTorch's `_call_impl` and mprun name what they called
    caller = trace.tb_frame.f_locals
    module, function = caller.get("self"), caller.get("function")
    return definition(type(module).forward if isinstance(module, nn.Module) else function)


def described(error: BaseException, mode: str = "") -> str:
    """`TYPE: text (file:line, in function); remedy`, in one line; `mode` is the run's precision."""
    kind, message, where = _raised_by(error)
    place = f" ({', '.join(where)})" if where else ""
    fix = _remedy(error, kind, message, mode)
    return f"{kind}: {message}{place}" + (f"; {fix}" if fix else "")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine, not the code, is to blame for an error."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # PyTorch's allocator for the CPU raises a plain RuntimeError
    return isinstance(error, RuntimeError) and "can't allocate memory" in text_of(error)


@contextmanager
def explain_mistakes(what: str, only_users: bool = False) -> Iterator[None]:
    """An error of the user's code that is raised inside becomes one line, which begins with `what`.

    With `only_users`, errors pass that came through no line of the user's.

    Raises:
        UsageError: in place of it.
    """
    try:
        yield
    except MprunError:
        raise
    except BaseException as error:  # a user's class may be no Exception
        if not is_from_code(error) or (only_users and place_of(error) is None):
            raise
        raise UsageError(f"{what}: {described(error)}") from error


def model_of(recipe: Recipe) -> nn.Module:
    """A new model of the recipe; raises as `checked_model`."""
    kind = type(recipe)
    return checked_model(recipe.model(), kind.model, f"model() of {kind.__name__}")


def outline_of(recipe: Recipe) -> nn.Module:
    """A model of the recipe, of which no number is read: on the meta device if it is large.

    PyTorch imports its compiler for many ops there (1.5 s), so a small model is drawn.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            with _Small():  # type: ignore[no-untyped-call]
                return model_of(recipe)
        except (MemoryError, RuntimeError):  # the latter of a tensor that no memory holds
            with torch.device("meta"):
                return model_of(recipe)


class _Small(DispatchMode):
    """Raises `MemoryError` where more numbers are made than a few tenths of a second take."""

    left = 2**25

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.left -= result.numel() if isinstance(result, Tensor) else 0
        if self.left < 0:
            raise MemoryError
        return result


def checked_model(made: object, by: object, name: str) -> nn.Module:
    """What the user's function `by`, called `name`, returned.

    Raises:
        UsageError: it is no model.
    """
    if isinstance(made, nn.Module):
        return made
    found = definition(by)
    place = f" ({found})" if found else ""
    raise UsageError(f"{name} returned {shown(made)}{place}; legal is a torch.nn.Module")


# Disk full, quota, file size limit, read-only, a broken disk: the machine's fault, not the run's
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextmanager
def explain_faults(summary: Summary, folder: RunFolder) -> Iterator[None]:
    """Record an error that is raised inside, and replace it by one line for the user.

    Raises:
        MprunError: the one raised inside; with the traceback of its cause, if it has one.
        MachineFailedError: in place of an exception of a full disk or a lack of memory.
        RunFailedError: in place of any other, whose traceback is written to traceback.txt.
    """
    try:
        yield
    except CheckpointMisfitError:  # nothing was trained: the record is as it was
        raise
    except MprunError as error:
        is_machine = isinstance(error, MachineFailedError)
        _record(summary, folder, str(error), "machine" if is_machine else "run")
        if error.__cause__ is None or type(error) is not RunFailedError:  # no traceback helps
            raise
        raise RunFailedError(f"{error} {_write_traceback(error, folder)}") from None
    except BaseException as error:
        exits = isinstance(error, SystemExit)  # a model may call sys.exit()
        if not (exits or is_from_code(error)):
            raise
        if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
            reason, text = _disk_full(error, summary, folder)
        elif is_out_of_memory(error):
            reason = text = (
                f"out of memory on {summary.hardware.device} with "
                f"{summary.batch.micro} samples a micro-batch; try a smaller "
                "train.batch_size with train.accumulate"
            )
        else:
            reason = described(error, summary.precision)
            _record(summary, folder, reason, "run")
            text = f"the run failed: {reason} {_write_traceback(error, folder)}"
            raise RunFailedError(text) from None
        _record(summary, folder, reason, "machine")
        raise MachineFailedError(text) from None


def _record(
    summary: Summary, folder: RunFolder, reason: str, by: Literal["run", "machine"]
) -> None:
    """Write the last summary, if the disk has room."""
    summary.status, summary.error, summary.failed_by = "failed", reason, by
    with suppress(OSError):
        folder.summary(summary)


def _disk_full(error: OSError, summary: Summary, folder: RunFolder) -> tuple[str, str]:
    """The reason for the record, and the line for the user."""
    can_resume = (folder.path / "config.yaml").exists()
    command = f"mprun run.resume={folder.path}" if can_resume else "start again in another folder"
    return f"the record cannot be written: {error.strerror}", (
        f"the record cannot be written ({error.strerror}): the run ended at step {summary.steps}; "
        f"what was recorded is in {folder.path}; make room, then: {command}"
    )


def _write_traceback(error: BaseException, folder: RunFolder) -> str:
    """Write the traceback of an exception; returns a text with its path."""
    try:
        path = folder.write("traceback.txt", "".join(traceback.format_exception(error)))
    except OSError:
        return "(its traceback could not be written)"
    return f"(the traceback is in {path})"


# ---- remedies for the errors that models and data raise most often -------------------------------

MOST = 8  # Items of a batch that are named
_SIGNATURES = {
    "model": "model()",
    "loss": "loss(output, batch)",
    "correct": "correct(output, batch)",
    "metrics": "metrics()",
    "count": "count(batch)",
    "optimizer": "optimizer(model)",
    "schedule": "schedule(optimizer)",
}
_MISSING = re.compile(r"^No module named '(\w+)")
# Modules whose package has another name
_PACKAGES = {"cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
_CALL = re.compile(r"(\w+)\(\) (takes|missing|got)\b")


def _remedy(error: BaseException, kind: str, message: str, mode: str) -> str:
    """What to do about an error; empty where nothing is known."""
    if missing := _MISSING.search(message):
        package = _PACKAGES.get(missing[1], missing[1])
        return f"pip install {package}, unless it is a module of yours"
    if kind == "TypeError" and (call := _CALL.search(message)):
        if call[1] in _SIGNATURES:
            return f"mprun calls {_SIGNATURES[call[1]]}"
        if call[1] != "forward":
            return ""
        batch = _batch(error)
        holds = "" if batch is None else f"the batch holds {form_of(batch)}; "
        keeps = "mprun.check(model, batch, loss) keeps the last item for the loss"
        return f"{holds}a function forward(model, batch) decides what the model gets of it; {keeps}"
    for pattern, text in _KNOWN:
        if re.search(pattern, message):
            return text if isinstance(text, str) else text(mode)
    return ""


def _dtypes(mode: str) -> str:
    return (
        f"{f'precision={mode}' if mode else 'the mode'} gives the model 16-bit tensors, and one "
        "that is made in float32 meets them: make it with dtype=x.dtype, or keep its module in "
        "float32 with precision.layers"
    )


_CLASSES = (
    "class targets are int64 with values from 0 to the number of outputs - 1: use target.long(), "
    "or for a regression another loss, such as mse_loss"
)
_FORMS = (
    "the samples of a batch differ in shape or kind: pad or convert them in the data set, or give "
    "a DataLoader with a collate_fn that does"
)
_KNOWN: tuple[tuple[str, str | Callable[[str], str]], ...] = (
    (r"expected (scalar type|target dtype to be) Long", _CLASSES),
    (r"nll_loss\w* not implemented for", _CLASSES),
    (r"floating point type for target with class probabilities", _CLASSES),
    (r"^Target -?\d+ is out of bounds", _CLASSES),
    (
        r"^index out of range in self",
        "an index of the batch is negative, or not below num_embeddings of the embedding",
    ),
    (
        r"device-side assert",
        "an index or a class target is out of range: device=cpu names the line",
    ),
    (
        r"([Dd]ouble|float64).*([Ff]loat)\b|([Ff]loat)\b.*([Dd]ouble|float64)",
        "a tensor is float64, as NumPy makes them: use x.float()",
    ),
    (r"(?=.*(Half|BFloat16|float16))(?=.*(same dtype|should be the same|scalar type))", _dtypes),
    (r"stack expects each tensor to be equal size", _FORMS),
    (r"each element in list of batch should be of equal size", _FORMS),
    (r"default_collate: batch must contain", _FORMS),
    (
        r"^derivative for aten::\w*attention\w* is not implemented",
        "attention's fused kernels have no second derivative: call it inside of "
        "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)",
    ),
    (
        r"aot_autograd does not currently support double backward",
        "compiled code has no second derivative: add speed.compile=false",
    ),
    (
        r"^derivative for aten::_cudnn_rnn_backward is not implemented",
        "cuDNN's recurrent layers have no second derivative: call the layer inside of "
        "torch.backends.cudnn.flags(enabled=False)",
    ),
    (
        r"differentiated Tensor.* not have been used in the graph",
        "modes that store 16 bits hand the loss float32 copies of what forward returns, without a "
        "path between them: take the derivative inside of forward",
    ),
    (r"^Trying to resize storage that is not resizable", _FORMS),  # of shapes, in a worker
)


def _batch(error: BaseException) -> Any:
    """What `forward(model, batch)` got, from the frames that the error came through."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "forward" and "batch" in trace.tb_frame.f_locals:
            return trace.tb_frame.f_locals["batch"]
        trace = trace.tb_next
    return None


def form_of(value: Any, depth: int = 3) -> str:
    """The structure of a batch: `(float32 [8, 4], {ids: int64 [8, 12]})`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if not depth:
        return "..."
    if isinstance(value, Mapping):
        items = [f"{key}: {form_of(x, depth - 1)}" for key, x in list(value.items())[:MOST]]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(form_of(x, depth - 1) for x in value[:MOST])})"
    return type(value).__name__
