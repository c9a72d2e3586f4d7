"""`mprun.check`: overrides as on the command line, or a model, a batch and a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mprun
from mprun.errors import UsageError
from mprun.inspect.check.check import fits, plan_check
from mprun.inspect.check.check_result import CheckRecord, CheckSettings, Finding
from mprun.inspect.check.checked_mode import LOSS
from mprun.inspect.memory import MemorySettings
from mprun.inspect.memory_of_modes import memory_of_modes, plan_modes
from mprun.records.result import Result
from mprun.records.run_record import MEMORY_CATEGORIES


class WithLoss(nn.Module):
    """Brings its own loss, as models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layer(x), labels)}


class TimeFirst(nn.Module):
    """Its input is [time, samples, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.recurrent(x)[0][-1])


LABELS = torch.tensor([0, 1, 0, 1, 1, 0])
CASES = {
    "inputs and target": (nn.Linear(5, 2), (torch.randn(6, 5), LABELS), F.cross_entropy),
    "a mapping": (WithLoss(), {"x": torch.randn(6, 5), "labels": LABELS}, None),
    "arguments in order": (WithLoss(), (torch.randn(6, 5), LABELS), None),
    "one tensor": (nn.Linear(5, 5), torch.randn(6, 5), F.mse_loss),
    "a list": (nn.Linear(5, 2), [torch.randn(6, 5), LABELS], F.cross_entropy),
    "time first": (TimeFirst(), (torch.randn(7, 6, 4), LABELS), F.cross_entropy),
}


@pytest.mark.parametrize("case", CASES)
def test_a_given_model_is_trained_in_each_mode_from_its_own_weights(case: str) -> None:
    model = CASES[case][0]
    modes = plan_check(["precision=fp32,bf16_mixed"], None, CheckSettings(), CASES[case])
    assert [mode.plan.policy.name for mode in modes] == ["fp32", "bf16_mixed"]
    for mode in modes:
        trainer = mode.trainer()
        started = dict(trainer.parts.model.named_parameters())
        assert all(torch.equal(p, started[name]) for name, p in model.named_parameters())
        assert len(mode.batches) == 1
        probed = mode.passes.low()
        assert probed.keys() == {LOSS, *started}
        assert mode.memory.why_real is None  # counted on fake tensors, which take no real ones


class Balanced(nn.Module):
    """Keeps a balance loss with its graph, as mixtures of experts do, and scales its output."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(5, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(1)
        self.aux = shares.mean(0).square().sum()
        return self.head(shares)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.scale, target) + self.aux


@pytest.mark.parametrize("has_run", [False, True])
def test_a_loss_may_read_the_model_that_was_given(has_run: bool) -> None:
    model, batch = Balanced(), (torch.randn(6, 5), LABELS)
    if has_run:  # its graph is used up
        model.loss(model(batch[0]), LABELS).backward()
        model.zero_grad()
    aux = model.aux
    for loss in (model.loss, lambda o, t: F.cross_entropy(o, t) + 1e-3 * model.aux):
        (mode,) = plan_check(["precision=bf16_mixed"], None, CheckSettings(), (model, batch, loss))
        assert mode.float32_step(mode.exact_batches[0])["router.weight"].any()  # by way of `aux`
        result = mprun.check(model, batch, loss, precision="fp32,bf16_mixed", steps=6)
        assert result.record.findings == []
        assert all(p.grad is None for p in model.parameters())
        assert model.aux is aux
    own = plan_check(["precision=fp32"], None, CheckSettings(), (model, batch, model.loss))[0]
    assert own.float32_step(own.exact_batches[0])["scale"].any()  # used by the loss alone


def test_the_class_of_a_loss_is_no_loss() -> None:
    with pytest.raises(UsageError, match=r"the class CrossEntropyLoss; write CrossEntropyLoss\(\)"):
        mprun.check(nn.Linear(5, 2), (torch.randn(6, 5), LABELS), nn.CrossEntropyLoss)


