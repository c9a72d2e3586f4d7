"""The transformer recipe is a model of transformers with random weights."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mprun import release
from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.recipes.transformer import Transformer
from mprun.records.run_record import read_summary

MISSING = "transformers is not installed: mprun[transformer]"
transformers = pytest.importorskip("transformers", reason=MISSING)

SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 65}
FEW_EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
SMALL = [f"recipe.model.{name}={value}" for name, value in SIZES.items()]


def recipe(architecture: str = "llama", **changes: Any) -> Transformer:
    return Transformer(architecture=architecture, **{**SIZES, "text": None, **changes})


@pytest.mark.representative("llama", "gpt2")
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "gpt_neox"])
def test_an_architecture_has_the_sizes(architecture: str) -> None:
    model = recipe(architecture).model()
    config: Any = model.config
    found = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    assert found == (32, 2, 2)
    assert (config.vocab_size, config.max_position_embeddings) == (65, 16)
    ids = torch.randint(0, 65, (2, 16))
    loss = recipe(architecture).forward(model, ids).loss.item()
    assert abs(loss - math.log(65)) < 0.5, "small random weights guess"


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "gptj", "deepseek_v3"])
def test_a_prediction_sees_no_later_character(architecture: str) -> None:
    torch.manual_seed(0)
    made = recipe(architecture, config=FEW_EXPERTS if architecture == "deepseek_v3" else {})
    model = made.model().eval()
    ids = torch.randint(0, 65, (2, 16))
    changed = ids.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 65
    one, two = (made.forward(model, x) for x in (ids, changed))
    # The order of float32 sums may differ: logits are below 1.
    torch.testing.assert_close(one.logits[:, :12], two.logits[:, :12], rtol=0, atol=1e-5)
    assert not torch.equal(one.logits[:, 12:], two.logits[:, 12:])
    shifted = F.cross_entropy(one.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(one.loss, shifted)


def test_the_mlp_and_the_heads_are_the_usual_ones_unless_set() -> None:
    usual: Any = recipe().model().config
    assert (usual.intermediate_size, usual.num_key_value_heads, usual.head_dim) == (128, 2, 16)
    own: Any = recipe(config={"intermediate_size": 40, "num_key_value_heads": 1}).model().config
    assert (own.intermediate_size, own.num_key_value_heads) == (40, 1)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"architecture": "lama"}, "legal is the model_type.*did you mean 'llama'"),
        ({"config": {"intermediat_size": 3}}, "no such argument.*did you mean 'intermediate_size'"),
        ({"config": {"hidden_size": 8}}, "legal is to set recipe.model.width instead"),
        pytest.param(
            {"config": {"intermediate_size": "a"}},
            "LlamaConfig refuses these sizes: .*expected int",
            marks=pytest.mark.skipif(
                release(transformers.__version__) < (5, 4), reason="transformers 5.4 checks types"
            ),
        ),
        ({"architecture": "gemma3"}, "parts with sizes of their own; .* such as gemma3_text"),
        ({"layers": 0}, "layers=0: legal is 1 or more"),
        ({"heads": 3}, "width=32: legal is a multiple of heads=3"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        recipe(**wrong)
    assert "\n" not in str(raised.value)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'mprun\[transformer\]'"):
        recipe()


@pytest.mark.representative("bf16_mixed")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_sr"])
def test_it_trains(precision: str) -> None:
    words = ["recipe=transformer", *SMALL, f"precision={precision}", "data.source=generated"]
    words += ["train.max_steps=40", "train.warmup_steps=4", "train.lr=0.01", "data.eval_limit=64"]
    assert main([*words, "recipe.model.config.intermediate_size=64", "run.dir=run"]) == 0
    assert read_summary(Path("run")).history[-1].validation.loss < 3.6, "a guess has 4.2"
