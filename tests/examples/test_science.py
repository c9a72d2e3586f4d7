"""The examples of science: their formulas against exact answers in float64, and their training."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from mprun.cli.main import main
from mprun.records.run_record import read_lines, read_summary
from tests.examples.recipes import EXAMPLES, recipe

STEPS = {"pinn": 64, "burgers": 64, "forces": 64, "graph_sum": 64, "ode": 16}


def example(name: str) -> ModuleType:
    """An example's code; its draws are always the same."""
    module = ModuleType(name)
    exec(EXAMPLES[name].read_text(encoding="utf-8"), vars(module))
    torch.manual_seed(0)
    return module


@pytest.mark.parametrize("name", ["pinn", "burgers"])
def test_the_exact_answer_solves_the_equation(name: str) -> None:
    module = example(name)
    residual = module.forward(module.exact, module.data()["test"])["residual"]
    assert residual.abs().max() < 1e-13  # terms reach 10 to 20; float32 leaves 2e-6


def test_forces_are_exact_and_turn_with_their_cluster() -> None:
    module = example("forces")
    test = module.data()["test"]
    between = test["x"][:, :, None] - test["x"][:, None]
    r = between.norm(dim=3) + torch.eye(module.ATOMS)
    force = ((48 * r**-14 - 24 * r**-8)[..., None] * between).sum(2)
    assert (test["forces"] - force).abs().max() < 1e-12 * force.abs().max()
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=force.dtype))[0]
    for energy in (module.lennard_jones, module.model().double()):
        here, there = (module.forward(energy, {"x": x}) for x in (test["x"], test["x"] @ turn + 2))
        here["forces"] = here["forces"] @ turn
        for key, value in here.items():  # thousands of roundings of 1e-16
            assert (there[key] - value).abs().max() < 1e-12 * value.abs().max()


def test_diffusion_is_a_product_with_a_matrix() -> None:
    module = example("graph_sum")
    values, answers = module.data()["test"]
    ties = torch.zeros(module.NODES, module.NODES, dtype=torch.float64)
    ties[tuple(module.edges().flip(0))] = 1
    step = torch.lerp(torch.eye(module.NODES).double(), ties / ties.sum(1, True), module.RATE)
    torch.testing.assert_close(answers, step @ step @ values, rtol=0, atol=1e-13)


def test_the_adjoint_is_the_gradient_of_all_steps_and_the_path_a_circle() -> None:
    module = example("ode")
    model, (y, circle) = module.model().double(), module.data()["test"]
    error = module.STEPS * module.H**5 / 120  # of the method; found paths differ by it too
    law = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    assert (module.Path.apply(lambda y: y @ law, y) - circle).norm() < 2 * error * circle.norm()
    paths, states = [module.forward(model, (y,))], []
    for _ in range(module.STEPS):
        states.append(y := module.step(model, y, module.H))
    paths.append(torch.stack(states, 1))
    grads = [torch.autograd.grad(x.square().mean(), [*model.parameters()]) for x in paths]
    mine, exact = (torch.cat([grad.flatten() for grad in each]) for each in grads)
    assert (mine - exact).norm() < error * exact.norm()


@pytest.mark.representative("pinn", "ode")
@pytest.mark.parametrize("name", STEPS)
def test_an_example_trains_in_float64_and_float32(name: str) -> None:
    for mode in ("fp64", "fp32"):
        words = [recipe(name), f"precision={mode}", "device=cpu", f"run.dir={mode}"]
        assert main([*words, f"train.max_steps={STEPS[name]}"]) == 0
        assert read_summary(Path(mode)).effective.param_dtype == f"float{mode[2:]}"
        losses = [x["loss"] for x in read_lines(Path(mode)) if x["kind"] == "step"]
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
