"""Every block of Python on every page runs.

Those of docs/tutorials/your_loop.md run one after the other, and those of docs/how-to/loops.md
behind them. Those of other pages may be parts of a program: the names they need are made here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mprun
from mprun.records.run_record import read_summary
from mprun.train.data import TensorSet

ROOT = Path(__file__).resolve().parent.parent
YOUR_LOOP = [ROOT / "docs" / "tutorials" / "your_loop.md", ROOT / "docs" / "how-to" / "loops.md"]
"""Pages whose blocks are one program."""
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)} {number}")
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    if page not in YOUR_LOOP
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    )
]

FEWER = {"num_layers=64": "num_layers=2", "for epoch in range(8)": "for epoch in range(1)"}
"""Sizes of the pages that take seconds, and sizes that run the same code."""


def names() -> dict[str, Any]:
    """What a program around a block has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    return {
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "mprun": mprun,
        "TensorSet": TensorSet,
        "model": model,
        "x": x,
        "y": y,
        "batches": [(x, y)],
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "loss_function": nn.functional.cross_entropy,
        "cross_entropy": nn.functional.cross_entropy,
        "torchmetrics": pytest.importorskip("torchmetrics"),
    }


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = names()
    for many, few in FEWER.items():
        block = block.replace(many, few)
    exec(compile(block, "block", "exec"), content)
    if "def metrics" in block:  # a part of a recipe
        output, batch = torch.randn(6, 3), (content["x"], content["y"])
        assert content["loss"](output, batch).keys() == {"classes", "size"}
        assert content["metrics"]().keys() == {"f1", "auroc"}
    if "def sample" in block:
        assert len(content["sample"](None)) == 1


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 10
    text = "".join(str(block.values[0]) for block in BLOCKS)
    assert [many for many in FEWER if many not in text] == []


@pytest.mark.usefixtures("native_is_fast")
def test_the_examples_for_your_loop_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    text = "".join(page.read_text(encoding="utf-8") for page in YOUR_LOOP)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 8
    for number, block in enumerate(blocks):
        exec(compile(block, f"your_loop.md and loops.md, block {number}", "exec"), names)
    summary = read_summary(tmp_path / "runs" / "fp32")
    assert (summary.status, summary.steps, summary.precision) == ("completed", 40, "fp32")
    loaded, state = names["again"][0].state_dict(), names["saved"][0]
    assert all(torch.equal(loaded[name], state[name]) for name in state)
