"""What is written into `mprun-baseline.json`: figures in float64, and how far roundings move them.

The spread of a figure is measured by `DRAWS` passes from weights that are moved at random by up to
half a unit of float32 (for the losses of a mode: weights and inputs, of its dtype).
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from scipy.special import stdtrit
from torch import nn

from mprun.errors import definition
from mprun.inspect.check.check_baseline import (
    SCHEMA_VERSION,
    Baseline,
    BaselineFigure,
    BaselineStep,
    ModeBaseline,
)
from mprun.inspect.check.check_training import curve_losses
from mprun.inspect.check.checked_mode import CheckedMode
from mprun.inspect.divergence.boundaries import calls_followed, floating
from mprun.inspect.float64 import in_float64
from mprun.inspect.trace import traced_step
from mprun.precision.policy import torch_dtype
from mprun.train.machine import machine
from mprun.watch.updates import weights_moved

DRAWS = 4  # Each one is a pass in float64; fewer degrees of freedom make Student's bound far wider
# The chance that an unchanged figure is outside of its bound: each module and parameter has one
MISSED = 1e-5
STEPS = 4  # Steps of a mode whose losses are written


def reference_of(mode: CheckedMode) -> Baseline:
    """What is the same for all modes; `modes` is empty."""
    hardware = machine.hardware(mode.plan.device, []).name
    return Baseline(
        schema_version=SCHEMA_VERSION,
        recipe=mode.plan.config.recipe.name,
        machine=f"{hardware}, {torch.get_num_threads()} threads",
        versions=mode.planned.summary.versions,
        code=dict(sorted(_code(mode.start(exact=True)))),
        reference=_reference(mode),
        modes={},
    )


def figures_of(mode: CheckedMode) -> ModeBaseline:
    """The figures of a mode."""
    unit = torch.finfo(torch_dtype(mode.plan.policy.compute_dtype)).eps / 2
    curves = [curve_losses(mode, STEPS, number, most=unit) for number in range(DRAWS + 1)]
    losses = curves[0]
    bounds = [spread_bound(moved, loss) for loss, *moved in zip(*curves, strict=False)]
    grown = accumulate(bounds, max)  # a difference of one step is in all later ones
    return ModeBaseline(
        losses=[BaselineFigure(*x) for x in zip(losses, grown, strict=False)],
        ops=dict(sorted(_ops(mode).items())),
        peak_bytes=mode.memory.totals,
    )


def spread_bound(draws: Sequence[float], middle: float) -> float:
    """The bound for the difference of two draws, from draws around `middle`.

    The two are that of the file, and that of the machine where it is read.
    """
    # `middle` is known, not a mean of the draws: as many degrees of freedom as there are draws
    spread = math.sqrt(math.fsum((x - middle) ** 2 for x in draws) / len(draws))
    return float(stdtrit(len(draws), 1 - MISSED / 2)) * spread * math.sqrt(2)


def _code(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The classes of the user's modules, each with a digest of its source."""
    for kind in {type(module) for module in model.modules()}:
        if definition(kind.forward) is None:  # a class of PyTorch, whose version is in the file
            continue
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):  # it was made without a file
            continue
        # 48 bits tell versions of one class apart, and keep a line of the file short
        yield kind.__qualname__, hashlib.sha256(source.encode()).hexdigest()[:12]


def _reference(mode: CheckedMode) -> BaselineStep:
    own, *moved = (_float64_pass(mode, seed) for seed in range(DRAWS + 1))
    figures: dict[str, dict[str, BaselineFigure]] = {"output": {}, "gradient": {}, "loss": {}}
    for (what, name), value in own.items():
        draws = [x.get((what, name), value) for x in moved]
        figures[what][name] = BaselineFigure(value, spread_bound(draws, value))
    return BaselineStep(figures["loss"][""], figures["output"], figures["gradient"])


def _float64_pass(mode: CheckedMode, seed: int) -> dict[tuple[str, str], float]:
    """The figures of the first step in float64; seed 0 leaves the weights as they are."""
    probe, most = mode.probe(exact=True), torch.finfo(torch.float32).eps / 2 if seed else 0.0
    figures: dict[tuple[str, str], float] = {}

    def end(path: str, output: Any) -> None:
        norms = [float(x.detach().double().norm()) for x in floating(output)]
        # a module may be called several times: the norm of all its outputs
        figures["output", path] = math.hypot(figures.get(("output", path), 0.0), *norms)

    @contextmanager
    def inside(model: nn.Module) -> Iterator[None]:
        followed = calls_followed(model.named_modules(), lambda *_: None, end)
        with weights_moved([*model.parameters()], most, seed), in_float64(model), followed:
            yield

    gradients = probe.gradients(mode.start(exact=True), mode.exact_batches[0], inside=inside)
    figures |= {("gradient", name): float(x.norm()) for name, x in gradients.items()}
    return figures | {("loss", ""): probe.loss}


def _ops(mode: CheckedMode) -> Counter[str]:
    """The calls of a forward pass that cast or compute, by the dtype that they return."""
    rows = traced_step(mode.plan, mode.batches[0]).rows
    return Counter(
        f"{x.op} {x.dtypes_out[0]}"
        for x in rows
        if x.phase == "forward" and x.kernels and x.dtypes_out
    )
