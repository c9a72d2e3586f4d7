"""What a plan chooses where the user leaves it open, and what it checks before it times kernels."""

from __future__ import annotations

import pytest
import torch

from mprun.config import compose
from mprun.errors import UsageError
from mprun.precision import Policy, execution, rates
from mprun.precision.execution import EMULATED_FROM, choose_execution
from mprun.train.assemble import make_plan
from mprun.train.assemble.dtype_choices import build_policy

CPU = torch.device("cpu")
LINEAR = ["recipe=linear", "device=cpu"]


def policy(mode: str) -> Policy:
    return build_policy(compose([f"precision={mode}"]).config)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """A machine whose native bfloat16 takes 4.1 times as long; the dtypes that it tried."""
    dtypes: list[torch.dtype] = []

    def slowdown(dtype: torch.dtype, device: torch.device) -> float:
        dtypes.append(dtype)
        return 4.1

    monkeypatch.setattr(execution, "slowdown", slowdown)
    return dtypes


@pytest.mark.parametrize("mode", ["bf16_mixed", "bf16_true", "bf16_sr"])
def test_slow_native_bfloat16_is_emulated_and_the_plan_says_why(
    mode: str, tried: list[torch.dtype]
) -> None:
    plan = make_plan(compose([*LINEAR, f"precision={mode}"]).config, ())
    assert plan.execution == plan.choices["execution"] == "emulated"
    assert tried == [torch.bfloat16]
    (text,) = plan.warnings
    assert text.startswith("bfloat16 is computed in float32 and rounded: native bfloat16 kernels")
    assert "take 4.1 times as long as float32" in text


@pytest.mark.parametrize(("times", "chosen"), [(1.0, "native"), (EMULATED_FROM, "emulated")])
def test_the_measured_time_decides(
    times: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "slowdown", lambda *_: times)
    assert choose_execution("auto", policy("bf16_mixed"), CPU).name == chosen


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("bf16_mixed", ["execution=native"]),
        ("bf16_mixed", ["speed=plain"]),
        ("fp32", []),
        ("fp16_mixed", []),  # its slow ops alone are computed in float32
        ("half_sr", []),
    ],
)
def test_native_stays_native_without_a_trial(
    mode: str, words: list[str], tried: list[torch.dtype]
) -> None:
    plan = make_plan(compose([*LINEAR, f"precision={mode}", *words]).config, ())
    assert (plan.execution, plan.warnings, tried) == ("native", (), [])


def test_a_gpu_is_native_without_a_trial(tried: list[torch.dtype]) -> None:
    chosen = choose_execution("auto", policy("bf16_mixed"), torch.device("cuda"))
    assert (chosen.name, tried) == ("native", [])


@pytest.mark.parametrize(
    "mistake",
    [
        "precision.layers={nowhere: fp32}",
        "train.init_from=nowhere",
        "train.warmup_steps=11",
    ],
    ids=["policy", "data", "schedule"],
)
def test_a_mistake_is_reported_before_kernels_are_timed(
    mistake: str, tried: list[torch.dtype]
) -> None:
    composed = compose([*LINEAR, "precision=bf16_mixed", "train.max_steps=10", mistake])
    with pytest.raises(UsageError):
        make_plan(composed.config, composed.given)
    assert tried == []


@pytest.mark.parametrize(
    ("value", "execution"),
    [
        ("fp8_rowwise", "native"),
        ("bf16", "native"),  # a layer that keeps out
        ("forward=bf16,grad_input=fp8_rowwise,grad_weight=fp8_rowwise", "emulated"),
        ("mxfp8", "emulated"),
    ],
)
def test_products_of_single_layers_are_emulated_on_a_gpu_that_has_the_mode_s(
    value: str, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mprun.precision.execution.why_not_native", lambda gemms, device: None)
    gpu = torch.device("cuda")
    chosen = choose_execution("auto", policy("fp8_rowwise"), gpu, layers=[value])
    assert chosen.name == execution
    assert ("single layers" in str(chosen.why_emulated)) == (execution == "emulated")


def test_a_resumed_run_repeats_the_choice_without_a_trial(tried: list[torch.dtype]) -> None:
    config = compose([*LINEAR, "precision=bf16_mixed"]).config
    choices = make_plan(config, ()).choices
    for earlier in ("native", "emulated"):
        tried.clear()
        again = make_plan(config, (), {**choices, "execution": earlier})
        assert (again.execution, again.warnings, tried) == (earlier, (), [])


def test_what_must_be_emulated_says_why_and_cannot_be_native() -> None:
    chosen = choose_execution("auto", policy("half_sr_full"), CPU)
    assert (chosen.name, chosen.slowdown) == ("emulated", None)
    assert "rounding_scope=all" in str(chosen.why_emulated)
    with pytest.raises(ValueError, match=r"execution=native: .*legal: auto, emulated"):
        choose_execution("native", policy("half_sr_full"), CPU)


def test_a_trial_is_the_mean_factor_of_the_ops_and_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factors = iter([2.0, 4.0, 8.0])

    def alternate(pair: object, rounds: int) -> list[list[float]]:
        return [[1.0, 3.0], [9.0, next(factors)]]

    monkeypatch.setattr(rates, "alternate", alternate)
    monkeypatch.setattr(rates, "timer", lambda op, dtype, device, images: None)
    rates.slowdown.cache_clear()
    try:
        for _ in range(2):
            assert rates.slowdown(torch.bfloat16, CPU) == pytest.approx(4.0)
    finally:
        rates.slowdown.cache_clear()
