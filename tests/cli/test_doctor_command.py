"""`mprun doctor`: what it prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.inspect.machine_examination import examine
from mprun.records.console import ReportPart
from mprun.train.machine.doctor_result import Examination
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("native_is_fast")

QUICK = ["device=cpu", "doctor.budget_s=0.3"]


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are measured once; each test prints them in its way."""
    monkeypatch.setattr("mprun.inspect.machine_examination.examine", _examined)


def _examined(device: str, budget_s: float, report: ReportPart) -> Examination:
    if (device, budget_s) not in _measured:
        _measured[device, budget_s] = examine(device, budget_s, report)
    return _measured[device, budget_s]


_measured: dict[tuple[str, float], Examination] = {}


def test_tables_are_printed_and_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("measuring for about 0.3 s ...\n")  # more lines on a slow machine
    for text in (
        "PyTorch's own kernels: ",
        "measured rates of matmuls in ",
        "256x256x256",
        "bf16_mixed",
        "half_sr_full",
        "emulated here: for accuracy, not for speed",
    ):
        assert text in out, text
    assert list(Path().iterdir()) == []


RECIPE = ["recipe=mnist", "precision=bf16_mixed", "train.batch_size=16", "doctor.steps=4"]


def test_a_recipe_is_held_against_the_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *QUICK, *RECIPE]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("mnist, bf16_mixed, batch 16: a step takes ")
    assert "of the roof" in out
    assert "formats of 8 bits or fewer: none pays here, cpu has no float8 matmuls" in out
    assert "measured rates" not in out
    assert list(Path().iterdir()) == []


def test_json_is_one_object_with_a_recipe_s_roofline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", *QUICK, *RECIPE, "doctor.json=true"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert conforms(found, Examination)
    assert (found["budget_s"], found["machine"]["hardware"]["device"]) == (0.3, "cpu")
    assert found["roofline"]["step_time_ms"]["n"] == 4
    assert found["formats"] == []


@pytest.mark.parametrize(("speed", "keep"), [("auto", True), ("plain", False)])
def test_page_faults_of_a_plain_step_are_not_prevented(
    speed: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def stop(*args: object) -> None:
        raise UsageError("planted")

    monkeypatch.setattr("mprun.train.machine.conditions.steady_heap", lambda: seen.append(True))
    monkeypatch.setattr("mprun.inspect.machine_examination.examine", stop)
    assert main(["doctor", *QUICK, *RECIPE, f"speed={speed}"]) == 2
    assert seen == [True] * keep


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (
            ["precision=fp32"],
            [
                "mprun doctor does not take 'precision=fp32' without recipe=NAME",
                "legal: device, recipe, doctor.",
            ],
        ),
        (["recipe=mnist", "doctor.steps=-1"], ["doctor.steps=-1: legal is"]),
        (["device=gpu"], ["device=gpu", "legal: auto, cpu, cuda, xpu, mps, hpu"]),
    ],
    ids=str,
)
def test_a_mistake_ends_with_status_2_and_nothing_measured(
    words: list[str],
    fragments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mprun.inspect.machine_examination.examine", None)
    assert main(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mprun: ")
    assert err.count("\n") == 1
    assert [text for text in fragments if text not in err] == [], err
