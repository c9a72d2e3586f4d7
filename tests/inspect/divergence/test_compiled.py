"""`mprun.diff` of eager and compiled code: planted faults are found, healthy models have none."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn

import mprun
from mprun.inspect.divergence import Difference, Side
from mprun.inspect.divergence.boundaries import moved
from tests.inspect.divergence.test_diff import MODELS, made

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
aten = torch.ops.aten


# ---- healthy models ------------------------------------------------------------------------------

IMAGES = "resnet18 squeezenet1_0 squeezenet1_1 alexnet vgg11"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
TEXTS: dict[str, dict[str, Any]] = {
    "Bert": SMALL | {"intermediate_size": 64},
    "Roberta": SMALL | {"intermediate_size": 64},
    "GPTNeoX": SMALL | {"intermediate_size": 64},
    "Llama": SMALL | {"intermediate_size": 64},
    "Qwen2": SMALL | {"intermediate_size": 64, "num_key_value_heads": 2},
    "Mistral": SMALL | {"intermediate_size": 64, "num_key_value_heads": 2},
    "Electra": SMALL | {"intermediate_size": 64, "embedding_size": 32},
    "Albert": SMALL | {"intermediate_size": 64, "embedding_size": 32},
    "OPT": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Gemma": SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 50},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50},
}


def healthy(name: str) -> tuple[nn.Module, Any]:
    """A model that PyTorch compiles, with a batch."""
    torch.manual_seed(0)
    if name in MODELS:
        return made(name), MODELS[name][1]
    if name in TEXTS:
        import transformers

        config = getattr(transformers, f"{name}Config")(**TEXTS[name], use_cache=False)
        ids = torch.arange(24).reshape(2, 12) * 7 % 50
        return getattr(transformers, f"{name}Model")(config), {"input_ids": ids}
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=10)
    return model, torch.randn(4, 3, 64, 64)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*MODELS, *TEXTS, *IMAGES.split()])
def test_healthy_compiled_models_have_no_first(name: str, dtype: str) -> None:
    model, batch = healthy(name)
    low = torch.bfloat16 if dtype == "bfloat16" else None
    result = mprun.diff(Side(model, low), Side(torch.compile(model), low), batch)  # type: ignore[arg-type]
    assert result.first is None, str(result)
    assert not any("only" in note for note in result.notes), str(result)
    assert len({row.module for row in result.rows}) > 3


def test_tensors_of_one_size_are_moved_in_their_own_ways() -> None:
    x = torch.ones(4096)
    assert torch.equal(moved(x, 1 / 256), moved(x.clone(), 1 / 256))
    # else the sum of a block and what goes around it would never change its sign
    assert float((moved(x, 1 / 256) - moved(2 * x, 1 / 256) / 2).abs().max()) > 1 / 512


# ---- planted faults ------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm of numbers far from 0, and code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        nn.init.constant_(self.into.bias, 1000.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.gelu(self.norm(self.into(x)) * 1.5))


class Rounding(nn.Module):
    """A float32 module with a cast inside, which Inductor drops."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.bfloat16().float() * 1.5).relu()


def other_epsilon(graph: Any) -> None:
    for node in graph.nodes:
        if node.target is aten.add.Tensor and node.args[1] == 1e-5:
            node.args = (node.args[0], 1e-2)


def variance_in_one_pass(graph: Any) -> None:
    """E[x^2] - E[x]^2, which cancels, where Inductor adds up (x - E[x])^2."""
    for node in [*graph.nodes]:
        if node.target is aten.var_mean.correction:
            (variance, *_), x = sorted(node.users, key=lambda user: user.args[1]), node.args[0]

            def add(op: Any, *args: Any, like: Any = variance) -> Any:
                new = graph.call_function(op, args)
                new.meta["val"] = like.meta["val"]
                return new

            with graph.inserting_before(variance):
                squares = add(aten.mean.dim, add(aten.mul.Tensor, x, x, like=x), [-1], True)
                mean = add(aten.mean.dim, x, [-1], True)
                new = add(aten.sub.Tensor, squares, add(aten.mul.Tensor, mean, mean))
            variance.replace_all_uses_with(new)


