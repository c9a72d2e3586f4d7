"""The modes with 16-bit parameters: what is kept in which dtype, layers of their own, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mprun.config import compose
from mprun.errors import UsageError
from mprun.precision import Precision
from mprun.recipes.linear import Linear
from mprun.train.assemble import Plan, build_loss_scale, build_parts, make_plan
from mprun.train.loop import TrainingComponents
from tests.each import each

pytestmark = pytest.mark.usefixtures("native_is_fast")

CPU = torch.device("cpu")
TRUE_HALF = {
    "fp16_true": torch.float16,
    "bf16_true": torch.bfloat16,
    "half_sr": torch.float16,
    "bf16_sr": torch.bfloat16,
    "half_sr_full": torch.float16,
}
NATIVE = [name for name in TRUE_HALF if name != "half_sr_full"]
EXECUTIONS = [*((n, "native") for n in NATIVE), *((n, "emulated") for n in TRUE_HALF)]

LINEAR = ["recipe=linear", "recipe.model.in_features=12", "recipe.model.out_features=6"]
MNIST = ["recipe=mnist", "recipe.model.units=16", "data.source=generated", "data.train_limit=64"]
MNIST += ["data.eval_limit=16", "train.batch_size=8", "device=cpu"]
FASHION = ["recipe=fashion_mnist", "recipe.model.image_size=16", "data.source=generated"]
FASHION += ["data.train_limit=16", "data.eval_limit=16", "train.batch_size=8", "device=cpu"]
RECIPES = {"linear": LINEAR, "mnist": MNIST, "fashion_mnist": FASHION}


def planned(*words: str) -> Plan:
    composed = compose(words)
    return make_plan(composed.config, composed.given)


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        planned(*words)
    return str(caught.value)


class Step:
    """The forward and backward pass of a run's first step, and what was kept between the two."""

    def __init__(self, parts: TrainingComponents) -> None:
        self.kept: list[Tensor] = []
        self.batch = next(parts.train.epoch(None))
        parts.precision.begin_step(1)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            self.output = parts.precision.forward(parts.model, self.batch.parts[0].inputs[0])
        self.loss = parts.precision.loss(
            parts.recipe.loss, self.output, self.batch.parts[0].content
        )
        parts.precision.backward(self.loss)
        self.gradients = {name: p.grad for name, p in parts.model.named_parameters()}

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            self.kept.append(tensor)
        return tensor


# ---- a whole model -----------------------------------------------------------------------------


@pytest.mark.representative(
    "fp16_true-native-fashion_mnist",
    "bf16_true-emulated-linear",
    "half_sr_full-emulated-mnist",
    "bf16_sr-native-linear",
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("mode", "execution"), EXECUTIONS)
def test_parameters_gradients_and_activations_are_16_bits_and_the_output_is_not(
    mode: str, execution: str, recipe: str
) -> None:
    dtype = TRUE_HALF[mode]
    parts = build_parts(planned(*RECIPES[recipe], f"precision={mode}", f"execution={execution}"))
    step = Step(parts)
    assert {p.dtype for p in parts.model.parameters()} == {dtype}
    assert {g.dtype for g in step.gradients.values() if g is not None} == {dtype}
    assert all(g is not None and g.any() for g in step.gradients.values())
    assert step.output.dtype == step.loss.dtype == torch.float32
    assert bool(step.loss.isfinite())
    # FashionMNIST's log-softmax is asked for in float32, and keeps its result.
    wide = [x for x in step.kept if x.dtype != dtype]
    assert [x.shape for x in wide] == ([(8, 10)] if recipe == "fashion_mnist" else [])
    assert len(step.kept) > len(wide)


@pytest.mark.representative("fp16_true-native", "half_sr_full-emulated")
@pytest.mark.parametrize(("mode", "execution"), EXECUTIONS)
def test_gradients_can_be_accumulated_in_float32(mode: str, execution: str) -> None:
    words = [*MNIST, f"precision={mode}", f"execution={execution}"]
    parts = build_parts(planned(*words, "precision.accum_dtype=float32"))
    step = Step(parts)
    assert {p.dtype for p in parts.model.parameters()} == {TRUE_HALF[mode]}
    assert {g.dtype for g in step.gradients.values() if g is not None} == {torch.float32}
    before = {n: p.detach().clone() for n, p in parts.model.named_parameters()}
    parts.precision.step(parts.optimizer)
    assert any(not torch.equal(p, before[n]) for n, p in parts.model.named_parameters())
    parts.optimizer.zero_grad()
    Step(parts)
    assert {p.grad.dtype for p in parts.model.parameters() if p.grad is not None} == {torch.float32}


def test_weights_are_drawn_in_float32_and_rounded_to_nearest() -> None:
    exact = build_parts(planned(*MNIST, "precision=fp32")).model.state_dict()
    for mode, dtype in TRUE_HALF.items():
        model = build_parts(planned(*MNIST, f"precision={mode}")).model
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, exact[name].to(dtype)), (mode, name)


