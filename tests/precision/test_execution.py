"""Backend switches are set from the policy and put back on every way out."""

from __future__ import annotations

import pytest
import torch

from mprun.precision import backend_flags
from tests.precision.test_policy import policy


def switches() -> dict[str, object]:
    backends = torch.backends
    return {
        "cuda.matmul": backends.cuda.matmul.fp32_precision,
        "cudnn.conv": backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "cudnn.rnn": backends.cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
        "mkldnn.matmul": backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "mkldnn.conv": backends.mkldnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "bf16 reduction": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16 reduction": backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    }


@pytest.mark.parametrize("name", ["fp32", "bf16_mixed"])
def test_float32_is_ieee_inside_and_all_is_restored_after(name: str) -> None:
    before = switches()
    with backend_flags(policy(name)):
        inside = switches()
    assert set(inside.values()) == {"ieee", False}
    assert switches() == before


def test_a_users_own_settings_survive_an_error() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    before = switches()
    try:
        with pytest.raises(RuntimeError, match="planted"), backend_flags(policy("fp32")):
            raise RuntimeError("planted")
        assert switches() == before
    finally:
        torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
        torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]


def test_float32_matmuls_are_float32_although_the_process_allows_bfloat16() -> None:
    """An oracle in float64: IEEE float32 errs by some 1e-6, bfloat16 inputs by some 1e-2."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    try:
        with backend_flags(policy("fp32")):
            error = (a @ b - exact).abs().max()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]
    assert error < 1e-3  # 256 terms of size 1: far below bfloat16's, far above float32's error
