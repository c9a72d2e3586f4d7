"""The estimate of a recipe's step on several processes: what is sent, counted by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.inspect.step_roofline import plan_step, recipe_roofline, recipe_scaling
from mprun.records.reader import read_json
from mprun.results.doctor_result import SCHEMA_VERSION, Examination
from mprun.results.estimates import ScalingEstimate
from mprun.results.memory_result import ParallelKind
from tests.experiments import machine
from tests.experiments.machine import measure_nothing
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("native_is_fast")

NUMBERS = 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10  # of mnist's model
MNIST = ["recipe=mnist", "device=cpu", "train.batch_size=16"]
QUICK = ["recipe=linear", "device=cpu", "doctor.steps=4"]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examination:
    measure_nothing(monkeypatch)
    return machine.examined()


def scaling(
    examined: Examination, parallel: ParallelKind, *overrides: str, steps: int = 0
) -> ScalingEstimate:
    planned = plan_step([*MNIST, *overrides])
    roof = recipe_roofline(planned, examined, steps)
    return recipe_scaling(planned, roof, parallel, 8, ["pcie4"])


@pytest.mark.parametrize(
    ("parallel", "precision", "nbytes"),
    [
        ("ddp", "fp32", 2 * 4 * NUMBERS),
        ("ddp", "bf16_mixed", 2 * 4 * NUMBERS),
        ("ddp", "bf16_sr", 2 * 4 * NUMBERS),  # gradients are added up in float32
        ("fsdp2", "fp32", 3 * 4 * NUMBERS),
        ("fsdp2", "bf16_mixed", (2 * 2 + 4) * NUMBERS),
        ("fsdp2", "bf16_sr", (2 * 2 + 4) * NUMBERS),
    ],
)
def test_what_is_sent(
    parallel: ParallelKind, precision: str, nbytes: int, examined: Examination
) -> None:
    found = scaling(examined, parallel, f"precision={precision}")
    assert conforms(found, ScalingEstimate)
    assert found.sent_bytes == nbytes * 7 // 8
    assert found.compute_from == "least time"  # no step was measured
    assert (found.gather_dtype is None) == (parallel == "ddp")


def test_a_measured_step_is_taken(examined: Examination) -> None:
    planned = plan_step(MNIST)
    roof = recipe_roofline(planned, examined, 4)
    found = recipe_scaling(planned, roof, "ddp", 8, ["pcie4"])
    assert (found.compute_ms, found.compute_from) == (roof.step_time_ms.median, "measured step")


def test_the_step_of_an_emulation_is_not_taken(examined: Examination) -> None:
    found = scaling(examined, "ddp", "precision=half_sr_full", steps=2)
    assert found.compute_from == "least time"


def test_the_record_is_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, examined: Examination
) -> None:
    words = ["doctor.world_size=8", "doctor.parallel=fsdp2", "doctor.links=[nvlink4,ethernet_100g]"]
    assert main(["doctor", *QUICK, *words, "doctor.json=true"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    file = tmp_path / "doctor.json"
    file.write_text(out)
    found = read_json(file, Examination, SCHEMA_VERSION).scaling
    assert found is not None
    assert json.loads(out)["scaling"] == asdict(found)
    assert found.estimate is True
    assert (found.world_size, found.parallel) == (8, "fsdp2")
    assert [link.link for link in found.links] == ["nvlink4", "ethernet_100g"]
    old = asdict(examined)
    del old["scaling"]
    file.write_text(json.dumps(old))
    assert read_json(file, Examination, SCHEMA_VERSION).scaling is None


def test_the_terminal_says_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_nothing(monkeypatch)
    assert main(["doctor", *QUICK, "doctor.world_size=8"]) == 0
    out = capsys.readouterr().out
    assert "ESTIMATE: a step on 8 processes, ddp" in out
    assert "ESTIMATE, not measured: links reach their published rates" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["recipe=mnist", "doctor.world_size=0"], "doctor.world_size=0: legal is 1 or more"),
        (["recipe=mnist", "doctor.links=[nvlink]"], "did you mean 'nvlink"),
        (["recipe=mnist", "doctor.links=[pcie]"], "did you mean 'pcie"),
        (["recipe=mnist", "doctor.links=ethernet_10"], "did you mean 'ethernet_1"),
        (["recipe=mnist", "doctor.parallel=dpp"], "did you mean 'ddp'?"),
        (["doctor.world_size=8"], "add recipe=NAME"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "device=cpu", *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_settings_without_processes_are_warned_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mprun.inspect.step_roofline.examine", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor", "device=cpu", "doctor.parallel=fsdp2"])
    assert "doctor.parallel has no effect: doctor.world_size is 1" in capsys.readouterr().err
