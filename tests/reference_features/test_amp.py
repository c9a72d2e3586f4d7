"""torch.amp and TF32: autocast, loss scaling and the choice of a mode (rows B1 to B10)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.precision import EmulatedTf32, disable_casts
from mprun.recipes.mnist import Mnist
from mprun.records.run_record import LossScaleRow
from tests.adversarial.recipe import WORDS, write_recipe
from tests.parity.raw_loop import of_recipe, rmsprop
from tests.reference_features import faulty
from tests.reference_features.runs import (
    LINEAR,
    MNIST,
    losses,
    mnist_compared,
    recipes_page,
    run,
    same,
    weights,
    written,
)

pytestmark = pytest.mark.usefixtures("native_is_fast", "one_traced_step", "quick_runs")

STEPS = 5


def raw(low: torch.dtype | None, scaler: torch.amp.GradScaler | None = None) -> dict[str, Tensor]:
    """The weights of `STEPS` steps of the mnist recipe in PyTorch alone."""
    loop = of_recipe(Mnist(16), rmsprop, 32, STEPS, train_limit=160)
    loop.train(low, scaler)
    return dict(loop.model.state_dict())


PLAIN = ["speed=plain", "data.validation_fraction=0", "train.optimizer.eps=1e-7"]


def switches() -> tuple[object, ...]:
    """PyTorch's process-wide switches of TF32."""
    return (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
    )


def test_b1_fp32_is_pytorch_s_float32_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    plain = Mnist.loss

    def loss(self: Mnist, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(switches())
        return plain(self, output, batch)

    monkeypatch.setattr(Mnist, "loss", loss)
    summary = run("precision=fp32", *PLAIN, steps=STEPS)
    assert summary.effective.tf32 is False
    assert set(seen) == {("ieee", "ieee", "ieee")}
    assert same(weights(), raw(None))


def to_tf32(x: Tensor) -> Tensor:
    """`x` with 10 mantissa bits, to nearest even, by whole numbers."""
    bits = x.view(torch.int32).long()
    return (bits + 0xFFF + ((bits >> 13) & 1) & ~0x1FFF).int().view(torch.float32)


def test_b2_tf32_rounds_the_inputs_of_matmuls_and_convolutions_and_is_put_back() -> None:
    before = switches()
    summary = run("precision=tf32")
    assert switches() == before
    assert summary.effective.tf32 is True
    assert summary.execution == "emulated"  # a CPU has no TensorFloat-32
    run("precision=fp32", name="exact")
    assert losses()[0] != losses("exact")[0]
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    image, kernel = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    with EmulatedTf32().region():
        made = x @ w.t(), nn.functional.conv2d(image, kernel)
    assert torch.equal(made[0], to_tf32(x) @ to_tf32(w).t())
    assert torch.equal(made[1], nn.functional.conv2d(to_tf32(image), to_tf32(kernel)))


def test_b3_fp16_with_a_dynamic_loss_scale_is_autocast_with_gradscaler() -> None:
    summary = run("precision=fp16_mixed", *PLAIN, "loss_scale.value=65536", steps=STEPS)
    assert summary.loss_scale.kind == "dynamic"
    assert same(weights(), raw(torch.float16, torch.amp.GradScaler("cpu")))


def test_b4_bf16_is_autocast_without_a_scale() -> None:
    summary = run("precision=bf16_mixed", *PLAIN, steps=STEPS)
    assert summary.loss_scale == LossScaleRow(kind="none", initial=1.0, final=1.0)
    assert same(weights(), raw(torch.bfloat16))


def test_b5_regions_and_named_modules_stay_out_of_autocast() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16), disable_casts():
        assert torch.equal(x @ w.t(), torch.mm(x, w.t()))
        assert (x @ w.t()).dtype == torch.float32
    words = [*MNIST, "precision=bf16_mixed", "precision.layers={2: fp32}"]
    rows = written("trace", *words, file="trace.json")["rows"]
    linear = {
        row["module"]: row["dtypes_out"]
        for row in rows
        if row["phase"] == "forward" and row["op"] == "linear"
    }
    assert linear == {"0": ["bfloat16"], "2": ["float32"], "4": ["bfloat16"]}


HOSTILE = {"fp16_hostile": "range", "bf16_hostile": "precision"}


@pytest.mark.parametrize("case", HOSTILE)
def test_b7_numerics_says_whether_range_or_precision_is_needed(case: str) -> None:
    write_recipe(Path())
    few = ["numerics.steps=6", "numerics.span=60", "numerics.plots=false"]
    words = [*WORDS, f"recipe.model.case={case}", "precision=fp32", *few]
    verdict = written("numerics", *words, file="numerics.json")["verdict"]
    assert HOSTILE[case] in verdict["word"], verdict


def test_b8_trace_explains_the_op_in_which_two_dtypes_met(
    capsys: pytest.CaptureFixture[str],
) -> None:
    faulty.write_recipe()
    words = [*faulty.WORDS, "recipe.model.fault=float32_tensor", "precision=bf16_true"]
    assert main(["trace", *words, "run.dir=run"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    for word in ("addmm", "last", "float32", "bfloat16", "dtype=x.dtype"):
        assert word in line, line


def test_b8_trace_finds_a_cast_that_the_model_s_author_made() -> None:
    rows = written("trace", *MNIST, "precision=bf16_mixed", file="trace.json")["rows"]
    cast = [row for row in rows if row["op"] == "cast" and row["phase"] == "other"]
    assert [(row["casts"][0]["from"], row["casts"][0]["to"]) for row in cast] == [
        ("bfloat16", "float32")  # the outputs, and nothing else outside of the model
    ]
    assert all(row["dtypes_out"] for row in rows if row["op"] == "linear")


def test_b10_going_on_in_fp16_warns_of_weights_beyond_its_range(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(32, 8).bfloat16()
    with torch.no_grad():
        model.weight[0] = 1e5  # 32 of 264 numbers
    torch.save(model.state_dict(), "trained.pt")
    words = [*LINEAR, "precision=fp16_true", "train.init_from=trained.pt", "train.max_steps=1"]
    main([*words, "run.dir=run"])
    shown = capsys.readouterr()
    assert "32 of 264 overflow (12.121 %)" in shown.out + shown.err


def test_b9_the_published_speed_ups_stand_beside_the_measured_ones() -> None:
    shown, page, data = mnist_compared()
    for text in (shown, page, recipes_page()):
        assert "1.5 to 5.5 times" in text
        assert "V100" in text
    for figure in ("a further 1.3 to 2.5 times", "16 times", "A100"):  # no run measures these
        assert figure in page, figure
        assert figure in recipes_page(), figure
    assert "V100" not in json.dumps(json.loads(data)["variants"])  # no figure of ours
