"""Rows by dtype and module: few, and they add up."""

from __future__ import annotations

import torch
from torch import nn

from mprun.numerics.cast_counts import DtypeRow, dtype_rows, totals


def layer() -> nn.Module:
    return nn.ModuleDict({"norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4).bfloat16()})


def test_one_dtype_is_one_row() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    rows = dtype_rows(model, None)
    assert rows[0] == DtypeRow("parameters", "float32", "", 1, 28)
    assert [str(row) for row in rows if row.role == "buffers"] == [
        "buffers         float32                8  1",
        "buffers         int64                  1  1",
    ]


def test_alike_parts_are_one_row() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(3))})
    assert dtype_rows(model, None) == (
        DtypeRow("parameters", "float32", "layers.*.norm", 3, 24),
        DtypeRow("parameters", "bfloat16", "layers.*.proj", 3, 60),
    )
    assert totals(dtype_rows(model, None)) == {"parameters": {"bfloat16": 60, "float32": 24}}


def test_a_part_that_differs_has_its_own_row() -> None:
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2), nn.Linear(2, 2))
    assert [(row.dtype, row.module, row.modules) for row in dtype_rows(model, None)] == [
        ("float16", "0", 1),
        ("float32", "*", 2),
    ]


def test_gradients_and_state_are_those_of_the_module() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).bfloat16()})
    stranger = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([*model.parameters(), stranger])
    for p in (*model["b"].parameters(), stranger):
        p.grad = torch.ones_like(p)
    optimizer.step()
    rows = [(r.role, r.dtype, r.module, r.numbers) for r in dtype_rows(model, optimizer)]
    assert ("gradients", "bfloat16", "", 6) in rows
    assert ("optimizer state", "bfloat16", "b", 12) in rows
    assert ("optimizer state", "float32", "(not of this model)", 6) in rows
