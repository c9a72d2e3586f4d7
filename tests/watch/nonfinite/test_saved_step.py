"""The capture of a step: that it changes no bit, and what its file holds."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mprun.inspect.replay import read_step
from mprun.watch.nonfinite.saved_step import SMALL_BYTES, UNSAVED, SavedStep, StepCapture
from tests.watch.nonfinite import capturing

FILE = Path("step.pt")


def captured(model: nn.Module, *calls: tuple[Any, ...], **named: Any) -> SavedStep:
    """The file of a step with these calls."""
    with capturing(model, torch.optim.SGD(model.parameters())) as capture:
        for args in calls:
            model(*args, **named)
        capture.save(FILE, 5, "why")
    return read_step(FILE)


def test_a_step_without_a_call_is_not_saved() -> None:
    with pytest.raises(ValueError, match="step 1 cannot be saved: the model was not called in it"):
        StepCapture(nn.Linear(2, 2), []).save(FILE, 1, "x")


class Rows(NamedTuple):
    x: Tensor


@dataclass
class Options:
    scale: float
    mask: Tensor


class Kind(IntEnum):
    A = 3


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.fc(torch.ones(1, 2))
        return out


def test_inputs_become_tensors_and_plain_values() -> None:
    ones = torch.ones(1, 2, requires_grad=True)
    saved = captured(
        Takes(),
        (Rows(ones), [1, "a", None, Kind.A], UserDict(k=2.5)),
        options=Options(2.0, torch.zeros(1)),
        array=np.arange(3),
        size=torch.Size([2]),
        dtype=torch.float16,
        other=object(),
    )
    call = saved.calls[0]
    assert call.args[1:] == [[1, "a", None, 3], {"k": 2.5}]
    assert isinstance(call.args[0], tuple)
    assert torch.equal(call.args[0][0], ones)
    assert call.kwargs["options"] == {"scale": 2.0, "mask": torch.zeros(1)}
    assert call.kwargs["array"].tolist() == [0, 1, 2]
    assert call.kwargs["size"] == torch.Size([2])
    assert call.kwargs["dtype"] is torch.float16
    assert call.kwargs["other"] == {UNSAVED: "object"}
    assert call.needs_grad == [True, False]
    assert "object cannot be saved" in saved.notes


def test_a_part_of_a_large_tensor_is_saved_alone() -> None:
    captured(Takes(), (torch.zeros(10_000_000)[:2],))
    assert FILE.stat().st_size < 100_000


def test_facts_of_the_step_are_saved() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    saved = captured(model, (torch.randn(3, 2),), (torch.randn(3, 2),))
    assert (saved.step, saved.reason, saved.model, saved.optimizers) == (
        *(5, "why", "Sequential"),
        ["SGD"],
    )
    assert (saved.frozen, saved.in_evaluation) == (["0.weight"], ["1"])
    assert len(saved.calls) == 2
    assert not torch.equal(saved.calls[0].args[0], saved.calls[1].args[0])
    assert saved.parameters.keys() == dict(model.named_parameters()).keys()


def test_buffers_are_those_from_before_the_first_call() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    large = torch.zeros(SMALL_BYTES // 4 + 1)
    model.register_buffer("large", large, persistent=False)
    with capturing(model) as capture:
        for step in range(3):
            before = {k: x.clone() for k, x in model.named_buffers()}
            for _ in range(2):
                model(torch.randn(4, 2))
            large += step
            capture.save(FILE, step, "x")
            saved = read_step(FILE).buffers
            assert saved.keys() == before.keys()
            assert all(torch.equal(saved[k], x) for k, x in before.items())
            capture.next_step()
        model[0].running_mean = torch.full((2,), 7.0)  # another tensor
        model(torch.randn(4, 2))
        capture.save(FILE, 4, "x")
        assert read_step(FILE).buffers["0.running_mean"].tolist() == [7, 7]


def test_an_input_changed_in_place_is_noted() -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    assert not captured(model, (x,)).notes
    with capturing(model) as capture:
        model(x)
        x.zero_()
        capture.save(FILE, 1, "x")
        assert read_step(FILE).notes == [
            "tensor 0 of the model's inputs in call 1 was changed in place after the call: the "
            "changed values are saved"
        ]


def test_evaluations_and_recomputations_are_no_calls() -> None:
    model = nn.Linear(2, 1)
    with capturing(model) as capture:
        x = torch.ones(1, 2)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        capture.save(FILE, 1, "x")
        assert len(read_step(FILE).calls) == 1


def test_a_parameter_that_is_returned_gets_no_lasting_hook() -> None:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.scale, self.scale

    model = Clip()
    with capturing(model) as capture:
        for _ in range(3):
            model(torch.ones(1))
            capture.next_step()
        assert not model.scale._backward_hooks


def test_a_parameter_of_another_kind_is_refused() -> None:
    model = nn.Linear(2, 1)
    with capturing(model) as capture:
        model(torch.ones(1, 2))
        model.weight = nn.Parameter(torch.ones(1, 2).to_sparse())  # as a sharded one would be
        with pytest.raises(TypeError, match="weight is a Parameter, which cannot be saved"):
            capture.save(FILE, 1, "x")
        assert not FILE.exists()
