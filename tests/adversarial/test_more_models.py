"""Ten more models that a reader can see through: `mprun numerics` beside passes in float64.

The oracle knows nothing of mprun: the same weights and samples in a model of doubles, and in
PyTorch's own autocast. A format is good enough for a case where its loss and gradients are.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.cli.main import main

FEATURES, SAMPLES = 16, 64
NEEDED_DB, MAX_LOSS = 20.0, 0.01
CLEAR_DB, CLEAR_LOSS = 3.0, 2.0
"""No case is nearer than this to the border between good enough and not."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Attention(nn.Module):
    """Attention whose scores are in the tens: the softmax is all but one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 16) for _ in range(3))
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unflatten(1, (4, 4))
        scores = (48 * self.query(h)) @ self.key(h).transpose(1, 2)
        out: Tensor = self.last((scores.softmax(-1) @ self.value(h)).flatten(1))
        return out


class RmsNorm(nn.Module):
    """A norm by hand with an eps of 1e-9; squares of small numbers are 0 in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 32, bias=False), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x / 4096)
        out: Tensor = self.last(h * ((h * h).mean(1, keepdim=True) + 1e-9).rsqrt())
        return out


class Rope(nn.Module):
    """Rotations by positions around 3,000 that are made in the dtype of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.unflatten(1, (8, 2)))
        angles = torch.arange(3001, 3009).to(h.dtype)
        cos, sin = angles.cos(), angles.sin()
        a, b = h.unbind(2)
        out: Tensor = self.last(torch.cat((a * cos - b * sin, a * sin + b * cos), 1))
        return out


class Cosine(nn.Module):
    """One minus a cosine near 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.shift = nn.Parameter(0.02 * torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        near = h + self.shift
        products = (h * near).sum(1), (h * h).sum(1), (near * near).sum(1)
        out: Tensor = 24 * (1 - products[0] * (products[1] * products[2]).rsqrt())
        return out.unsqueeze(1)


class RareRows(nn.Module):
    """An embedding of which each batch reads a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(512, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.rows((97 * x[:, 0].abs()).long() % 512).tanh())
        return out


class Residual(nn.Module):
    """Branches that add little to a large stream, of which a norm takes the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.branches[0](x) * 0 + 40
        for branch in self.branches:
            stream = stream + branch(x).tanh()
        out: Tensor = self.last(stream - stream.mean(1, keepdim=True))
        return out


class Temperature(nn.Module):
    """Logits divided by a temperature of 0.005."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.body(x) / 0.005).softmax(1)[:, :1]
        return out


class MaskedMean(nn.Module):
    """A mean over the tokens that a mask leaves of 2,048, some of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.repeat(1, 128).unsqueeze(2)
        mask = (tokens > 0.5).to(tokens.dtype)
        h = self.first(tokens).relu() * mask
        out: Tensor = self.last(h.sum(1) / mask.sum(1))
        return out


class TiedHead(nn.Module):
    """The matrix that embeds is the matrix that reads out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.embed(x).tanh(), self.embed.weight.t())[:, :1]


class FrozenNorm(nn.Module):
    """A BatchNorm with fixed statistics; the variance of its inputs is far below their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 1),
        )
        self.norm.running_mean.fill_(4.0)  # type: ignore[union-attr]
        self.norm.running_var.fill_(2.0**-10)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        out: Tensor = self.last(self.norm(self.first(x) / 32 + 4).tanh())
        return out


@dataclass(frozen=True)
class Case:
    """A model, and the formats that are not good enough for it."""

    model: Callable[[], nn.Module]
    fails: frozenset[str] = frozenset()


