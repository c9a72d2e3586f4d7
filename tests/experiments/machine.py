"""This machine, examined once in a test run.

No test compares a measured time with a bound: loads differ on a busy machine. `benchmarks.roofline`
does that.
"""

from __future__ import annotations

import functools

import pytest
import torch

from mprun.doctor.measure import measure_bandwidths
from mprun.inspect import step_roofline
from mprun.inspect.machine_examination import examine
from mprun.results.doctor_result import Examination
from mprun.results.roofline_result import Bandwidth

BUDGET_S = 0.3


@functools.cache
def examined() -> Examination:
    return examine("cpu", BUDGET_S)


@functools.cache
def bandwidths() -> list[Bandwidth]:
    return measure_bandwidths(torch.device("cpu"), [2**16, 2**18, 2**20])


def measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's step is held against the rates of this examination, and so is what doctor says."""
    monkeypatch.setattr("mprun.inspect.step_roofline.examine", lambda *args: examined())
    monkeypatch.setattr(step_roofline, "measure_bandwidths", lambda *args: bandwidths())
