"""The effective precision of a run, read from the objects that carry it out.

A requested value can have no effect: an optimizer without momentum stores none in any dtype, and
float32 parameters are not rounded. So each column is read from the object that decides it: the
parameters, their gradient buffers, the optimizer, the caster, the arithmetic, the backend switches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mprun.assemble.parts import build_model
from mprun.assemble.plan import Plan
from mprun.assemble.precision_parts import build_precision
from mprun.numerics.memory_recorder import fake_tensors
from mprun.optim.columns import rounding_columns
from mprun.precision import Precision
from mprun.precision.convert import dtype_of
from mprun.precision.policy import dtype_name
from mprun.precision.switches import tf32_is_on
from mprun.records.run_record import PrecisionRow
from mprun.train.init_from import DRAWN


def requested(plan: Plan) -> PrecisionRow:
    """The policy as the configuration asks for it."""
    extra: dict[str, Any] = {"op_lists": plan.config.op_lists.name, "layers": plan.layers}
    return PrecisionRow(**extra, **plan.policy.columns())


def planned(plan: Plan) -> PrecisionRow:
    """`effective` of the plan's objects on fake tensors, before the run builds its own.

    It is the requested row if the model cannot be built like this (it reads values of tensors).
    """
    try:
        with fake_tensors(), plan.backend_flags():
            precision = build_precision(plan)
            model, optimizer = build_model(replace(plan, weights=DRAWN), precision)
            return effective(plan, model, optimizer, precision)
    except Exception:
        return requested(plan)


def effective(
    plan: Plan, model: nn.Module, optimizer: Optimizer, precision: Precision
) -> PrecisionRow:
    """The columns of the built objects; call it with the run's backend switches set.

    `param_dtype` and `accum_dtype` are those of the parameters outside of `precision.layers`. A
    moment that the optimizer does not store is computed in float32, so it is float32 here.

    Args:
        plan: the plan they were built from.
        model: prepared by `precision`.
        optimizer: of the model's parameters.
        precision: carries the policy out.
    """
    row: dict[str, Any] = {**vars(requested(plan)), "tf32": tf32_is_on(plan.device)}
    named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    outside = [p for n, p in named if dtype_of(n, plan.layers, "") == ""]
    outside = outside or [p for _, p in named]
    if outside:
        stored = _most((p.dtype, p.numel()) for p in outside)
        row["param_dtype"] = row["compute_dtype"] = dtype_name(stored)
    if trained := [p for p in outside if p.requires_grad]:
        row["accum_dtype"] = dtype_name(
            _most((p.grad_dtype or p.dtype, p.numel()) for p in trained)
        )
    row.update(rounding_columns(optimizer, [p.dtype for _, p in named]))
    row.update(precision.columns)
    if plan.config.parallel.world_size == 1:  # nothing is sent
        row["reduce_dtype"] = "float32"
    if row["casting"] != "op_lists":
        row["op_lists"] = "none"
    return PrecisionRow(**row)


def _most(dtypes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype of most elements, from pairs of a dtype and a number of elements."""
    counts: Counter[torch.dtype] = Counter()
    for dtype, elements in dtypes:
        counts[dtype] += elements
    return counts.most_common(1)[0][0]
