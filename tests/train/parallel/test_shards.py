"""FSDP2's shards: what is wrapped, whole states, and random bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.optim import AdamW, MasterWeights, name_parameters
from mprun.optim.masters import masters_of
from mprun.precision.gemms import GEMMS, convert_gemms
from mprun.precision.policy import policy
from mprun.train.parallel.ranks import GroupRanks
from mprun.train.parallel.shards import ShardLayout, units
from tests.optim import same_bits
from tests.train.parallel.processes import Groups

CPU = torch.device("cpu")
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(self.inner(self.norm(x)).tanh())
        return y


class Language(nn.Module):
    """Tokens in, scores out; the embedding and the head may share their weight."""

    def __init__(self, tied: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def gathered(model: nn.Module, mode: str) -> dict[str, tuple[str, torch.dtype]]:
    """The unit of each parameter, the innermost that holds it, and the dtype it is gathered in."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, tuple[str, torch.dtype]] = {}
    for unit, dtype in units(model, policy(mode)):
        for name, p in model.named_parameters():
            if name not in found and any(p is own for own in unit.parameters()):
                found[name] = names[id(unit)], dtype
    return found


def test_autocast_gathers_products_in_16_bits_and_the_rest_in_float32() -> None:
    found = gathered(Language(), "bf16_mixed")
    for name, (_, dtype) in found.items():
        is_product = "inner" in name or "outer" in name or "head" in name
        assert dtype == (BRAIN if is_product else FLOAT), name
    assert found["blocks.0.inner.weight"][0] == found["blocks.0.outer.bias"][0] == "blocks.0"
    assert found["blocks.1.norm.weight"][0] == "blocks.1.norm"
    assert found["embed.weight"][0] != found["head.weight"][0]


@pytest.mark.parametrize(("mode", "dtype"), [("fp32", FLOAT), ("bf16_sr", BRAIN)])
def test_modes_without_autocast_gather_what_is_stored(mode: str, dtype: torch.dtype) -> None:
    found = gathered(Language().to(dtype), mode)
    assert {kind for _, kind in found.values()} == {dtype}
    assert {unit for unit, _ in found.values()} == {"blocks.0", "blocks.1", ""}


def test_tied_weights_are_in_one_unit_in_float32() -> None:
    model = Language(tied=True)
    assert gathered(model, "bf16_mixed")["embed.weight"] == ("", FLOAT)
    assert model.embed.weight is model.head.weight


def test_layers_with_products_of_8_bits_are_gathered_as_they_are_stored() -> None:
    """They round their weights themselves; in bfloat16 before, these would be rounded twice."""
    model = Language(width=16)
    convert_gemms(model, {"blocks.1.inner": GEMMS["fp8_rowwise"]})
    found = gathered(model, "fp8_rowwise")
    assert found["blocks.1.inner.weight"][1] == FLOAT
    assert found["blocks.1.outer.weight"][1] == found["blocks.0.inner.weight"][1] == BRAIN


def built(kind: str) -> tuple[ShardLayout, nn.Module, Optimizer]:
    torch.manual_seed(0)
    mode, dtype = ("half_sr", HALF) if kind == "low" else ("fp32", FLOAT)
    if kind == "masters":
        mode, dtype = "bf16_true", BRAIN
    model: nn.Module = Language(width=9).to(dtype)  # 9 rows, and 11: parts of unequal size
    name_parameters(model)
    layout = ShardLayout(GroupRanks(CPU), CPU)
    layout.arrange(model, policy(mode))
    with layout.trainable(model):
        held = [*model.parameters()]
        optimizer: Optimizer
        if kind == "low":
            optimizer = AdamW(held, lr=1e-2, momentum_dtype=BRAIN, variance_dtype=HALF)
        elif kind == "masters":
            masters = masters_of(held)
            inner = torch.optim.SGD([*masters], lr=0.1, momentum=0.9)
            optimizer = MasterWeights(inner, masters)
        elif kind == "sgd":
            optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(held, lr=1e-2)
    return layout, model, optimizer


