"""Whether formats of 8 bits or fewer pay for the linear layers of a recipe.

The layers' shapes are those of one micro-batch's forward pass, on fake tensors where the model lets
them; `mprun.doctor.format_gains` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import nn

from mprun.assemble.plan import Plan
from mprun.assemble.planned_memory import as_native, fake_step
from mprun.console import ReportPart, report_nothing
from mprun.data import Batch
from mprun.doctor.format_gains import GPUS, Shape, measured, predicted
from mprun.experiments.planned_run import PlannedRun
from mprun.experiments.recipe_roofline import real_step
from mprun.precision.gemms import fits, formatted_layers, linear_layers
from mprun.records.format_record import FormatGains
from mprun.train.loop import Parts, Trainer


def recipe_formats(
    planned: PlannedRun, gpus: Iterable[str], report: ReportPart = report_nothing
) -> list[FormatGains]:
    """The gains on the plan's device if it has such products, else on GPUs that have.

    Empty without linear layers.

    Args:
        planned: the run.
        gpus: keys of `GPUS`.
        report: is called before each part.
    """
    report("counting linear layers")
    shapes, converted = layer_shapes(planned)
    if not shapes:
        return []
    report("timing linear layers")
    here = measured(shapes, planned.plan.device, converted)
    return [predicted(shapes, GPUS[gpu], converted) for gpu in gpus] if here is None else [here]


def layer_shapes(planned: PlannedRun) -> tuple[dict[Shape, list[str]], list[str]]:
    """The linear layers of each shape, the first in the model's order; and those a mode converts.

    Layers that a step does not call, or that can have no format, are left out.
    """
    native = as_native(planned.plan)
    try:
        with fake_step(native) as (parts, batch):
            return _shapes(native, parts, batch)
    except Exception:  # the model reads values, which fake tensors do not have
        with real_step(planned) as (parts, batch):
            return _shapes(planned.plan, parts, batch)


def _shapes(plan: Plan, parts: Parts, batch: Batch) -> tuple[dict[Shape, list[str]], list[str]]:
    layers, rows = linear_layers(parts.model), dict[str, int]()
    trainer = Trainer(parts, plan.limits)
    with ExitStack() as stack:
        for name, layer in layers.items():

            def called(_: nn.Module, inputs: tuple[object, ...], name: str = name) -> None:
                x = inputs[0]
                rows[name] = x.numel() // x.shape[-1]  # type: ignore[attr-defined]

            stack.callback(layer.register_forward_pre_hook(called).remove)
        trainer.optimizer_step(batch)
    shapes: dict[Shape, list[str]] = {}
    for name, layer in layers.items():
        if name in rows and fits(layer):
            shape = Shape(rows[name], layer.in_features, layer.out_features)
            shapes.setdefault(shape, []).append(name)
    try:
        converted = formatted_layers(parts.model)
    except ValueError:  # too few layers: a mode would be refused, a layer by name not
        converted = []
    return shapes, converted