CASES = {
    "large logits": Case(Attention),
    "tiny eps": Case(RmsNorm, frozenset({"fp16"})),
    "positions in 16 bits": Case(Rope, frozenset({"fp16", "bf16"})),
    "cosine near 1": Case(Cosine, frozenset({"fp16", "bf16"})),
    "rare embeddings": Case(RareRows),
    "residual growth": Case(Residual, frozenset({"bf16"})),
    "temperature": Case(Temperature, frozenset({"bf16"})),
    "masked mean": Case(MaskedMean),
    "tied weights": Case(TiedHead),
    "frozen BatchNorm": Case(FrozenNorm, frozenset({"bf16"})),
}
RECIPE = """
import torch

from tests.adversarial.test_more_models import CASES, samples

def model():
    return CASES[{case!r}].model()

def data():
    points = torch.utils.data.TensorDataset(*samples())
    return {{"train": torch.utils.data.DataLoader(points, {size}), "validation": samples()}}

def loss(output, batch):
    return (output.float() - batch[1]).square().mean()
"""


def samples() -> tuple[Tensor, Tensor]:
    """Each sample twice: the batch's halves are alike, so no error hides in their difference."""
    x = torch.randn(SAMPLES // 2, FEATURES, generator=torch.Generator().manual_seed(3)).repeat(2, 1)
    return x, x[:, :1].sin()


class Pass(NamedTuple):
    """A loss, and the gradient of each parameter in float64."""

    loss: float
    gradients: list[Tensor]


def gone_through(model: nn.Module, wide: bool, low: torch.dtype | None, scale: float) -> Pass:
    model = copy.deepcopy(model)
    x, y = samples()
    if wide:
        model, x, y = model.double(), x.double(), y.double()
    with torch.autocast("cpu", low, enabled=low is not None):
        output = model(x)
    output = output if wide else output.float()
    loss = (output - y).square().mean()
    (loss * scale).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return Pass(loss.item(), [g.double() / scale for g in gradients])


def errors(case: str, dtype: torch.dtype | None) -> tuple[float, float]:
    """The relative error of the loss, and the least SQNR of a gradient in dB, at the best scale."""
    torch.manual_seed(0)
    model = CASES[case].model()
    exact = gone_through(model, True, None, 1.0)
    largest = max(float(g.norm()) for g in exact.gradients)
    found = []
    for scale in (2.0**k for k in range(0, 17, 4)):
        low = gone_through(model, False, dtype, scale)
        off = abs(low.loss - exact.loss) / exact.loss
        ratios = [
            float((a - b).norm() / b.norm())
            for a, b in zip(low.gradients, exact.gradients, strict=True)
            if float(b.norm()) > 1e-12 * largest  # not zero by symmetry
        ]
        whole = all(map(math.isfinite, (off, *ratios)))
        found.append((off, -20 * math.log10(max(ratios))) if whole else (math.inf, -math.inf))
    return max(found, key=lambda pair: pair[1])


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`numerics.json` of a case's first step."""

    def look(case: str) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("model"))
            Path("case_model.py").write_text(
                RECIPE.format(case=case, size=SAMPLES), encoding="utf-8"
            )
            words = ["recipe=case_model.py", "device=cpu", "run.dir=run"]
            words += [
                "numerics.steps=1",
                "numerics.warmup=0",
                "numerics.span=1",
                "numerics.plots=false",
            ]
            assert main(["numerics", *words]) == 0
            found: dict[str, Any] = json.loads(Path("run/numerics.json").read_text())
            return found

    return look


@pytest.mark.parametrize("case", CASES)
def test_numerics_says_what_passes_in_float64_show(
    case: str, inspected: Callable[[str], dict[str, Any]]
) -> None:
    failing = set()
    for name, dtype in DTYPES.items():
        off, db = errors(case, dtype)
        if off > MAX_LOSS or db < NEEDED_DB:
            failing.add(name)
            assert off > CLEAR_LOSS * MAX_LOSS or db < NEEDED_DB - CLEAR_DB, (name, off, db)
        else:
            assert off < MAX_LOSS / CLEAR_LOSS, (name, off, db)
            assert db > NEEDED_DB + CLEAR_DB, (name, off, db)
    assert failing == CASES[case].fails
    off, db = errors(case, None)  # float32 itself
    assert off < 1e-4
    assert db > 60
    verdict = inspected(case)["verdict"]
    said = {name for name in DTYPES if not verdict["passes"][name]["within_tolerance"]}
    assert said == failing, verdict["reason"]
    assert verdict["float32"] is None
    assert verdict["float32_gradients"] is None
