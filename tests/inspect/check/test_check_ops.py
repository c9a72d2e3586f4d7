"""Faults of dtypes and of robustness: each is found, with its module and line, and no other is."""

from pathlib import Path

import pytest
import torch

from mprun.inspect.check.check import plan_check
from mprun.inspect.check.check_ops import dtypes, robust
from mprun.inspect.check.check_result import CheckSettings, Finding

RECIPE = """
import torch
import torch.nn.functional as F
from torch import nn

LOW = torch.bfloat16


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        {init}

    def forward(self, x):
        y = self.linear(x)
        {forward}
        return y


def model():
    made = nn.Sequential(nn.Linear(8, 8))
    made.add_module("part", Part())
    made.extend([nn.BatchNorm1d(8), nn.Linear(8, 4)])
    {made}
    return made


def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=g)
    return {{"train": (x, x[:, :4].argmax(1)), "validation": None}}


def loss(output, batch):
    {loss}
    return F.cross_entropy(output, batch[1])
{end}
"""
MODES = ("fp32", "tf32", "bf16_mixed", "fp16_mixed", "bf16_true", "bf16_sr")


def found(folder: Path, mode: str, *more: str, **parts: str) -> list[Finding]:
    """The findings of both checks for a model with these lines in it."""
    path = folder / f"model{len([*folder.iterdir()])}.py"
    lines = {"init": "pass", "forward": "pass", "made": "pass", "loss": "pass", "end": "", **parts}
    path.write_text(RECIPE.format(**lines))
    (checked,) = plan_check([f"recipe={path}", f"precision={mode}", *more], None, CheckSettings())
    with checked.planned.executing():
        all_found = [*dtypes(checked), *robust(checked)]
    # some of these models add means over the batch to their outputs
    return [x for x in all_found if x.kind != "depends_on_batch"]


@pytest.mark.parametrize("mode", MODES)
def test_healthy_model(tmp_path, mode):
    assert found(tmp_path, mode, "train.lr=0.01") == []


def test_emulated_products_of_8_bits_are_as_asked() -> None:
    words = ["recipe=mnist", "data.source=generated", "precision=fp8_tensorwise"]
    (checked,) = plan_check(words, None, CheckSettings())
    with checked.planned.executing():
        assert list(dtypes(checked)) == []


BUFFER = "self.register_buffer('positions', torch.arange(4096).bfloat16())"
LAST = "self.register_buffer('last', torch.zeros(8))"
AUTOCAST_OFF = "with torch.autocast('cpu', enabled=False): y = self.linear(x.float())"
INTEGERS = "i = torch.arange(3000, 3008).to(LOW); y = y + (i[:, None] > i).any(1)"
ONE_PASS = "z = y + 300; y = y + (z * z).mean(1, True) - z.mean(1, True) ** 2"
ONE_PART = [
    ("higher_dtype", "bf16_mixed", "pass", AUTOCAST_OFF),
    ("lower_dtype", "bf16_mixed", "pass", "y = y - (y.float() * 1.1).bfloat16().mean(1, True)"),
    ("lower_dtype", "bf16_mixed", "pass", "y = y - (y * 1.1).float().sum(1, True, dtype=LOW)"),
    ("lower_dtype", "bf16_mixed", "pass", INTEGERS),
    ("cast_undone", "bf16_mixed", "pass", "y = (y.float() * 1.1).bfloat16().float()"),
    ("cast_undone", "fp16_mixed", "pass", "y = y.bfloat16()"),
    ("cast_undone", "fp32", "pass", "y = y.bfloat16().float()"),
    ("stored_in_16_bits", "bf16_mixed", BUFFER, "pass"),
    ("stored_in_16_bits", "fp32", LAST, "self.last = y[0].detach().bfloat16()"),
    ("vanishing_constant", "fp16_mixed", "pass", "y = y / (y.abs() + 1e-8)"),
    ("overflow", "fp16_mixed", "pass", "y = torch.softmax(y + (x > 0).half() * -60000 * 100, 1)"),
    ("near_overflow", "fp16_mixed", "pass", "y = y.clamp(-0.9, 0.9) * 40000 / 40000"),
    ("all_noise", "bf16_mixed", "pass", "y = y + torch.sin(torch.arange(3000, 3008).to(LOW))"),
    ("all_noise", "bf16_mixed", "pass", ONE_PASS),
    ("all_noise", "fp16_mixed", "pass", "y = (y * 1e-8) / 1e-8"),  # all of it becomes 0
]


@pytest.mark.parametrize(("kind", "mode", "init", "forward"), ONE_PART)
def test_fault_in_a_part(tmp_path, kind, mode, init, forward):
    every = found(tmp_path, mode, init=init, forward=forward)
    findings = [x for x in every if x.kind == kind]
    assert {x.module for x in findings} == {"part.linear" if kind == "higher_dtype" else "part"}
    if kind != "stored_in_16_bits":
        assert ".py:17 (forward)" in findings[0].line or ".py:18 (forward)" in findings[0].line


ROUNDS = "w = self.linear.weight.data; w.copy_(w.bfloat16())"


