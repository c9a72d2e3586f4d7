"""What to do about the errors of PyTorch and Python that models and data raise most often."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from torch import Tensor

MOST = 8
"""Items of a batch that are named."""
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
_PACKAGES = {"cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Modules whose package has another name."""
_CALL = re.compile(r"(\w+)\(\) (takes|missing|got)\b")


def remedy(error: BaseException, kind: str, message: str, mode: str) -> str:
    """What to do about an error; empty where nothing is known.

    Args:
        error: as it was caught; its traceback has the batch.
        kind: its type's name; that of a worker process's error.
        message: its first line.
        mode: the run's precision, or empty.
    """
    if missing := _MISSING.search(message):
        package = _PACKAGES.get(missing[1], missing[1])
        return f"pip install {package}, unless it is a module of yours"
    if kind == "TypeError" and (call := _CALL.search(message)):
        return _of_call(error, call[1])
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
    (
        r"^Expected more than 1 value per channel when training",
        "a batch of one sample has no deviation to normalise by: take a train.batch_size of 2 or "
        "more that does not leave one sample for an epoch's last batch, or larger images",
    ),
    (
        r"^DataLoader worker \(pid.*\) (exited unexpectedly|is killed)",
        "a process that reads data ended itself or was killed, as for want of memory or of shared "
        "memory (/dev/shm): take fewer data.workers; data.workers=0 shows an error of its code",
    ),
    (r"stack expects each tensor to be equal size", _FORMS),
    (r"each element in list of batch should be of equal size", _FORMS),
    (r"default_collate: batch must contain", _FORMS),
    (r"^Trying to resize storage that is not resizable", _FORMS),  # of shapes, in a worker
)


# ---- calls with other arguments ------------------------------------------------------------------


def _of_call(error: BaseException, function: str) -> str:
    if function in _SIGNATURES:
        return f"mprun calls {_SIGNATURES[function]}"
    if function != "forward":
        return ""
    batch = _batch(error)
    holds = "" if batch is None else f"the batch holds {form_of(batch[0])}; "
    return f"{holds}a function forward(model, batch) decides what the model gets of it"


def _batch(error: BaseException) -> tuple[Any] | None:
    """What `forward(model, batch)` got, from the frames that the error came through."""
    trace = error.__traceback__
    while trace is not None:
        frame: FrameType = trace.tb_frame
        if frame.f_code.co_name == "forward" and "batch" in frame.f_locals:
            return (frame.f_locals["batch"],)
        trace = trace.tb_next
    return None


def form_of(value: Any, depth: int = 3) -> str:
    """The structure of a batch: `(float32 [8, 4], {ids: int64 [8, 12]})`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if not depth:
        return "..."
    if isinstance(value, Mapping):
        return f"{{{_listed([f'{k}: {form_of(x, depth - 1)}' for k, x in _first(value.items())])}}}"
    if is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name, None)) for f in fields(value)]
        held = _listed([f"{name}={form_of(x, depth - 1)}" for name, x in _first(items)])
        return f"{type(value).__name__}({held})"
    if isinstance(value, tuple | list):
        held = _listed([form_of(x, depth - 1) for x in _first(value)])
        return f"[{held}]" if isinstance(value, list) else f"({held})"
    return type(value).__name__


def _first(items: Any) -> list[Any]:
    return list(items)[: MOST + 1]


def _listed(texts: list[str]) -> str:
    return ", ".join([*texts[:MOST], "..."] if len(texts) > MOST else texts)
