"""`mprun export`: the weights of a run, bit for bit, as other programs read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import mprun
from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.train import checkpoint

LINEAR = ["recipe=linear", "train.max_steps=3", "run.dir=run", "precision=bf16_true"]
HUGGING = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def model():
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config)

def data():
    tokens = torch.arange(64).reshape(8, 8) % 11
    return {"train": {"input_ids": tokens, "labels": tokens}}
"""
SMALL = """
import torch

def model():
    return torch.nn.Linear(2, 1)

def data():
    return {"train": (torch.ones(8, 2), torch.ones(8, 1))}

def loss(output, batch):
    return (output - batch[1]).square().mean()
"""


def saved() -> dict[str, Tensor]:
    state = checkpoint.load(Path("run"))
    assert state is not None
    weights: dict[str, Tensor] = state["trainer"]["model"]
    return weights


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    kinds = all(a[k].dtype == b[k].dtype for k in a)
    return a.keys() == b.keys() and kinds and all(torch.equal(a[k], b[k]) for k in a)


def test_safetensors_and_state_dicts_have_the_checkpoint_s_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(LINEAR) == 0
    capsys.readouterr()
    assert main(["export", "run", "model.safetensors"]) == 0
    out = capsys.readouterr().out
    assert "(bfloat16), linear in bf16_true after 3 steps" in out
    assert same(load_file("model.safetensors"), dict(saved()))
    with safe_open("model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        assert file.metadata()["precision"] == "bf16_true"
    assert main(["export", "run", "model.pt"]) == 0
    assert same(torch.load("model.pt", weights_only=True), dict(saved()))
    words = ["recipe=linear", "train.max_steps=1", "train.init_from=model.safetensors"]
    assert main([*words, "run.dir=next"]) == 0


def test_a_model_saves_itself_and_tied_weights_are_written_once() -> None:
    from transformers import AutoModelForCausalLM

    Path("tiny_gpt2.py").write_text(HUGGING, encoding="utf-8")
    words = ["recipe=tiny_gpt2.py", "train.max_steps=2", "train.batch_size=4", "run.dir=run"]
    assert main([*words, "precision=bf16_mixed"]) == 0
    mprun.load("run").model.save_pretrained("hub")
    loaded = AutoModelForCausalLM.from_pretrained("hub")
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved().items())
    assert main(["export", "run", "tied.safetensors"]) == 0  # lm_head is the embedding
    tied = load_file("tied.safetensors")
    assert len(tied) == len(saved()) - 1
    assert all(torch.equal(tied[name], saved()[name]) for name in tied)
    assert main([*words[:-1], "run.dir=next", "train.init_from=tied.safetensors"]) == 0


MISTAKES = [
    ([], "takes a run and a file, not 0 names"),
    (["run"], "write mprun export RUN FILE"),
    (["nope", "x.pt"], "nope is not a run's folder"),
    (["run", "x.onnx"], "legal is NAME.safetensors"),
    (["run", "there.pt"], "already exists"),
    (["run", "folder"], "legal is NAME.safetensors"),
    (["empty", "x.pt"], "summary.json"),
    (["run", "no/such/x.pt"], "cannot be written"),
]


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LINEAR) == 0
    Path("there.pt").touch()
    Path("empty").mkdir()
    for words, text in MISTAKES:
        capsys.readouterr()
        assert main(["export", *words]) == 2, words
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1
    checkpoint.path_in(Path("run")).unlink()
    assert main(["export", "run", "x.pt"]) == 2
    assert "has no checkpoint" in capsys.readouterr().err


def test_python_gets_the_model_as_the_run_stored_it() -> None:
    assert main(LINEAR) == 0
    before = torch.get_rng_state()
    run = mprun.load("run")
    assert torch.equal(torch.get_rng_state(), before)
    assert same(run.weights, saved())
    assert same(dict(run.model.state_dict()), saved())
    assert not run.model.training
    assert (run.config.train.max_steps, run.config.precision.name) == (3, "bf16_true")
    assert type(run.recipe).__name__ == "Linear"
    with pytest.raises(UsageError, match="there is no run nope"):
        mprun.load("nope")
    checkpoint.path_in(Path("run")).unlink()
    with pytest.raises(UsageError, match="run has no checkpoint"):
        mprun.load("run")


def test_code_beside_a_run_of_a_study_runs_on_trust_alone() -> None:
    """A study's folder has one origin with its runs: `run.resume` asks for trust in both."""
    Path("study").mkdir()
    Path("study/mine.py").write_text(SMALL, encoding="utf-8")
    words = ["sweep", "recipe=study/mine.py", "precision=bf16_true", "seeds=1", "run.dir=s"]
    assert main([*words, "train.max_steps=2"]) == 0
    run = next(Path("s").glob("*-seed0"))
    assert mprun.load(run).model.weight.dtype == torch.bfloat16
    Path("study/mine.py").rename("s/mine.py")
    config = run / "config.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("study/mine.py", "s/mine.py"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"run.trust=true"):
        mprun.load(run)
    Path("s/mine.py").write_text(SMALL + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="was changed since the run began"):
        mprun.load(run, trust=True)
    Path("s/mine.py").write_text(SMALL, encoding="utf-8")
    assert mprun.load(run, trust=True).model.weight.dtype == torch.bfloat16
