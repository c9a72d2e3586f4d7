"""Switches of lower precision: values, who set them, and findings only where they matter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mprun
from mprun.precision._torch_switches import backend_switches, set_backend_switches
from mprun.watch import audit as module
from mprun.watch.audit import (
    ATTENTION,
    LIBRARY_VARIABLES,
    MATMULS,
    TF32_BY_ENVIRONMENT,
    switch_findings,
    switch_settings,
)

MATMUL = "torch.backends.cuda.matmul.fp32_precision"


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for names in (*LIBRARY_VARIABLES.values(), (TF32_BY_ENVIRONMENT,)):
        for name in names:
            monkeypatch.delenv(name, raising=False)
    before, attention = (
        backend_switches(),
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
    )
    yield
    set_backend_switches(before)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(attention)


def test_an_environment_variable_that_pytorch_reads_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TF32_BY_ENVIRONMENT, "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as PyTorch does at its start
    rows = {x.name: x for x in switch_settings({"cuda"})}
    by = f"the environment variable {TF32_BY_ENVIRONMENT}"
    assert (rows[MATMUL].value, rows[MATMUL].set_by) == ("tf32", by)
    assert rows["NVIDIA_TF32_OVERRIDE"].set_by == "the environment"
    assert rows["torch.backends.cudnn.conv.fp32_precision"].set_by == "PyTorch's default"


def test_what_the_program_sets_is_named() -> None:
    torch.set_float32_matmul_precision("medium")
    rows = {x.name: x for x in switch_settings({"cpu", "cuda"})}
    assert (rows[MATMULS].value, rows[MATMULS].set_by) == ("medium", "the program")
    assert (rows[MATMUL].value, rows[MATMUL].set_by) == ("tf32", "the program")
    row = rows["torch.backends.mkldnn.matmul.fp32_precision"]
    assert (row.value, row.set_by) == ("bf16", "the program")
    text = str(mprun.audit(nn.Linear(2, 2)))
    assert f"switch: {MATMULS} = medium (the program)" in text


def test_switches_of_both_interfaces_can_be_read() -> None:
    """PyTorch raises an error where the older interface is asked and the newer one was used."""
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
    names = {x.name for x in switch_settings({"cpu"})}
    assert "torch.backends.mkldnn.matmul.fp32_precision" in names


def test_only_what_concerns_the_device_is_listed() -> None:
    names = [x.name for x in switch_settings({"cpu"})]
    assert not [name for name in names if "cuda.matmul" in name or "cudnn" in name]


# ---- findings ------------------------------------------------------------------------------------


def kinds(model: nn.Module, *computed: torch.dtype) -> list[tuple[str, str]]:
    return [(f.kind, f.module) for f in switch_findings(model, {*computed})]


@pytest.mark.parametrize("hardware", [True, False])
def test_onednn_in_bfloat16_is_found_where_the_cpu_has_it(
    hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "hardware_has", lambda mode: hardware)
    torch.set_float32_matmul_precision("medium")
    model = nn.Linear(2, 2)
    assert kinds(model) == ([("tf32", "")] if hardware else [])
    assert kinds(model.bfloat16()) == []
    if hardware:
        (finding,) = switch_findings(nn.Linear(2, 2), set())
        assert "7 bits of precision instead of 23, by the program" in finding.text
        assert "\n" not in finding.fix


def test_onednns_own_variable_counts_for_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hardware_has", lambda mode: mode == "bf16")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    assert kinds(nn.Linear(2, 2)) == []
    assert kinds(nn.Conv2d(2, 2, 1)) == [("tf32", "")]
    (finding,) = switch_findings(nn.Conv2d(2, 2, 1), set())
    assert "by the environment: ONEDNN_DEFAULT_FPMATH_MODE" in finding.text


def test_reduced_attention_is_found_in_16_bits_only() -> None:
    attention = nn.Sequential(nn.MultiheadAttention(4, 1))
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    assert kinds(attention) == []
    assert kinds(nn.Linear(2, 2), torch.bfloat16) == []
    assert kinds(attention, torch.bfloat16) == [("reduced_precision_reduction", "0")]
    (finding,) = switch_findings(attention, {torch.bfloat16})
    assert f"{ATTENTION}(False)" in finding.fix


def test_pytorchs_defaults_are_no_finding() -> None:
    for model in (nn.Linear(2, 2), nn.Conv2d(2, 2, 1).half(), nn.MultiheadAttention(4, 1)):
        assert kinds(model, torch.bfloat16, torch.float16) == []
