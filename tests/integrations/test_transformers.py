"""`MprunCallback` in the Trainer of Hugging Face: the record, and no bit changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mprun.cli.main import main
from mprun.optim import AdamW
from mprun.records.run_record import read_lines, read_summary
from tests.waiting import PATIENCE_S

transformers = pytest.importorskip("transformers", reason="mprun[transformers]")
pytest.importorskip("accelerate", reason="mprun[transformers]")

from mprun.inspect.replay import read_step  # noqa: E402
from mprun.integrations.transformers import MprunCallback  # noqa: E402
from mprun.watch.nonfinite.step_replay import replay  # noqa: E402


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate collects garbage after each training: half a second with all that pytest holds."""
    monkeypatch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture(autouse=True)
def own_precision() -> Iterator[None]:
    """`TrainingArguments(bf16=True)` of transformers 4 holds for the whole process."""
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


IDS = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))


def llama(dtype: torch.dtype = torch.float32, hidden: int = 32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def trainer_of(
    out: Path, watch: Any, model: Any = None, optimizer: Any = None, **arguments: Any
) -> Any:
    model = llama() if model is None else model
    options: dict[str, Any] = {
        "max_steps": 12,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **arguments,
    }
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(out), **options),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[] if watch is None else [watch],
        optimizers=(None if optimizer is None else optimizer(model.parameters()), None),
    )


def trained(out: Path, watch: Any = None, **arguments: Any) -> list[Tensor]:
    trainer = trainer_of(out, watch, **arguments)
    trainer.train()
    states = trainer.optimizer.optimizer.state.values()
    return [
        *trainer.model.parameters(),
        *(x for state in states for x in state.values() if isinstance(x, Tensor)),
        torch.get_rng_state(),
    ]


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"eval_strategy": "steps", "eval_steps": 4},
    "autocast": {"bf16": True, "gradient_accumulation_steps": 2},
    "bf16": {"model": partial(llama, torch.bfloat16)},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}


@pytest.mark.parametrize("name", CASES)
def test_no_bit_of_the_training_changes(name: str, tmp_path: Path) -> None:
    options = dict(CASES[name])
    make = options.pop("model", llama)
    plain = trained(tmp_path / "plain", model=make(), **options)
    watch = MprunCallback(tmp_path / "record")
    watched = trained(tmp_path / "watched", watch, model=make(), **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    summary = read_summary(tmp_path / "record")
    assert (summary.status, summary.steps, summary.seed) == ("completed", 12, 42)
    assert summary.batch_size == 4 * options.get("gradient_accumulation_steps", 1)
    low = name in ("autocast", "bf16")
    assert summary.effective.compute_dtype == ("bfloat16" if low else "float32")


def test_the_record_has_losses_and_scores_and_compare_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options in {"fp32": {}, "bf16_mixed": {"bf16": True}}.items():
        for seed in (0, 1):
            folder = tmp_path / "runs" / f"{name}_{seed}"
            watch = MprunCallback(folder)
            trained(tmp_path, watch, eval_strategy="steps", eval_steps=6, seed=seed, **options)
            assert watch.run is not None
            assert watch.run.summary.precision == name
    lines = [x for x in read_lines(folder) if x["kind"] == "step"]
    assert [x["step"] for x in lines if x["loss"] is not None] == [2, 4, 6, 8, 10, 12]
    assert all(x["grad_norm"] > 0 and "learning_rate" not in x for x in lines[1::2])
    summary = read_summary(folder)
    assert len(summary.history) == 2
    assert summary.history[-1].validation.named.keys() == {"loss"}
    assert main(["compare", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert "bf16_mixed" in text
    assert "fp32" in text


def test_a_trainer_that_logs_no_loss_gives_the_mean(tmp_path: Path) -> None:
    trained(tmp_path, MprunCallback(tmp_path / "record"), logging_steps=500)
    assert isinstance(read_summary(tmp_path / "record").train.loss, float)


def test_the_audit_names_frozen_modules_and_with_the_cure_finds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bfloat16 Llama at 1e-5: 0 of 768 weights of a norm move."""
    watch = MprunCallback(tmp_path / "frozen")
    model = llama(torch.bfloat16, hidden=768)
    before = model.model.norm.weight.detach().clone()
    options: dict[str, Any] = {"learning_rate": 1e-5, "max_steps": 4}
    trained(tmp_path, watch, model=model, **options)
    assert torch.equal(model.model.norm.weight, before)
    assert watch.run is not None
    assert watch.run.audit is not None
    lost = {f.module for f in watch.run.audit.findings if f.kind == "lost_update"}
    assert "model.norm" in lost
    assert "lost_update  model.norm: this step leaves 100% of 768" in caplog.text
    assert "rounding='stochastic'" in caplog.text
    assert any("lost_update model.norm" in x for x in read_summary(tmp_path / "frozen").warnings)

    caplog.clear()
    own = partial(AdamW, lr=1e-5, rounding="stochastic")
    for name, cure in {
        "autocast": {"model": llama(hidden=768), "bf16": True},
        "stochastic": {"model": llama(torch.bfloat16, hidden=768), "optimizer": own},
    }.items():
        watch = MprunCallback(tmp_path / name)
        trained(tmp_path, watch, **options, **cure)
        assert not torch.equal(cure["model"].model.norm.weight, before)
        assert watch.run is not None
        assert watch.run.audit is not None
        assert watch.run.audit.findings == ()
    assert "lost_update" not in caplog.text


class Failing(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("no more")


def test_a_training_that_fails_ends_with_close_or_the_next_one(tmp_path: Path) -> None:
    watch = MprunCallback(tmp_path / "record")
    trainer = trainer_of(tmp_path, watch)
    trainer.add_callback(Failing())
    with pytest.raises(RuntimeError, match="no more") as error:
        trainer.train()
    assert read_summary(tmp_path / "record").status == "running"
    watch.close(error.value)
    summary = read_summary(tmp_path / "record")
    assert (summary.status, summary.error) == ("failed", "RuntimeError: no more")
    trainer.pop_callback(Failing)
    trainer.train()
    assert read_summary(tmp_path / "record_2").status == "completed"
    assert not trainer.model._forward_pre_hooks


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_a_missing_package_is_one_line(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import mprun.train.observe\n"
        f"try:\n    import mprun.integrations.{package}\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert f"pip install 'mprun[{package}]'" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_the_first_nan_is_saved_and_replayed(tmp_path: Path) -> None:
    """A log of 0 in one module in step 3."""
    model, calls = llama(), iter(range(1, 100))
    model.model.norm.register_forward_hook(
        lambda m, a, y: y + (y * 0).log() if next(calls) == 3 else y
    )
    watch = MprunCallback(tmp_path / "record", on_nonfinite="save")
    trained(tmp_path, watch, model=model, max_steps=4, bf16=True)
    assert watch.run is not None
    assert watch.run.nonfinite is not None
    assert watch.run.nonfinite.step == 3
    assert watch.run.nonfinite.file is not None
    again = llama()
    again.model.norm.register_forward_hook(lambda m, a, y: y + (y * 0).log())
    first = replay(read_step(watch.run.nonfinite.file), again).cause
    assert first is not None
    assert (first.op, first.module) == ("log", "model.norm")
