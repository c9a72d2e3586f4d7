"""Memory of a step: bytes counted by hand, sums, and what the step must not touch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mprun.build import footprint, plan
from mprun.config import compose
from mprun.numerics.footprint import memory

PARAMETERS = (1024 * 512 + 512) * 4
INPUTS = 64 * 1024 * 4
TARGETS = OUTPUT = 64 * 512 * 4


def measured(*words: str) -> dict[str, int]:
    return footprint(plan(compose(words).config, ()))


def linear(*words: str) -> dict[str, int]:
    return measured("recipe=linear", "speed=plain", "device=cpu", *words)


def test_linear_with_sgd_equals_hand_computed_bytes() -> None:
    found = linear()
    assert found["parameters"] == PARAMETERS
    assert found["gradients"] == PARAMETERS
    assert found["buffers"] == found["optimizer_state"] == 0
    # At the end of the backward pass: inputs, targets, output, the loss and its gradient, and the
    # gradient of the output, made in the backward pass, still held for the bias.
    assert found["activations"] == INPUTS + TARGETS + OUTPUT + 2 * 4
    assert found["temporary"] == OUTPUT


def test_linear_with_fused_adamw_adds_two_moments_and_a_step_count_per_tensor() -> None:
    found = linear("train.optimizer.name=adamw", "speed=auto")
    assert found["optimizer_state"] == 2 * PARAMETERS + 2 * 4


def test_momentum_is_optimizer_state() -> None:
    assert linear("train.optimizer.momentum=0.9")["optimizer_state"] == PARAMETERS


@pytest.mark.parametrize("recipe", ["linear", "mnist", "fashion_mnist"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_categories_sum_to_the_peak_and_repeat_exactly(recipe: str, precision: str) -> None:
    words = [f"recipe={recipe}", f"precision={precision}", "device=cpu"]
    if recipe != "linear":
        words.append("data.source=generated")
    first, second = measured(*words), measured(*words)
    assert first == second
    assert first["peak"] == sum(v for k, v in first.items() if k != "peak")


def test_autocast_keeps_16_bit_copies_of_the_weights() -> None:
    words = ("recipe=fashion_mnist", "data.source=generated", "device=cpu", "speed=auto")
    fp32 = measured(*words)
    bf16 = measured(*words, "precision=bf16_mixed")
    assert bf16["parameters"] == fp32["parameters"]
    assert bf16["peak"] > fp32["peak"]  # more, not less, where weights outweigh activations


def test_accumulation_lowers_activations_and_not_parameters() -> None:
    words = ("recipe=fashion_mnist", "data.source=generated", "device=cpu")
    whole = measured(*words, "train.batch_size=48")
    split = measured(*words, "train.batch_size=12", "train.accumulate=4")
    assert split["parameters"] == whole["parameters"]
    assert split["peak"] < whole["peak"]


def test_measuring_leaves_the_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    linear()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_frozen_parameter_has_no_gradient() -> None:
    model = nn.Linear(8, 4)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    found = memory(step, model, optimizer).totals
    assert found["parameters"] == (8 * 4 + 4) * 4
    assert found["gradients"] == 8 * 4 * 4
