"""What took effect in a run, against what it leaves behind: bits, dtypes, warnings, variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.config import compose
from mprun.precision import backend_flags
from mprun.records.run_record import Summary, read_lines, read_summary
from mprun.train.assemble import build_parts, make_plan
from mprun.train.assemble.parts import effective, planned
from tests.precision.convolutional import WORDS
from tests.run.test_resume import trained
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

LINEAR = ["recipe=linear", "device=cpu", "recipe.model.in_features=64"]
LINEAR += ["recipe.model.out_features=8"]
SGD, RMSPROP, ADAMW = ([f"train.optimizer.name={name}"] for name in ("sgd", "rmsprop", "adamw"))


def train(name: str, *words: str, steps: int = 4) -> Summary:
    assert main([*words, f"train.max_steps={steps}", f"run.dir={name}"]) == 0
    summary = read_summary(Path(name))
    conforms(summary, Summary)
    return summary


def bits(name: str) -> tuple[list[Any], dict[str, Any]]:
    """Every step's loss and the final weights."""
    return [x.get("loss") for x in read_lines(Path(name))], trained(Path(name))["model"]


def inert(summary: Summary) -> list[str]:
    """The warnings of fields without effect; others depend on the machine's speed."""
    return [text for text in summary.warnings if " has no effect: " in text]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ([*LINEAR, "precision=bf16_mixed"], "rounding", "stochastic"),
        ([*LINEAR, "precision=fp32"], "overflow", "saturate"),
        ([*LINEAR, "precision=fp32", *RMSPROP], "momentum_dtype", "bfloat16"),
    ],
)
def test_what_has_no_effect_is_not_recorded_as_effective_and_makes_no_variant(
    words: Sequence[str], field: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train("plain", *words)
    header = capsys.readouterr().out.splitlines()[1]
    asked = train("asked", *words, f"precision.{field}={value}")
    losses, weights = bits("plain")
    again, others = bits("asked")
    assert losses == again
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    assert asked.variant_hash == plain.variant_hash
    assert getattr(asked.requested, field) == value
    assert asked.effective == plain.effective == plain.requested
    (warning,) = inert(asked)
    assert warning.startswith(f"precision.{field} has no effect: ")
    assert inert(plain) == []
    assert capsys.readouterr().out.splitlines()[1] == header


def test_what_has_an_effect_is_recorded_and_makes_a_variant() -> None:
    """The other side: equal hashes would be no news if every hash were equal."""
    words = [*LINEAR, "precision=bf16_true"]
    plain, asked = train("plain", *words), train("asked", *words, "precision.rounding=kahan")
    assert bits("plain")[0] != bits("asked")[0]
    assert asked.variant_hash != plain.variant_hash
    assert asked.effective.rounding == "kahan"
    assert inert(asked) == []


def test_a_first_moment_has_no_remainder() -> None:
    """Kahan's rounding of a moment beside float32 parameters is the stochastic one."""
    words = [*LINEAR, *SGD, "train.optimizer.momentum=0.9", "precision.momentum_dtype=bfloat16"]
    kahan = train("kahan", *words, "precision.rounding=kahan")
    other = train("other", *words, "precision.rounding=stochastic")
    assert bits("kahan")[0] == bits("other")[0]
    assert kahan.effective.rounding == other.effective.rounding == "stochastic"
    assert kahan.variant_hash == other.variant_hash


def test_a_resumed_run_keeps_its_warnings_and_substitutions() -> None:
    words = [*WORDS, "precision=fp16_true", *SGD, "precision.variance_dtype=float16"]
    before = train("run", *words)
    assert before.substitutions
    assert main(["run.resume=run", "train.max_steps=4"]) == 0  # no step is left to take
    after = read_summary(Path("run"))
    for key in ("warnings", "substitutions", "variant_hash", "effective"):
        assert getattr(after, key) == getattr(before, key), key


# ---- a property: the record against what a probe sees ------------------------------------------

MODES = ("fp32", "tf32", "bf16_mixed", "fp16_mixed", "bf16_true", "fp16_true")
MODES += ("bf16_sr", "half_sr", "half_sr_full")
OPTIMIZERS = {
    "sgd": SGD,
    "sgd with momentum": [*SGD, "train.optimizer.momentum=0.9"],
    "rmsprop": RMSPROP,
    "rmsprop with momentum": [*RMSPROP, "train.optimizer.momentum=0.9"],
    "adamw": ADAMW,
}
CHANGES: dict[str, list[str]] = {
    "nothing": [],
    "gradients": ["precision.accum_dtype=float32"],
    "momentum": ["precision.momentum_dtype=bfloat16"],
    "variance": ["precision.variance_dtype=float16"],
    "saturating": ["precision.overflow=saturate", "loss_scale=none"],
    "emulated": ["execution=emulated"],
}
FIRST = ("momentum_buffer", "exp_avg")
SECOND = ("square_avg", "exp_avg_sq", "square_avg_root", "exp_avg_sq_root")


def seen_dtypes(words: Sequence[str]) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """What hooks and state show of one training step, and the two rows that say so.

    Returns:
        Columns as a probe sees them, `effective` of the built objects, and of those planned.
    """
    chosen = make_plan(compose([*LINEAR, *words]).config, ())
    seen: dict[str, str] = {"momentum_dtype": "float32", "variance_dtype": "float32"}
    with backend_flags(chosen.policy, chosen.native_tf32):
        parts = build_parts(chosen)
        row = effective(chosen, parts.model, parts.optimizer, parts.precision)
        layer = next(m for m in parts.model.modules() if isinstance(m, nn.Linear))
        layer.register_forward_hook(lambda m, i, output: seen.update(compute_dtype=name(output)))
        batch = next(parts.train.epoch(None))
        parts.precision.begin_step(1)
        output = parts.precision.forward(parts.model, batch.parts[0].inputs[0])
        seen["output_dtype"] = name(output)
        parts.precision.backward(parts.recipe.loss(output, batch.parts[0].content))
        weight = next(parts.model.parameters())
        assert weight.grad is not None
        seen["param_dtype"], seen["accum_dtype"] = name(weight), name(weight.grad)
        for p in parts.model.parameters():  # finite: the step is taken, and its state made
            assert p.grad is not None
            p.grad.zero_()
        parts.precision.step(parts.optimizer)
    for key, value in parts.optimizer.state[weight].items():
        if isinstance(value, Tensor) and value.dim():
            if key in FIRST:
                seen["momentum_dtype"] = name(value)
            elif key in SECOND:
                seen["variance_dtype"] = name(value)
    return seen, asdict(row), asdict(planned(chosen))


def name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def legal(mode: str, change: str) -> bool:
    return change != "emulated" or mode not in ("fp32",)


@pytest.mark.representative(
    "fp32-momentum",
    "tf32-emulated",
    "bf16_mixed-nothing",
    "fp16_mixed-gradients",
    "bf16_true-variance",
    "fp16_true-saturating",
    "bf16_sr-gradients",
    "half_sr-saturating",
    "half_sr*-emulated",
)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_effective_is_what_a_probe_sees(mode: str, change: str) -> None:
    if not legal(mode, change):
        pytest.skip("float32 has no emulation")
    moments = change in ("nothing", "momentum", "variance")
    for optimizer in OPTIMIZERS.values() if moments else [ADAMW]:
        words = [f"precision={mode}", *optimizer, *CHANGES[change]]
        seen, row, fake = seen_dtypes(words)
        assert {key: row[key] for key in seen} == seen, words
        assert fake == row, words
