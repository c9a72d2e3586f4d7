"""Backend switches are set from the policy and put back on every way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from mprun.precision import backend_flags
from tests.each import each
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


@each("name", ["fp32", "bf16_mixed"])
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


def by_flags() -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"  # type: ignore[attr-defined]


def by_old_attribute() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    assert not torch.backends.cuda.matmul.allow_tf32


def by_old_attribute_of_cudnn() -> None:
    torch.backends.cudnn.allow_tf32 = True


def by_precision() -> None:
    torch.set_float32_matmul_precision("high")
    assert torch.get_float32_matmul_precision() == "highest"


def by_reduction() -> None:
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation


CHANGES: dict[str, Callable[[], None]] = {
    "cudnn.conv.fp32_precision to 'tf32'": by_flags,
    "cuda.matmul.fp32_precision to 'tf32'": by_old_attribute,
    "cudnn.rnn.fp32_precision to 'tf32'": by_old_attribute_of_cudnn,
    "mkldnn.matmul.fp32_precision to 'tf32'": by_precision,
    "cuda.matmul.allow_fp16_accumulation to True": by_reduction,
}


@each("change", CHANGES)
def test_what_a_model_s_code_sets_is_put_back_and_warned_of_once(change: str) -> None:
    """In either of PyTorch's two interfaces, which it does not let disagree."""
    before = switches(), torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        with backend_flags(policy("fp32")):
            for _ in range(2):
                CHANGES[change]()
        texts = [str(w.message) for w in caught if "model's code" in str(w.message)]
    expected = f"the model's code set torch.backends.{change} during a run; the run keeps"
    assert sum(x.startswith(expected) for x in texts) == 1, texts
    after = switches(), torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    assert after == before


def test_setting_what_holds_anyway_raises_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with backend_flags(policy("fp32")):
            torch.backends.cudnn.benchmark = True
            torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.benchmark = False


def test_a_region_inside_another_has_its_own_switches() -> None:
    """`doctor` and `speed=auto` time ops in the middle of things."""
    with backend_flags(policy("fp32")):
        with backend_flags(policy("tf32"), native_tf32=True):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            assert torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert not torch.backends.cudnn.allow_tf32
