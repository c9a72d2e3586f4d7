"""Planted faults for `mprun check`: the models are learned, each fault acts, and is counted."""

from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks import check_faults
from benchmarks.check_faults import MODELS, Looked, Planted, main
from benchmarks.check_models import healthy
from mprun.errors import UsageError
from mprun.inspect.check.check_result import Finding
from mprun.train.data import DataRequest

FAULT = Planted("vae", "softplus_overflows", "decoder.1", "fp16_mixed", "exp overflows")


def recipe_of(model: str, fault: str = "none"):
    module = importlib.import_module(f"benchmarks.check_models.{model}")
    (kind,) = (
        x
        for x in vars(module).values()
        if isinstance(x, type) and x.__module__ == module.__name__ and hasattr(x, "PLANTS")
    )
    return kind(fault=fault)


def test_there_are_forty_faults_with_a_module_and_a_mode_each() -> None:
    pytest.importorskip("transformers")
    faults = check_faults.planted([])
    assert len(faults) == 40
    for fault in faults:
        recipe = recipe_of(fault.model, fault.name)
        names = dict(recipe.healthy().named_modules())
        assert fault.module in names
        assert fault.mode in check_faults.MODES
        assert recipe.PLANTS.keys() == recipe.FAULTS.keys()


@pytest.mark.parametrize("model", MODELS)
def test_a_fault_leaves_the_weights_as_they_are_drawn(model: str) -> None:
    if model == "tiny_llama":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    drawn = recipe_of(model).model().state_dict()
    for fault in (x for x in recipe_of(model).FAULTS if x != "loaded_in_16_bits"):
        torch.manual_seed(0)
        again = recipe_of(model, fault).model().state_dict()
        assert drawn.keys() == again.keys()
        assert all(torch.equal(drawn[name], again[name]) for name in drawn)
    with pytest.raises(ValueError, match=r"fault=no: legal is none, "):
        recipe_of(model, "no")


def test_most_faults_act_in_16_bits_alone() -> None:
    """In float32 the model with the fault gives the same numbers, bit for bit."""
    everywhere = {"log_of_softmax", "softplus_overflows"}
    for fault in check_faults.planted(["lstm", "vae", "mixture_of_experts"]):
        if fault.name in everywhere:
            continue
        healthy_output, output = (
            _output(recipe_of(fault.model, name)) for name in ("none", fault.name)
        )
        assert torch.equal(healthy_output, output), fault


def _output(recipe) -> torch.Tensor:
    torch.manual_seed(0)
    model, batch = recipe.model(), recipe.sample().content
    output = recipe.forward(model, batch)
    return output if isinstance(output, torch.Tensor) else next(iter(output.values()))


@pytest.mark.parametrize("name", [*healthy.EXAMPLES, "vit", "densenet", "convnext"])
def test_healthy_models_learn_their_batch(name: str) -> None:
    recipe = healthy.HealthyModel(name=name)
    torch.manual_seed(0)
    model, batch = recipe.model(), recipe.data(DataRequest()).train.first(8).content
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(8):
        loss = recipe.loss(recipe.forward(model, batch), batch)
        total = sum(loss.values()) if isinstance(loss, dict) else loss
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    assert min(losses[-3:]) < losses[0]


def test_what_is_found_without_the_fault_is_not_counted(monkeypatch, tmp_path) -> None:
    usual = Finding("near_overflow", "head", "")
    seen = {"none": [usual], "x": [usual, Finding("overflow", "decoder.1.part", "inf")]}

    def looked(recipe: str, mode: str, *overrides: str) -> Looked:
        return Looked(seen["x" if overrides else "none"], {}, 2.0)

    monkeypatch.setattr(check_faults, "looked", looked)
    monkeypatch.setattr(check_faults, "smoked", lambda fault, folder: (False, 1.0))
    check_faults.without_fault.cache_clear()
    row = check_faults.judged(FAULT, tmp_path)
    assert (row.found, row.named) == (seen["x"][1:], True)
    elsewhere = check_faults.judged(FAULT._replace(module="decoder.10"), tmp_path)
    assert (len(elsewhere.found), elsewhere.named) == (1, False)
    check_faults.without_fault.cache_clear()


def test_one_fault_and_one_healthy_model(capsys) -> None:
    assert main(["--only", "softplus_overflows", "--healthy", "1"]) == 0
    said = capsys.readouterr().out
    assert "| vae | `softplus_overflows` | fp16_mixed | yes | " in said
    assert "1 checks of healthy models: " in said
    assert main(["--only", "softplus"]) == 2
    assert "--only softplus: legal is " in capsys.readouterr().err
    with pytest.raises(UsageError):
        check_faults.planted(["softplus"])
