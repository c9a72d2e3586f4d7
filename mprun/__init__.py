"""mprun: train a model in several numerical precisions and learn which one to use.

    import mprun

    mprun.run("recipe=my.py", precision="bf16_mixed")   # train; a Result, which a notebook shows
    mprun.compare("outputs")     # runs compared: the verdict, a table, plots
    mprun.check(model, batch, loss)   # is each mode's error no more than its rounding?
    mprun.load("outputs/DATE/TIME")   # a run's model, configuration and weights

In anyone's own loop:

    mprun.policy("bf16_sr")      # a precision mode by its name: a row of dtypes and roundings
    mprun.Precision              # carries a policy out for a model and its optimizer
    with mprun.observe(model, optimizer, out="runs/bf16") as run: ...   # a record of any loop
    mprun.audit(model, optimizer)  # which dtypes it trains in, and which updates they lose
    mprun.diff(a, b, batch)      # where two precisions, versions or compiled and eager part
    mprun.assert_explained(kernel, x, reference=f)   # a test without a guessed tolerance
    mprun.Recipe                 # model + data + loss, for `mprun recipe=...`
    mprun.metrics                # accuracy, perplexity; torchmetrics by name
    mprun.optim                  # optimizers that keep parameters and state in 16 or 8 bits
    mprun.numerics               # a close look at one training step
    mprun.UsageError, mprun.RunFailedError   # to catch: a mistake, a run that failed
    mprun.Result                 # to annotate: what run, compare and check return

Importing this package is cheap: torch is imported when one of these names is first used.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mprun import metrics, numerics, optim
    from mprun.cli.functions import check, compare, run
    from mprun.errors import RunFailedError, UsageError
    from mprun.inspect.divergence import diff
    from mprun.inspect.explained import assert_explained
    from mprun.precision import Precision
    from mprun.precision.policy import policy
    from mprun.recipe import Recipe
    from mprun.records.result import Result
    from mprun.study.planned_run import load
    from mprun.train.observe.observe import observe
    from mprun.watch.audit import audit

__all__ = [
    "Precision",
    "Recipe",
    "Result",
    "RunFailedError",
    "UsageError",
    "__version__",
    "assert_explained",
    "audit",
    "check",
    "compare",
    "diff",
    "load",
    "metrics",
    "numerics",
    "observe",
    "optim",
    "policy",
    "run",
]

_SOURCES = {
    "Precision": "mprun.precision",
    "Recipe": "mprun.recipe",
    "Result": "mprun.records.result",
    "RunFailedError": "mprun.errors",
    "UsageError": "mprun.errors",
    "assert_explained": "mprun.inspect.explained",
    "audit": "mprun.watch.audit",
    "check": "mprun.cli.functions",
    "compare": "mprun.cli.functions",
    "diff": "mprun.inspect.divergence",
    "load": "mprun.study.planned_run",
    "observe": "mprun.train.observe.observe",
    "policy": "mprun.precision.policy",
    "run": "mprun.cli.functions",
}
_PACKAGES = ("metrics", "numerics", "optim")

OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 11)
"""As in pyproject.toml; pip does not hold an installed PyTorch to it."""
NEWEST_TORCH = (2, 15)
"""The newest in docs/reference/versions, which has what was recorded with it."""


def release(version_text: str) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 15) of "2.15.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version_text)[:2]))


def _refuse(name: str, found: str, oldest: tuple[int, ...], remedy: str) -> None:
    """End the command with status 2, or the import, if a version is older than supported.

    Here, because any other module may fail first, by its syntax or by a name that PyTorch lacks.
    """
    if release(found) >= oldest:
        return
    needed = ".".join(map(str, oldest))
    text = f"mprun: {name} >= {needed} is needed, and this is {found}: {remedy}"
    if Path(sys.argv[0]).stem == "mprun" or sys.argv[0] == "-m":
        print(text, file=sys.stderr)
        sys.exit(2)
    raise ImportError(text)


_refuse("Python", sys.version.split()[0], OLDEST_PYTHON, "make an environment with a newer one")
with suppress(PackageNotFoundError):  # none is installed, or one without pip
    _refuse("PyTorch", version("torch"), OLDEST_TORCH, "pip install --upgrade torch torchvision")

try:
    __version__ = version("mprun")
except PackageNotFoundError:  # a bare source tree on sys.path, never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """A public name, imported on first use (PEP 562)."""
    if name in _PACKAGES:
        return import_module(f"mprun.{name}")
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name]), name)
    raise AttributeError(f"module 'mprun' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