def train(layout: ShardLayout, model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.arange(12).reshape(2, 6).add(step) % 11
        optimizer.zero_grad()
        model(tokens).float().square().mean().mul(0.5).backward()
        layout.end_backward()
        optimizer.step()


def whole_state(layout: ShardLayout, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state that the first process saves, in all of them."""
    state = {
        "model": dict(layout.model_state(model)),
        "optimizer": layout.optimizer_state(optimizer),
    }
    return layout.ranks.share(copy.deepcopy(state))  # counts of steps are the optimizer's own


def round_trip(kind: str) -> dict[str, Any]:
    """Whole states after two steps, after loading them anew, and after two more steps of both."""
    first = built(kind)
    train(*first, range(2))
    saved = whole_state(*first)
    second = built(kind)
    train(*second, range(7, 9))  # something else is in it
    second[0].load_model(second[1], saved["model"])
    second[0].load_optimizer(second[2], copy.deepcopy(saved["optimizer"]))
    kept: dict[str, Any] = {"saved": saved, "again": whole_state(*second)}
    for name, parts in (("went on", first), ("loaded", second)):
        train(*parts, range(2, 4))
        kept[name] = whole_state(*parts)
    return kept


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return [x for item in items for x in tensors(item)]
    return []


KINDS = ["adamw", "sgd", "low", "masters"]


def round_trips() -> dict[str, Any]:
    return {kind: round_trip(kind) for kind in KINDS}


def test_whole_states_come_back_in_parts(groups: Groups) -> None:
    for found in groups.call(round_trips):
        for kind in KINDS:
            check_round_trip(kind, found[kind])


def check_round_trip(kind: str, found: dict[str, Any]) -> None:
    for a, b in (("saved", "again"), ("went on", "loaded")):
        pairs = [*zip(tensors(found[a]), tensors(found[b]), strict=True)]
        assert all(same_bits(x, y) for x, y in pairs), (kind, a, b)
    weights, optimizer = found["saved"].values()
    shapes = {name: p.shape for name, p in Language(width=9).named_parameters()}
    assert {name: p.shape for name, p in weights.items()} == shapes
    moments = [x for x in tensors(optimizer["state"]) if x.dim()]
    assert {x.shape for x in moments} <= set(shapes.values())
    assert any(x.abs().sum() > 0 for x in moments) or "masters" in kind


def rounded(processes: int) -> Tensor:
    """A parameter of equal values after one update of less than half a unit, made whole."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).to(BRAIN)
    nn.init.ones_(model[0].weight)
    name_parameters(model)
    if processes == 1:
        optimizer = AdamW(model.parameters(), lr=2.0**-9, seed=3, weight_decay=0.0)
        model[0].weight.grad = torch.ones(256, 256, dtype=BRAIN)
        optimizer.step()
        return model[0].weight.detach()
    layout = ShardLayout(GroupRanks(CPU), CPU)
    layout.arrange(model, policy("bf16_sr"))
    with layout.trainable(model):
        held = [*model.parameters()]
        optimizer = AdamW(held, lr=2.0**-9, seed=3, weight_decay=0.0)
    # the model's gradient is the sum over processes of an equal part each
    (model(torch.eye(256, dtype=BRAIN)).sum() / processes).backward()
    layout.end_backward()
    optimizer.step()
    return layout.ranks.share(dict(layout.model_state(model)))["0.weight"]


def test_shards_draw_the_bits_of_the_whole_and_not_each_others(groups: Groups) -> None:
    whole = rounded(1)
    assert whole.unique().numel() == 2, "one update of less than half a unit rounds both ways"
    for found in groups.call(rounded, 2):
        assert same_bits(found, whole)
    upper, lower = (half.float().flatten() for half in whole.chunk(2))
    both = torch.corrcoef(torch.stack([upper, lower]))
    # 32768 independent pairs: their correlation has a standard deviation of 1/181
    assert abs(both[0, 1].item()) < 5 / 181
