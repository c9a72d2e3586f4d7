"""The whole examination of this machine; what it says follows from what it found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mprun import __version__
from mprun.errors import MprunError
from mprun.inspect import machine_examination as module
from mprun.inspect.machine_examination import examine
from mprun.train.machine.doctor_result import SCHEMA_VERSION, Examination
from mprun.train.machine.machine_findings import conclusions, findings
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("native_is_fast")

CPU = torch.device("cpu")


BUDGET_S = 0.3


@pytest.fixture(scope="module")
def found() -> Examination:
    return examine("cpu", BUDGET_S)


def test_every_field_has_its_type(found: Examination) -> None:
    assert conforms(found, Examination)


def test_it_says_of_what_and_by_what(found: Examination) -> None:
    assert found.schema_version == SCHEMA_VERSION == 2
    assert found.mprun_version == __version__
    assert found.budget_s == BUDGET_S
    assert found.measured_s > 0
    assert found.versions["torch"] == torch.__version__.partition("+")[0]
    assert found.versions["cuda"] == torch.version.cuda
    assert 1 <= found.threads <= found.machine.threads == torch.get_num_threads()


def test_what_it_says_follows_from_what_it_found(found: Examination) -> None:
    assert found.findings == findings(found)
    assert found.conclusions == conclusions(found)
    named = {name for c in found.conclusions for name in c.modes}
    assert named == {m.name for m in found.modes} - {"fp32"}


def test_rates_are_measured_with_the_threads_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def measure(device: torch.device, budget_s: float, report: object) -> Any:
        seen.append(torch.get_num_threads())
        raise torch.OutOfMemoryError("planted")

    before = torch.get_num_threads()
    monkeypatch.setattr(module, "measure_rates", measure)
    monkeypatch.setattr(module, "threads_to_measure", lambda machine: before + 1)
    with pytest.raises(MprunError, match="out of memory on cpu while measuring"):
        examine("cpu", 0.5)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
