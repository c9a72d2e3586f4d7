"""Loops of a stranger in which a NaN appears, each a script that `mprun replay` can run.

A script has model(), step(model, batch) and batches(). `train` is its loop; it saves the first step
with a gradient that is not finite.
"""

from __future__ import annotations

import runpy
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.watch.nonfinite import capturing

PLANTED = 37
START = """
import torch
from torch import nn
from torch.nn import functional as F


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x)


class Scale(nn.Linear):
    def __init__(self):
        super().__init__(4, 4, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.abs())


class Counted(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + torch.log((self.num_batches_tracked - 37.0).abs())


class Net(nn.Module):
    def __init__(self, *special):
        super().__init__()
        self.fc, self.special = nn.Linear(4, 8), nn.Sequential(*special)
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        return self.head(torch.cat([self.fc(x).relu(), self.special(x)], 1))


ZERO_IN, CALLS, CASTS = 37, 1, False


def batches():
    generator = torch.Generator().manual_seed(0)
    for number in range(1, 200):
        x = torch.rand(16, 4, generator=generator) + 0.1
        if number == ZERO_IN:
            x[3] = 0
        yield x, x.sum(1, keepdim=True)


def step(model, batch):
    return (model(batch[0]).float() - batch[1]).square().mean() / CALLS

"""
SCRIPTS = {
    "batch": "def model(): return Net(Log())",
    "dropout": "ZERO_IN = None\ndef model(): return Net(nn.Dropout(0.0005), Log())",
    "backward": "def model(): return Net(Scale(), Root())",
    "autocast": "CASTS = True\ndef model(): return Net(Scale(), Log())",
    "accumulation": "ZERO_IN, CALLS = 74, 2\ndef model(): return Net(Log())",
    "batchnorm": "ZERO_IN = None\ndef model(): return Net(Counted(4))",
    "loss": """
def model(): return Net(nn.Identity())
def step(model, batch): return (torch.log(batch[0].min()) * model(batch[0])).mean()
""",
}


def write(name: str) -> Path:
    """The script of this name, in the current folder."""
    path = Path(f"{name}.py")
    path.write_text(START + SCRIPTS[name], encoding="utf-8")
    return path


def train(
    script: Path, file: Path | None = None, steps: int = 100, batch: bool = True
) -> tuple[int, nn.Module]:
    """Train until a gradient is not finite; the step, and the model.

    Args:
        script: gives model, batches and loss.
        file: where that step is saved; None: nothing is captured.
        steps: the most.
        batch: whether the capture gets the batches.
    """
    names: dict[str, Any] = runpy.run_path(str(script))
    torch.manual_seed(0)
    model: nn.Module = names["model"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = names["batches"]()
    with nullcontext() if file is None else capturing(model, optimizer) as capture:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            for one in islice(batches, names["CALLS"]):
                if capture and batch:
                    capture.note_batch(one)
                with torch.autocast("cpu", torch.bfloat16, enabled=names["CASTS"]):
                    loss = names["step"](model, one)
                loss.backward()
            if not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
                if capture and file:
                    capture.save(file, step, "a gradient is not finite")
                break
            optimizer.step()
            if capture:
                capture.next_step()
    return step, model
