"""mprun's eyes in a loop that mprun does not own.

    with mprun.observe(model, optimizer, out="runs/bf16", seed=0) as run:
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)          # optional: what `mprun compare` judges by
    print(run)

The loop's own calls are followed by hooks (`step_hooks`), and no bit of the training changes. The
folder holds the record of a run: step times, waits for data, page faults, memory, skipped steps,
the dtypes in use, the audit of them, and the values that the loop logs. `mprun compare` reads it.

What costs time is kept out of the timed steps: the audit looks at one of the first steps, and
memory by category (`memory=True`) is counted in two of them, op by op. What remains is a read of
the clock and of each gradient in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mprun._torch import original_module
from mprun.integrations.logged_values import metric_of
from mprun.integrations.observation import Observation
from mprun.integrations.step_hooks import StepHooks, entries
from mprun.precision import Precision
from mprun.records.run_record import Metric

logger = logging.getLogger("mprun")

ON_NONFINITE = ("off", "report", "save")


@contextmanager
def observe(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    out: str | Path,
    name: str | None = None,
    seed: int | None = None,
    metric: str | tuple[str, str] = "loss",
    memory: bool = False,
    on_nonfinite: Literal["off", "report", "save"] = "report",
    precision: Precision | None = None,
) -> Iterator[Observation]:
    """Observe the training inside, and leave a record of it.

    Args:
        model: what trains; an `nn.ModuleList` of several models that train together.
        optimizer: its optimizer, or several; a step ends when each has stepped.
        out: the folder of the record, new or empty.
        name: of the variant in comparisons; None for the precision mode, read from the loop.
        seed: pairs this run with others of the same seed; None for `torch.initial_seed()`.
        metric: what comparisons judge by: loss, or a name that the loop logs. One whose better
            direction is not known comes with it: ("bleu", "max").
        memory: count activations, temporaries and the peak, in two steps that are not timed.
        on_nonfinite: at the first NaN or infinity in a gradient: report it, or also save the step
            to a file for `mprun replay`.
        precision: the `mprun.Precision` of the loop, if it has one.

    Yields:
        What is observed so far; `log(...)` takes the loop's values.

    Raises:
        FileExistsError: `out` has a run already.
        TypeError, ValueError: an argument is not legal.
        OSError: the folder cannot be written at the start. Later, a full disk ends the record
            and not the training.
    """
    optimizers = plain_optimizers(optimizer)
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(f"on_nonfinite={on_nonfinite!r}; legal: {', '.join(ON_NONFINITE)}")
    if on_nonfinite == "save" and entries(original_module(model)) != [original_module(model)]:
        raise ValueError(
            "on_nonfinite='save' needs one model with a forward pass; observe each with its own"
        )
    metric_name, higher = metric_of(metric)
    run = Observation(
        model,
        optimizers,
        Path(out),
        name,
        torch.initial_seed() if seed is None else seed,
        Metric(name=metric_name, higher_is_better=higher),
        memory,
        on_nonfinite,
        precision,
    )
    with ExitStack() as stack:
        stack.enter_context(run.recorded())
        hooks = StepHooks(model, optimizers, run)
        run.begin_step = hooks.begin_step  # type: ignore[method-assign]
        run.begin_call = hooks.begin_call  # type: ignore[method-assign]
        stack.enter_context(hooks.attached())
        yield run


def plain_optimizers(given: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers, without the wrappers of Accelerate and Lightning.

    Raises:
        TypeError, ValueError: one is no optimizer, or there is none.
    """
    every = [given] if isinstance(given, Optimizer) or not isinstance(given, Iterable) else given
    unwrapped = [_unwrapped(x) for x in every]
    for x in unwrapped:
        if not isinstance(x, Optimizer):
            raise TypeError(f"optimizer is {type(x).__name__}; legal: an optimizer, or several")
    if not unwrapped:
        raise ValueError("there is no optimizer: name the one that trains the model")
    return list(dict.fromkeys(unwrapped))


def _unwrapped(optimizer: object) -> Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer  # type: ignore[return-value]
