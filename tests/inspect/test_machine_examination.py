"""The whole examination of this machine; what it says follows from what it found."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mprun import __version__
from mprun.config import Composed, compose
from mprun.errors import MprunError
from mprun.inspect import machine_examination as module
from mprun.inspect.machine_examination import ATEN, conclusions, examine, examine_modes, findings
from mprun.precision import execution
from mprun.precision.gemms import RECIPES
from mprun.records.mode_names import SHIPPED_MODES
from mprun.records.policy_columns import FORMAT_MODES
from mprun.train.machine.doctor_result import SCHEMA_VERSION, Examination, Mode
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("native_is_fast")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "precision"
BUDGET_S = 0.3


@pytest.fixture(scope="module")
def found() -> Examination:
    return examine("cpu", BUDGET_S)


def test_every_field_has_its_type(found: Examination) -> None:
    assert conforms(found, Examination)


def test_it_says_of_what_and_by_what(found: Examination) -> None:
    assert found.schema_version == SCHEMA_VERSION == 3
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


# ---- modes are what a run in them would be -------------------------------------------------------


@cache
def _composed(overrides: tuple[str, ...]) -> Composed:
    return compose(overrides)


def composed(overrides: list[str]) -> Composed:
    """`compose`, once for each configuration."""
    return _composed(tuple(overrides))


def examined(
    monkeypatch: pytest.MonkeyPatch,
    fp32_fallback: str,
    tf32: bool = False,
    device: torch.device = CPU,
) -> dict[str, Mode]:
    """The modes by name, on a machine whose kernels were found to be so."""
    monkeypatch.setattr(module, "choose_fp32_fallback", lambda *_: fp32_fallback)
    monkeypatch.setattr(execution, "has_tf32", lambda device: tf32)
    monkeypatch.setattr(module, "compose", composed)
    rows = examine_modes(device, {"bfloat16": True, "float16": False})
    return {row.name: row for row in rows}


def test_every_file_is_a_row_in_the_table_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = examined(monkeypatch, "none")
    assert list(rows) == list(SHIPPED_MODES)
    assert {*rows} == {p.stem for p in CONF.glob("*.yaml")}
    assert all(conforms(row, Mode) for row in rows.values())


def test_columns_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in examined(monkeypatch, "none").items():
        said = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
        assert row.format == ("tf32" if said["tf32"] else said["compute_dtype"])
        half = said["compute_dtype"] == "float16"
        assert row.loss_scale == ("dynamic" if half else "none")


def test_on_a_cpu_tf32_and_full_rounding_are_emulated_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = examined(monkeypatch, "none")
    emulated = {name: row for name, row in rows.items() if row.execution == "emulated"}
    assert set(emulated) == {"tf32", "half_sr_full", *FORMAT_MODES}
    assert "cpu has no float8 matmuls" in str(rows["fp8_rowwise"].why_emulated)
    assert "no TensorFloat-32" in str(rows["tf32"].why_emulated)
    assert "rounding_scope=all" in str(rows["half_sr_full"].why_emulated)
    assert {row.accelerated for row in emulated.values()} == {None}
    assert {rows[n].why_emulated for n in rows if n not in emulated} == {None}


def test_hardware_with_tf32_has_it_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    rows = examined(monkeypatch, "none", tf32=True, device=CUDA)
    assert rows["tf32"].execution == "native"
    assert rows["half_sr_full"].execution == "emulated"
    assert "this GPU has compute capability 8.0" in str(rows["fp8_tensorwise"].why_emulated)


@pytest.mark.parametrize(
    ("capability", "native"),
    [((8, 9), {"fp8_tensorwise"}), ((9, 0), {*RECIPES}), ((10, 0), {*RECIPES})],
)
def test_hardware_with_float8_has_torchao_s_products(
    capability: tuple[int, int], native: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rows = examined(monkeypatch, "none", tf32=True, device=CUDA)
    assert {name for name in FORMAT_MODES if rows[name].execution == "native"} == native


def test_native_16_bit_modes_say_what_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = examined(monkeypatch, "none")
    said = {name: row.accelerated for name, row in rows.items()}
    assert said == {
        "fp64": None,
        "fp32": None,
        "tf32": None,
        "bf16_mixed": True,
        "fp16_mixed": False,
        "bf16_true": True,
        "fp16_true": False,
        "bf16_sr": True,
        "half_sr": False,
        "half_sr_full": None,
        **dict.fromkeys(FORMAT_MODES),
    }


@pytest.mark.parametrize(
    ("fp32_fallback", "substituted"),
    [("none", []), ("backward", ["convolution_backward"]), ("all", list(ATEN))],
)
def test_ops_computed_in_float32_are_those_of_a_run(
    fp32_fallback: str, substituted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = examined(monkeypatch, fp32_fallback)
    assert rows["fp16_mixed"].substituted == substituted
    assert rows["half_sr_full"].substituted == []  # emulation has none
