"""The audit names what 16 bits keep from learning, and finds nothing where all is well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import mprun
from mprun.optim import AdamW, MasterWeights, float32_masters
from mprun.precision._torch_switches import backend_switches, set_backend_switches
from mprun.watch.audit import KINDS, Audit
from mprun.watch.cast_counts import CastCounts


class Small(nn.Module):
    """An embedding, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))  # type: ignore[no-any-return]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(16)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> Audit:
    """An audit in the middle of the second step."""
    for step in range(2):
        optimizer.zero_grad()
        with CastCounts(model) as casts:
            logits = model(ids)
        nn.functional.cross_entropy(logits.float(), ids).backward()
        if step == 0:
            optimizer.step()
    return mprun.audit(model, optimizer, casts)


def kinds(found: Audit) -> set[tuple[str, str]]:
    return {(finding.kind, finding.module) for finding in found.findings}


def test_the_page_has_every_kind() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "audit.md"
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == KINDS


# ---- healthy models ------------------------------------------------------------------------------


def test_nothing_is_found_in_float32(ids: torch.Tensor) -> None:
    model = Small()
    found = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-6), ids)
    assert (found.findings, found.notes) == ((), ())
    assert "nothing found" in str(found)
    with torch.autocast("cpu", torch.bfloat16):
        assert trained(model, torch.optim.AdamW(model.parameters(), lr=1e-6), ids).findings == ()


@pytest.mark.parametrize("keeps", ["stochastic", "kahan", "masters"])
def test_nothing_is_found_with_an_optimizer_that_keeps_updates(
    keeps: str, ids: torch.Tensor
) -> None:
    model = Small().bfloat16()
    optimizer: torch.optim.Optimizer
    if keeps == "masters":
        with float32_masters(model) as masters:
            inner = torch.optim.AdamW(model.parameters(), lr=1e-6)
        optimizer = MasterWeights(inner, masters)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-6, rounding=keeps)
    found = trained(model, optimizer, ids)
    assert found.findings == ()
    assert found.dtypes["parameters"] == {"bfloat16": sum(p.numel() for p in model.parameters())}


def test_frozen_parameters_may_have_16_bits(ids: torch.Tensor) -> None:
    model = Small()
    model.embedding.bfloat16().requires_grad_(False)
    model.norm.bfloat16().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    assert mprun.audit(model, optimizer).findings == ()


# ---- what is wrong -------------------------------------------------------------------------------


def test_a_model_in_bfloat16_at_a_small_learning_rate(ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = Small().bfloat16()
    found = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0), ids)
    assert ("loaded_in_16_bits", "") in kinds(found)
    assert ("state_in_16_bits", "") in kinds(found)
    assert {m for kind, m in kinds(found) if kind == "lost_update"} == {"embedding", "norm", "head"}
    assert all(f.kind in KINDS and f.text and f.fix for f in found.findings)
    names = dict(model.named_modules())
    assert all(f.module in names for f in found.findings)
    lines = str(found).splitlines()
    assert any(
        line.startswith("lost_update  norm: this step leaves 100% of 32 updated numbers of weight")
        for line in lines
    )


def test_what_is_lost_is_what_a_step_leaves(ids: torch.Tensor) -> None:
    """The share in the text is that of the weights that the optimizer's own step does not move."""
    torch.manual_seed(0)
    model = Small().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = trained(model, optimizer, ids)
    before = model.head.weight.detach().clone()
    optimizer.step()
    still = (model.head.weight == before).double().mean()
    text = next(f.text for f in found.findings if (f.kind, f.module) == ("lost_update", "head"))
    assert f"leaves {still:.0%} of {before.numel():,} updated numbers of weight unchanged" in text


def test_a_part_in_16_bits_is_named() -> None:
    model = nn.ModuleDict({"body": Small().bfloat16(), "head": nn.Linear(4, 4)})
    found = mprun.audit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ("loaded_in_16_bits", "body") in kinds(found)
    assert found.notes == ("lost updates need gradients: call it after loss.backward()",)
    without = mprun.audit(model)
    assert without.notes == ("lost updates need the optimizer: mprun.audit(model, optimizer)",)


def test_mpruns_own_optimizer_that_rounds_to_nearest_is_no_cure(ids: torch.Tensor) -> None:
    model = Small().bfloat16()
    low = {"momentum_dtype": torch.bfloat16, "rounding": "nearest"}
    found = trained(model, AdamW(model.parameters(), lr=1e-5, weight_decay=0, **low), ids)
    assert {"lost_update", "loaded_in_16_bits", "state_in_16_bits"} <= {k for k, _ in kinds(found)}


def test_a_step_that_needs_a_closure_is_named(ids: torch.Tensor) -> None:
    model = Small().bfloat16()
    optimizer = torch.optim.LBFGS(model.parameters())
    model(ids).float().sum().backward()
    found = mprun.audit(model, optimizer)
    assert found.notes == ("lost updates are not known: a step of LBFGS needs a closure",)


def test_the_audit_changes_nothing(ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = Small().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    trained(model, optimizer, ids)
    state = [x.clone() for x in tensors(model, optimizer)]
    random = torch.get_rng_state()
    mprun.audit(model, optimizer)
    assert all(map(torch.equal, state, tensors(model, optimizer)))
    assert torch.equal(random, torch.get_rng_state())


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for p in model.parameters():
        yield p.detach()
        assert p.grad is not None
        yield p.grad
        yield from optimizer.state[p].values()


# ---- float32 in a lower precision ----------------------------------------------------------------


@pytest.mark.parametrize("hardware", [True, False])
def test_onednn_in_bfloat16_is_found_where_the_cpu_has_it(
    hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mprun.watch.audit.hardware_has", lambda mode: hardware)
    before = backend_switches()
    torch.set_float32_matmul_precision("medium")
    try:
        found = mprun.audit(nn.Linear(2, 2))
        assert kinds(found) == ({("tf32", "")} if hardware else set())
        assert mprun.audit(nn.Linear(2, 2).requires_grad_(False).bfloat16()).findings == ()
    finally:
        set_backend_switches(before)
    if hardware:
        (finding,) = found.findings
        assert "7 bits of precision instead of 23, by torch.backends.mkldnn.matmul" in finding.text
        assert "\n" not in finding.fix