@pytest.mark.parametrize(
    ("mode", "parts"),
    [
        ("bf16_mixed", {"made": "made.part.bfloat16().float()"}),
        ("fp32", {"made": "made.part.bfloat16().float()"}),
        ("bf16_mixed", {"forward": ROUNDS}),  # in each step
    ],
)
def test_weights_that_were_rounded(tmp_path, mode, parts):
    (finding,) = found(tmp_path, mode, **parts)
    assert (finding.kind, finding.module) == ("values_of_16_bits", "part.linear")


@pytest.mark.parametrize(
    ("mode", "loss", "kind"),
    [
        ("bf16_mixed", "output = (output * 1.1).bfloat16()", "lower_dtype"),
        ("fp32", "z = output + 3000; return (z * z).mean() - z.mean() ** 2", "float32_is_wrong"),
    ],
)
def test_fault_in_the_loss(tmp_path, mode, loss, kind):
    findings = found(tmp_path, mode, loss=loss)
    assert {x.kind for x in findings} == {kind}
    assert all("(loss)" in x.line for x in findings if kind == "lower_dtype")


def test_a_mean_that_is_rounded_once_is_what_the_mode_means(tmp_path):
    forward = "self.loss = y.square().mean(); Part.last = self"
    loss = "return F.cross_entropy(output, batch[1]) + Part.last.loss"
    assert found(tmp_path, "bf16_mixed", forward=forward, loss=loss) == []


def test_a_sum_in_16_bits_of_which_little_is_left(tmp_path):
    sliding = "c = (y.to(LOW) + 16).cumsum(1); y = y + (c[:, 2:] - c[:, :-2] - 32).mean() * 1e-3"
    (finding,) = found(tmp_path, "bf16_mixed", forward=sliding)
    assert (finding.kind, finding.module, finding.op) == ("lower_dtype", "part", "cumsum")
    assert "is left by sub" in finding.text
    assert found(tmp_path, "bf16_mixed", forward=sliding.replace("y.to(LOW)", "y.float()")) == []


def test_a_sum_that_nothing_uses_is_no_finding(tmp_path):
    slope = "s = torch.autograd.grad(y.sum(), x, create_graph=True)[0]; y = y + s.mean() * 1e-3"
    assert found(tmp_path, "bf16_mixed", forward=slope) == []


def test_an_average_that_the_code_keeps_in_16_bits(tmp_path):
    kept = "self.register_buffer('kept', torch.ones(8, dtype=LOW))"
    moved = "self.kept.lerp_(y.detach().float().mean(0).to(self.kept.dtype), 1e-3)"
    (finding,) = found(tmp_path, "bf16_mixed", init=kept, forward=moved)
    assert (finding.kind, finding.module) == ("stored_in_16_bits", "part")
    assert "kept in bfloat16 and steps change it" in finding.text
    assert found(tmp_path, "bf16_mixed", init=kept) == []  # a constant
    assert found(tmp_path, "bf16_true", init=kept, forward=moved) == []  # as the mode says


def test_a_gradient_beyond_the_format_has_no_doublings_left(tmp_path):
    every = found(tmp_path, "fp16_mixed", forward="y = (y * 1e-7) / 1e-7")
    (text,) = {x.text for x in every if x.kind == "near_overflow"}
    assert text.endswith(" without the loss scale in float16: beyond its largest number")


def test_count_in_16_bits(tmp_path):
    forward = "y = y + (torch.ones_like(y.repeat(64, 1), dtype=LOW).sum(0) - 500) * 1e-3"
    assert found(tmp_path, "bf16_mixed", forward=forward) == []
    (finding,) = found(tmp_path, "bf16_mixed", forward=forward.replace("64", "129 * 3"))
    assert (finding.kind, finding.op) == ("lower_dtype", "sum")


def test_optimizer_state_in_16_bits(tmp_path):
    own = """

class Rounding(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


def optimizer(model):
    return Rounding(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
"""
    findings = found(tmp_path, "fp32", loss="pass", end=own)
    assert {x.kind for x in findings} == {"stored_in_16_bits"}
    assert {x.module for x in findings} == {"0", "part.linear", "2", "3"}
    assert "weight: momentum_buffer has bfloat16 after two steps" in findings[0].text


def test_lost_update(tmp_path):
    (finding,) = found(tmp_path, "bf16_true", "train.lr=1e-7")
    assert (finding.kind, finding.check) == ("lost_update", "dtypes")
    assert found(tmp_path, "bf16_sr", "train.lr=1e-7") == []


def test_layers_that_are_to_run_in_float32_are_no_finding(tmp_path):
    assert found(tmp_path, "bf16_mixed", "precision.layers={part: fp32}") == []


def test_emulated_modes_are_looked_at_as_the_model_calls_them(tmp_path):
    forward = "y = (y.float() * 1.1).bfloat16().float()"
    execution = "execution=emulated"
    kinds = {x.kind for x in found(tmp_path, "bf16_mixed", execution, forward=forward)}
    assert kinds == {"cast_undone"}
    assert torch.is_grad_enabled()
