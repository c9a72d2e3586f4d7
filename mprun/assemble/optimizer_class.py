"""An optimizer by import path: its class, and the arguments that it takes."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from mprun.assemble.recipe_origin import UntrustedCodeError, announced
from mprun.config.schema import OptimizerConfig
from mprun.errors import UsageError, first_line, hint, nearest

CLOSURE = "calls the loss several times in a step, and mprun calls it once"
ANY = None
"""The class takes arguments of any name."""


def optimizer_class(target: str, untrusted: Path | None = None) -> type[Optimizer]:
    """The class at an import path; the current folder is searched too.

    Raises:
        UsageError: there is none, or it is no optimizer that can be used.
    """
    module_name, _, class_name = target.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        with announced(target, untrusted):
            module = importlib.import_module(module_name)
    except UntrustedCodeError:
        raise
    except Exception as error:  # the module may be the user's: anything can be wrong with it
        raise UsageError(
            f"train.optimizer.target={target} cannot be loaded ({type(error).__name__}: "
            f"{first_line(error)}); legal is the import path of a class, such as "
            "torch.optim.Adagrad"
        ) from None
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, Optimizer) or kind is Optimizer:
        known = [n for n, x in vars(module).items() if _is_optimizer(x)]
        near = nearest(class_name, known)
        meant = f"; did you mean {module_name}.{near}?" if near else ""
        legal = f": {', '.join(known)}" if known else ""
        raise UsageError(
            f"train.optimizer.target={target} is no torch.optim.Optimizer{meant or legal}"
        )
    refuse_closures(kind, f"train.optimizer.target={target}")
    return kind


def _is_optimizer(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, Optimizer) and x is not Optimizer


def refuse_closures(kind: type[Optimizer], what: str) -> None:
    """Raise `UsageError` for an optimizer whose step needs a closure."""
    if issubclass(kind, torch.optim.LBFGS):
        raise UsageError(f"{what}: {kind.__name__} {CLOSURE}; legal is every other optimizer")


def arguments_of(kind: type[Optimizer]) -> list[str] | None:
    """The names of the arguments of a class beside its parameters and lr; None for any."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return ANY
    return [p.name for p in parameters if p.name != "lr" and p.kind is not p.VAR_POSITIONAL]


def check_arguments(kind: type[Optimizer], args: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an argument that the class does not take."""
    legal = arguments_of(kind)
    for name, value in args.items():
        if legal is not ANY and name not in legal:
            raise UsageError(
                f"'train.optimizer.args.{name}={value}': {kind.__name__} has no such argument"
                f"{hint(str(name), legal)}; legal: {', '.join(legal)}"
            )


def takes(kind: type[Optimizer], name: str) -> bool:
    """Whether a class names such an argument."""
    return name in (arguments_of(kind) or ())


def implementation(kind: type[Optimizer], args: Mapping[str, Any], chosen: str) -> str:
    """The implementation of a run with this class: forloop, foreach, fused, or own.

    Args:
        kind: the class.
        args: the user's arguments, which win.
        chosen: what was measured to be the fastest of PyTorch's optimizers.
    """
    if not takes(kind, "foreach"):
        return "own"
    asked = [name for name in ("fused", "foreach") if args.get(name)]
    if asked:
        return asked[0]
    if any(name in args for name in ("fused", "foreach")):
        return "forloop"
    return "foreach" if chosen == "fused" and not takes(kind, "fused") else chosen


def make(
    kind: type[Optimizer], parameters: Any, config: OptimizerConfig, lr: float, implementation: str
) -> Optimizer:
    """An optimizer of the class, with the user's arguments.

    Raises:
        UsageError: the class refuses them.
    """
    options: dict[str, Any] = {"lr": lr}
    if config.weight_decay and takes(kind, "weight_decay"):
        options["weight_decay"] = config.weight_decay
    if implementation not in ("own", "masters"):
        names = [n for n in ("foreach", "fused") if takes(kind, n)]
        if not any(name in config.args for name in names):
            options |= {name: implementation == name for name in names}
    options |= {name: _as_argument(value) for name, value in config.args.items()}
    try:
        return kind(parameters, **options)
    except Exception as error:  # the class may be the user's
        legal = arguments_of(kind)
        known = "" if legal is ANY else f"; its arguments: {', '.join(legal)}"
        raise UsageError(
            f"train.optimizer.target={config.target} cannot be made ({type(error).__name__}: "
            f"{first_line(error)}){known}"
        ) from None


def article(value: Any) -> str:
    """What a function gave, by its class."""
    return "nothing (a return is missing)" if value is None else f"a {type(value).__name__}"


def _as_argument(value: Any) -> Any:
    """A list as the tuple that optimizers take (betas)."""
    return tuple(value) if isinstance(value, list) else value