# ---- layers in a dtype of their own ------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.stem(x)))
        return found


def prepared(mode: str, model: nn.Module, layers: dict[str, str]) -> Precision:
    policy = planned(*LINEAR, f"precision={mode}").policy
    precision = Precision(policy, device=CPU, execution="native", layers=layers)
    precision.prepare(model, CPU)
    return precision


def test_a_module_inside_a_kept_one_is_kept_unless_named_itself() -> None:
    model = Nested()
    precision = prepared("half_sr", model, {"body": "fp32", "body.1.0": "bf16"})
    dtypes = {name: p.dtype for name, p in model.named_parameters() if name.endswith("weight")}
    assert dtypes == {
        "stem.weight": torch.float16,
        "body.0.weight": torch.float32,
        "body.1.0.weight": torch.bfloat16,
        "body.1.1.weight": torch.float32,
        "head.weight": torch.float16,
    }
    output = precision.forward(model, torch.randn(3, 4).half())
    precision.backward(output.square().sum())
    assert {n: p.grad.dtype for n, p in model.named_parameters() if p.grad is not None} == {
        n: p.dtype for n, p in model.named_parameters()
    }


@dataclass(frozen=True)
class Tied(Linear):
    """A recipe whose two layers share a weight."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "last")})
        model["last"].weight = model["first"].weight
        return model


def test_a_tied_parameter_in_two_dtypes_is_refused_before_the_run() -> None:
    words = [*LINEAR, f"recipe.target={__name__}.Tied", "precision=bf16_sr"]
    text = "'last.weight' is tied to a parameter of another dtype"
    assert text in refusal(*words, "precision.layers={last: fp32}")


# ---- refusals ----------------------------------------------------------------------------------

REFUSED = {
    "half_sr_full precision.name=own precision.rounding=nearest": "legal is update",
    "fp32 precision.rounding_scope=all": "legal is update",
    "half_sr_full execution=native": "rounds every result stochastically, and a kernel's result is",
    "bf16_true precision.partials_dtype=float16": "with precision=bf16_true (casting=none)",
    "bf16_sr precision.partials_dtype=float16 execution=emulated": "legal is float32",
    "half_sr precision.partials_dtype=float16 execution=native": "legal: auto, emulated",
    "half_sr precision.overflow=saturate": "with a dynamic loss scale",
    "fp16_true precision.rounding=kahan precision.overflow=saturate loss_scale=static": "infinity",
    "half_sr precision.accum_dtype=bfloat16": "legal is float16, float32",
    "bf16_mixed precision.param_dtype=bfloat16": "legal is float32",
    "half_sr precision.output_dtype=bfloat16": "legal is float32, float16",
    # Names that fix columns
    "half_sr precision.rounding=nearest": "legal is stochastic",
    "half_sr precision.param_dtype=float32": "legal is float16",
    "half_sr_full precision.rounding_scope=update": "legal is all",
    "half_sr precision.casting=autocast": "precision.casting=autocast",
    "half_sr precision.tf32=true": "legal is false",
}
"""A mode and further words, and a part of the refusal."""


@each(("words", "text"), REFUSED.items())
def test_a_combination_that_is_not_carried_out_is_refused_with_what_is(
    words: str, text: str
) -> None:
    mode, *others = words.split()
    assert text in refusal(*LINEAR, "device=cpu", f"precision={mode}", *others)


def test_saturation_is_refused_where_a_file_names_a_float16_layer() -> None:
    """The loss scale is dynamic then, whichever way the layer was named."""
    Path("layers.yaml").write_text("fc1: fp16\n", encoding="utf-8")
    words = [*FASHION, "precision=bf16_sr", "precision.overflow=saturate"]
    assert "with a dynamic loss scale" in refusal(*words, "precision.layers={fc1: fp16}")
    assert "with a dynamic loss scale" in refusal(*words, "precision.layers_file=layers.yaml")


# ---- loss scale --------------------------------------------------------------------------------


LOSS_SCALES = {
    "half_sr_full": "dynamic",
    "bf16_sr": "none",
    "fp32 precision.layers={fc1:fp16}": "dynamic",
    "bf16_sr precision.layers={fc1:fp16}": "dynamic",
    "half_sr loss_scale=none": "none",
    "half_sr loss_scale=static": "static",
    "bf16_sr loss_scale=dynamic": "dynamic",
}


@each(("words", "kind"), LOSS_SCALES.items())
def test_the_automatic_loss_scale_is_what_the_dtypes_need(words: str, kind: str) -> None:
    mode, *others = words.split()
    chosen = planned(*FASHION, f"precision={mode}", *others)
    assert build_loss_scale(chosen.config, chosen.layers, CPU).kind == kind


def test_a_float16_layer_named_in_a_file_is_scaled_too() -> None:
    Path("layers.yaml").write_text("fc1: fp16\n", encoding="utf-8")
    chosen = planned(*FASHION, "precision=fp32", "precision.layers_file=layers.yaml")
    assert build_parts(chosen).precision.loss_scale.kind == "dynamic"