def other_derivative(graph: Any) -> None:
    """The constant 1 / sqrt(2 pi) of GELU's derivative, off by a thousandth."""
    for node in graph.nodes:
        if any(isinstance(x, float) and abs(x - 0.39894228) < 1e-6 for x in node.args):
            node.args = tuple(0.3994 if isinstance(x, float) else x for x in node.args)


FAULTS = {
    "epsilon": (other_epsilon, "forward", "norm"),
    "sum": (variance_in_one_pass, "forward", "norm"),
    "derivative": (other_derivative, "backward", ""),
}


def compared(model: nn.Module, batch: Any, **options: Any) -> Difference:
    return mprun.diff(model, torch.compile(model, **options), batch)  # type: ignore[arg-type]


@pytest.mark.representative("sum-options0")
@pytest.mark.parametrize("options", [{}, {"fullgraph": True, "dynamic": True}])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_compiler_is_found_with_its_kernel(
    fault: str, options: dict[str, Any]
) -> None:
    plant, phase, module = FAULTS[fault]
    torch.manual_seed(0)
    with inductor.patch(post_grad_custom_pre_pass=plant):
        result = compared(Block(), torch.randn(8, 16), **options)
    assert result.first is not None, str(result)
    assert (result.first.phase, result.first.module) == (phase, module), str(result)
    assert result.first.b.exceeds(result.first.a)
    assert result.first.op.startswith("cpp_fused"), str(result)
    assert "output of eager code is nearer" in str(result) or phase == "backward"
    if not module:
        assert "test_compiled.py:" in result.first.line


def test_a_cast_that_the_compiler_drops_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Rounding(), nn.Linear(16, 16))
    result = compared(model, torch.randn(8, 16))
    assert result.first is not None
    assert result.first.module == "1"
    assert result.first.a.arising > 1e-4 > 1e-6 > result.first.b.arising
    assert "the output of compiled code is nearer" in str(result)
    assert result.accuracy["emulate_precision_casts"].is_eager
    assert any("cpp_fused" in note and "test_compiled.py:" in note for note in result.notes)


class Rope(nn.Module):
    """Rotary embeddings in bfloat16, as in pytorch/pytorch#182225."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = q * self.scale
        half = torch.cat((-q[..., 8:], q[..., :8]), dim=-1)
        return (q * cos) + (half * sin)


def test_bits_that_differ_by_rounding_alone_are_no_fault_and_the_nearer_side_is_named() -> None:
    torch.manual_seed(123)
    batch = (torch.randn(1, 2, 7, 16), torch.randn(1, 1, 7, 16), torch.randn(1, 1, 7, 16))
    result = compared(Rope().bfloat16(), batch, fullgraph=True, dynamic=True)
    assert result.first is None
    assert result.losses[0] != result.losses[1]
    assert result.accuracy["compiled"][0] > result.accuracy["eager"][0] + 0.5
    assert result.accuracy["emulate_precision_casts"].is_eager


# ---- what may be compiled ------------------------------------------------------------------------


class Breaking(nn.Module):
    """A graph that breaks, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).tanh()
        torch._dynamo.graph_break()
        return self.one(x) * 2


@pytest.mark.representative("inductor")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_graphs_that_break_and_other_backends_are_followed(backend: str) -> None:
    torch.manual_seed(0)
    model = Breaking()
    before = {n: p.clone() for n, p in model.named_parameters()}
    result = compared(model, torch.randn(4, 16), backend=backend)
    assert result.first is None, str(result)
    assert {(x.module, x.call) for x in result.rows} == {("one", 0), ("one", 1), ("", 0)}
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not any(m._forward_hooks or "forward" in vars(m) for m in model.modules())


def test_where_the_compiler_refuses_hooks_the_whole_model_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no hooks here")

    monkeypatch.setattr("mprun.inspect.divergence.compiled._marked", refuse)
    result = compared(nn.Sequential(nn.Linear(16, 4)), torch.randn(4, 16), backend="eager")
    assert result.first is None
    assert {row.module for row in result.rows} == {""}
    [note] = result.notes
    assert note.startswith("b: only the compiled model's own outputs and gradients are seen: ")
