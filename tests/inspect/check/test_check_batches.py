"""Whether a sample's output depends on its batch, and whether a step repeats its bits."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mprun
from mprun.inspect.check.check_batches import checksum
from mprun.inspect.check.check_result import CheckRecord, Finding, check_parts

COUNT = itertools.count(1)


class Centered(nn.Module):
    """Its mean is over the batch, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Unseeded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.default_rng().random())


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * next(COUNT)


class SoftmaxOverTheBatch(nn.Module):
    """As FashionMNIST's tutorial has it: the model's own forward is to blame."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.layer(x), dim=0)


class Gathered(nn.Module):
    """Adds by index within each sample."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1]) % 4
        return torch.zeros(len(x), 4).index_add(1, index, x)


class OtherFormula(nn.Module):
    """In bfloat16 alone, for one sample alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5 if x.dtype == torch.bfloat16 and len(x) == 1 else x


class Unable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64 or len(x) == 1:
            raise TypeError("float32 batches only")
        return x


def record_of(model: nn.Module, mode: str) -> CheckRecord:
    torch.manual_seed(0)
    x = torch.randn(16, 6)
    batch = x, x[:, :3].argmax(1)
    record = mprun.check(model, batch, F.cross_entropy, precision=mode, fast=True).record
    assert isinstance(record, CheckRecord)
    return record


def findings(model: nn.Module, mode: str = "fp32,bf16_mixed") -> list[Finding]:
    kinds = ("depends_on_batch", "not_repeatable")
    modes = record_of(model, mode).modes
    return [x for mode in modes for x in mode.findings if x.kind in kinds]


def between(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *parts, nn.Linear(6, 3))


def test_a_mean_over_the_batch_is_found_in_its_module() -> None:
    found, again = findings(between(nn.BatchNorm1d(6), Centered()))
    assert found == again  # in both modes: no dtype is the reason
    assert (found.kind, found.module) == ("depends_on_batch", "2")
    assert "test_check_batches.py" in found.line
    assert found.at > 1e-3


def test_the_models_own_softmax_over_the_batch_is_found() -> None:
    (found,) = findings(SoftmaxOverTheBatch(), "fp32")
    assert (found.kind, found.module) == ("depends_on_batch", "")


def test_a_formula_of_a_mode_and_a_batch_of_one_is_found_there() -> None:
    (found,) = findings(between(OtherFormula()))
    assert (found.kind, found.module, found.op) == ("depends_on_batch", "1", "mul")
    assert "runs in its place" in found.text
    assert "test_check_batches.py" in found.line


def test_bits_that_a_kernel_for_one_row_makes_are_a_note() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.Linear(256, 3))
    (mode,) = record_of(model, "fp32").modes
    x = torch.randn(16, 6)
    for note in mode.notes:  # other hardware may have the same bits
        assert re.search(r"addmm.*than alone: in float32 by [1-9.]+e-\d+ of it, rounding", note)
    with torch.no_grad():
        assert bool(mode.notes) or torch.equal(model(x)[:1], model(x[:1]))
    assert not mode.of("robust")


def test_why_a_model_is_not_asked_is_a_line() -> None:
    record = record_of(between(Unable()), "fp32")
    (line,) = [x for x in check_parts(record) if str(x).startswith("note on fp32: not known")]
    assert "in fp64 TypeError: float32 batches only" in str(line)


def test_a_checksum_sees_a_permutation() -> None:
    x = torch.randn(1000)
    assert checksum(x) == checksum(x.clone()) != checksum(x.flip(0))
    assert checksum(x.bfloat16()) != checksum(x.bfloat16().roll(1))


@pytest.mark.parametrize("part", [Unseeded(), Counting()])
def test_numbers_without_a_seed_are_found_at_their_op(part: nn.Module) -> None:
    (found,) = findings(between(part), "fp32")
    assert (found.kind, found.module) == ("not_repeatable", "1")
    assert found.op in ("mul", "add")
    assert "reads numbers that no seed decides" in found.text
    assert "test_check_batches.py" in found.line


@pytest.mark.parametrize(
    "part",
    [
        nn.Dropout(0.3),
        nn.BatchNorm1d(6),
        nn.LayerNorm(6),
        nn.Sequential(nn.Linear(6, 8), Gathered(), nn.Linear(4, 6)),
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
    ],
)
def test_healthy_models_have_no_finding(part: nn.Module) -> None:
    if isinstance(part, nn.TransformerEncoderLayer):
        part = nn.Sequential(nn.Unflatten(1, (1, 6)), part, nn.Flatten())
    assert findings(between(part)) == []
