"""What is said to be true of the hostile models is true, by PyTorch's own training."""

from __future__ import annotations

import pytest
import torch

from tests.adversarial.models import CASES, MODES, loss_of, points
from tests.adversarial.oracle import fails, trained
from tests.adversarial.seeds import SEEDS

ZERO = 1e-13
"""Gradients that cancel, relative to the largest of the model: float64 has 2e-16 a number."""


@pytest.mark.representative("bf16_hostile-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_the_named_modes_fail_and_no_others(case: str, seed: int) -> None:
    exact = trained(case, "fp32", seed)
    assert exact.accuracy > 0.8
    assert not fails(exact, trained(case, "fp64", seed))
    failing = {mode for mode in MODES if fails(trained(case, mode, seed), exact)}
    assert failing == CASES[case].fails


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_the_named_gradients_are_zero_in_float64_and_no_others(case: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = CASES[case].model().double()
    inputs, targets = points(64, seed, CASES[case].outlier)
    loss_of(case)(model(inputs.double()), targets).backward()
    sizes = {name: float(p.grad.abs().max()) for name, p in model.named_parameters()}  # type: ignore[union-attr]
    largest = max(sizes.values())
    assert {name for name, size in sizes.items() if size < ZERO * largest} == set(CASES[case].zero)