def test_nothing_of_the_given_model_changes() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    model(torch.randn(3, 5)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    batch, random = (torch.randn(6, 5), LABELS), torch.get_rng_state()
    mprun.check(model, batch, F.cross_entropy, precision="bf16_mixed")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert not model.training
    assert torch.equal(random, torch.get_rng_state())


def test_it_takes_overrides_and_settings_and_writes_nothing() -> None:
    result = mprun.check("recipe=linear", precision="fp32,bf16_mixed", budget_s=30, steps=6)
    assert isinstance(result, Result)
    record = result.record
    assert isinstance(record, CheckRecord)
    assert (record.recipe, record.budget_s) == ("linear", 30)
    assert [mode.precision for mode in record.modes] == ["fp32", "bf16_mixed"]
    assert [*Path().iterdir()] == []


def test_files_are_written_where_they_are_asked_for() -> None:
    mprun.check(*CASES["inputs and target"], precision="fp32", junit="check.xml", update=True)
    assert {x.name for x in Path().iterdir()} == {"check.xml", "mprun-baseline.json"}


def test_the_record_names_the_model_and_overrides_and_an_optimizer_of_ones_own_win() -> None:
    given = (*CASES["inputs and target"], lambda x: torch.optim.Adagrad(x.parameters(), lr=0.1))
    overrides = ["train.lr=0.5", "precision=fp16_mixed"]
    (mode,) = plan_check(overrides, None, CheckSettings(), given[:3])
    assert mode.plan.lr == 0.5
    assert mode.plan.config.recipe.name == "Linear"
    assert mode.plan.config.recipe.target == "torch.nn.modules.linear.Linear"
    (mode,) = plan_check(["precision=bf16_mixed"], None, CheckSettings(), given)
    assert isinstance(mode.trainer().parts.optimizer, torch.optim.Adagrad)


@pytest.mark.parametrize(
    ("arguments", "fields", "text"),
    [
        ((3, torch.ones(2, 2)), {}, "model is a int; legal is a torch.nn.Module"),
        ((nn.Linear(1, 1),), {}, "got 1 objects; legal: model, batch, and loss"),
        ((nn.Linear(1, 1), "precision=fp32"), {}, "got 1 objects"),
        ((nn.Linear(1, 1), {}), {}, "batch is a dict without samples"),
        (("recipe=linear",), {"loss": F.mse_loss}, "loss and optimizer belong to a model"),
        (("recipe=linear",), {"precision": "bf17"}, "precision is one of"),
        (("recipe=linear",), {"budget_s": -1}, "budget_s"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[Any, ...], fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text) as error:
        mprun.check(*arguments, **fields)
    assert "\n" not in str(error.value)


# ---- models that others do not run ---------------------------------------------------------------


class KeepsItsBalance(nn.Module):
    """A mixture of experts keeps the loss of its balance, with the graph, as an attribute."""

    aux: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(5, 3), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).float().softmax(-1)
        self.aux = shares.mean(0).square().sum()
        return (self.experts(x).unflatten(-1, (3, 2)) * shares[..., None]).sum(1) + self.aux


class Slope(nn.Module):
    """Returns the derivative of its own layers with respect to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return slope[:, :2]


@pytest.mark.parametrize("model", [KeepsItsBalance(), Slope()], ids=["aux", "slope"])
def test_a_model_with_a_kept_graph_or_a_derivative_is_checked_whole(model: nn.Module) -> None:
    model(torch.randn(3, 5))  # as a training before would have
    result = mprun.check(model, (torch.randn(64, 5), torch.arange(64) % 2), F.cross_entropy)
    assert [mode.not_done for mode in result.record.modes] == [{}, {}, {}]
    # a loss that is added to the output is of the whole batch
    assert {x.kind for _, x in result.record.findings} <= {"depends_on_batch"}
    assert result.status == 0


class WrongInSlope(Slope):
    """Its slope is off where it computes in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.is_autocast_enabled("cpu")
        return super().forward(x) * (1.1 if low else 1.0)


def test_a_fault_beside_a_derivative_is_found() -> None:
    batch = (torch.randn(64, 5), torch.arange(64) % 2)
    record = mprun.check(WrongInSlope(), batch, F.cross_entropy, precision="bf16_mixed").record
    assert "larger_error" in {x.kind for _, x in record.findings}


# ---- a step that fails, and what is left open ----------------------------------------------------


class Fails(nn.Module):
    """A step that fails everywhere, or under autocast alone."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.layer, self.everywhere = nn.Linear(5, 2), everywhere

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.everywhere:
            return y @ torch.ones(3, 3)
        return y @ torch.ones(2, 2, dtype=y.dtype).float() if y.dtype == torch.float32 else low(y)


def low(y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return y @ torch.ones(2, 2)


def test_where_float32_fails_too_that_is_the_only_sentence() -> None:
    result = mprun.check(Fails(True), (torch.randn(6, 5), LABELS), F.cross_entropy)
    ((modes, finding),) = result.record.merged
    assert modes == "fp32, bf16_mixed, fp16_mixed"
    assert "mat1 and mat2 shapes cannot be multiplied" in finding.text
    assert finding.text.endswith("; in float32 too")
    assert "test_check.py" in finding.line
    assert "make both of one dtype" not in str(result)
    assert str(result).count("mat1 and mat2") == 1
    assert result.status == 1


def test_where_one_mode_fails_float32_is_said_to_run() -> None:
    batch = (torch.randn(6, 5), LABELS)
    result = mprun.check(Fails(False), batch, F.cross_entropy, precision="fp32,bf16_mixed")
    ((modes, finding),) = result.record.merged
    assert (modes, finding.kind) == ("bf16_mixed", "step_fails")
    assert finding.text.endswith("; float32's step runs")
    assert result.record.modes[1].not_done == dict.fromkeys(
        ["fits", "dtypes", "robust", "agrees"], "the step fails"
    )


def test_what_a_fast_check_leaves_out_is_said() -> None:
    record = mprun.check("recipe=linear", precision="bf16_mixed", fast=True).record
    assert "check.fast=true leaves out the curve of agrees" in record.notes
    assert "curve_bound" not in record.modes[0].figures


def test_what_is_left_open_has_a_status_of_its_own() -> None:
    given = ("recipe=linear", "train.lr=1e-12")
    assert mprun.check(*given, precision="fp32", steps=6).status == 4
    assert mprun.check(*given, precision="fp32", steps=6, strict=False).status == 0


# ---- memory --------------------------------------------------------------------------------------

LINEAR = [
    *("recipe=linear", "recipe.model.in_features=4096", "recipe.model.out_features=2048"),
    *("train.batch_size=32", "precision=fp32,bf16_true", "device=cpu"),
]


def fitting(settings: CheckSettings) -> list[tuple[dict[str, float], list[Finding]]]:
    modes = plan_check(LINEAR, None, settings)
    findings = [[*fits(mode)] for mode in modes]
    return [(mode.checks.figures, own) for mode, own in zip(modes, findings, strict=True)]


@pytest.mark.usefixtures("native_is_fast")
def test_the_figures_of_memory_are_those_of_mprun_memory() -> None:
    planned = plan_modes(LINEAR, None, None)
    memory = memory_of_modes(planned, MemorySettings(picture=False)).record
    for (figures, findings), mode in zip(fitting(CheckSettings()), memory.modes, strict=True):
        assert figures == {f"{name}_bytes": size for name, size in mode.bytes.items()}
        assert figures["peak_bytes"] == sum(figures[f"{x}_bytes"] for x in MEMORY_CATEGORIES)
        assert findings == []


@pytest.mark.usefixtures("native_is_fast")
def test_a_mode_above_the_limit_is_named_with_what_takes_most() -> None:
    (fp32, above), (bf16, below) = fitting(CheckSettings(memory_gib=0.05))
    assert bf16["peak_bytes"] < 0.05 * 2**30 < fp32["peak_bytes"]
    assert below == []
    (finding,) = above
    assert (finding.kind, finding.severity) == ("over_memory", "error")
    assert " with 32 samples, limit 51.2 MiB: " in finding.text
    assert "parameters 32 MiB" in finding.text
