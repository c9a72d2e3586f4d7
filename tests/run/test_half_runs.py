"""Real runs in the modes with 16-bit parameters: records, bytes, repeatability, resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from mprun.cli.main import main
from mprun.precision import kernels
from mprun.records.run_record import LossScaleRow, Summary, read_lines, read_summary
from mprun.train.machine.machine import has_amx
from tests.run.test_resume import assert_same_run, trained
from tests.schema import conforms
from tests.summaries import check_partials

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

TRUE_HALF = {
    "fp16_true": ("float16", "nearest"),
    "bf16_true": ("bfloat16", "nearest"),
    "half_sr": ("float16", "stochastic"),
    "bf16_sr": ("bfloat16", "stochastic"),
    "half_sr_full": ("float16", "stochastic"),
}
# Parameters of the recipes as they are run here.
SIZES = {"linear": 1024 * 512 + 512, "mnist": 784 * 32 + 32 * 32 + 32 * 10 + 74}
SIZES["fashion_mnist"] = (9 * 5 + 5) + (25 * 5 * 12 + 12) + 24 + (12 * 9 * 9 * 100 + 100) + 1010
RECIPES = {
    "linear": ["recipe=linear"],
    "mnist": ["recipe=mnist", "recipe.model.units=32", "data.source=generated"],
    "fashion_mnist": [
        *("recipe=fashion_mnist", "recipe.model.image_size=28", "data.source=generated"),
    ],
}
# Every mode in one recipe or another; all of them in all recipes are exhaustive.
SMOKE_RUNS = ("linear-fp16_true", "fashion_mnist-bf16_true", "fashion_mnist-half_sr*")
QUICK = [*RECIPES["mnist"], "data.train_limit=320", "data.eval_limit=64", "device=cpu"]
QUICK += ["data.validation_fraction=0.1", "train.batch_size=32", "train.eval_batch_size=64"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a recipe's smoke run in a mode, made once."""
    folder = tmp_path_factory.mktemp("smoke")

    def run(recipe: str, mode: str) -> Path:
        path = folder / f"{recipe}-{mode}"
        if not path.exists():
            words = [*RECIPES[recipe], f"precision={mode}", "preset=smoke", "device=cpu"]
            words.append("train.max_time_s=600")  # of a busy machine too
            assert main([*words, f"run.dir={path}"]) == 0
        return path

    return run


def quick(name: str, *words: str, steps: int = 6) -> Summary:
    """A run of a few steps of `mnist` into the folder `name`."""
    assert main([*QUICK, f"train.max_steps={steps}", *words, f"run.dir={name}"]) == 0
    summary = read_summary(Path(name))
    conforms(summary, Summary)
    return summary


# ---- every mode, every recipe -------------------------------------------------------------------


@pytest.mark.representative(*SMOKE_RUNS)
@pytest.mark.parametrize("mode", TRUE_HALF)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_smoke_preset_passes_and_its_record_says_what_ran(
    smoke: Callable[[str, str], Path], recipe: str, mode: str
) -> None:
    """The preset itself fails a run whose loss does not fall."""
    path = smoke(recipe, mode)
    summary = read_summary(path)
    conforms(summary, Summary)
    dtype, rounding = TRUE_HALF[mode]
    assert (summary.status, summary.steps) == ("completed", 36)
    assert (summary.precision, summary.variant) == (mode, mode)
    losses = [x["loss"] for x in read_lines(path) if x["kind"] == "step"]
    assert sum(losses[-12:]) < sum(losses[:12])
    row = summary.requested
    assert summary.effective == replace(row, partials_dtype=summary.effective.partials_dtype)
    check_partials(summary)
    assert asdict(row) == {
        "param_dtype": dtype,
        "compute_dtype": dtype,
        "output_dtype": "float32",
        "casting": "none",
        "op_lists": "none",
        "layers": {},
        "rounding": rounding,
        "rounding_scope": "all" if mode == "half_sr_full" else "update",
        "overflow": "infinity",
        "accum_dtype": dtype,
        "momentum_dtype": "float32",
        "variance_dtype": "float32",
        "partials_dtype": "float32",
        "tf32": False,
        "gemms": "none",
        "hadamard": False,
        "reduce_dtype": "float32",
    }
    assert summary.execution == ("emulated" if mode == "half_sr_full" else "native")
    scale = summary.loss_scale
    assert scale.kind == ("dynamic" if dtype == "float16" else "none")
    assert scale.initial == (65536 if dtype == "float16" else 1)
    kernel = "eager" if kernels.why_not() else "c"
    assert summary.backend.optimizer_impl == kernel
    last = dtype == "bfloat16" and not has_amx()
    assert summary.backend.memory_format == ("channels_last" if last else "contiguous")
    state = trained(path)
    assert {x.dtype for x in state["model"].values()} == {getattr(torch, dtype)}
    assert sum(x.numel() for x in state["model"].values()) == SIZES[recipe]
    assert all(x.isfinite().all() for x in state["model"].values())


@pytest.mark.representative("half_sr", "half_sr_full", "bf16_true")
@pytest.mark.parametrize("mode", TRUE_HALF)
def test_substitutions_name_what_is_not_pytorch_s_kernel(
    smoke: Callable[[str, str], Path], mode: str
) -> None:
    found = read_summary(smoke("fashion_mnist", mode)).substitutions
    if mode == "half_sr_full":
        assert [(x.op, x.dtype) for x in found] == [("*", "float32")]
        assert "each result rounded stochastically to 16 bits" in found[0].reason
    elif mode.startswith("bf16"):
        assert found == []
    else:  # on a CPU, where float16 convolutions have no fast backward
        assert (found[0].op, found[0].dtype) == ("aten.convolution_backward", "float16")
        assert {x.dtype for x in found} == {"float16"}


@pytest.mark.representative(*SMOKE_RUNS)
@pytest.mark.parametrize("mode", TRUE_HALF)
@pytest.mark.parametrize("recipe", RECIPES)
def test_parameters_and_gradients_take_half_of_float32_s_bytes(
    smoke: Callable[[str, str], Path], recipe: str, mode: str
) -> None:
    wide = read_summary(smoke(recipe, "fp32")).memory_bytes
    half = read_summary(smoke(recipe, mode)).memory_bytes
    assert wide.parameters == 4 * SIZES[recipe]
    assert half.parameters == 2 * SIZES[recipe]
    assert half.peak is not None
    assert wide.peak is not None
    assert half.peak < wide.peak
    parts = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "temporary")
    assert half.peak == sum(getattr(half, k) for k in parts)
    if recipe == "linear":  # inputs are stored as the mode takes them, targets in float32
        assert wide.data == 64 * (1024 * 4 + 512 * 4)
        assert half.data == 64 * (1024 * 2 + 512 * 4)
    else:  # bytes, in every mode
        assert half.data == wide.data


def test_an_emulated_time_is_never_shown_without_the_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick("run", "precision=half_sr_full", steps=12)
    assert "EMULATED" in capsys.readouterr().out


# ---- options -----------------------------------------------------------------------------------


def test_float32_gradients_without_a_loss_scale() -> None:
    """What PopTorch's half does: float16 everywhere, gradients accumulated in float32."""
    words = ["precision=half_sr", "precision.accum_dtype=float32", "loss_scale=none"]
    summary, plain = quick("run", *words, steps=20), quick("plain", "precision=half_sr")
    assert summary.effective.accum_dtype == "float32"
    assert summary.loss_scale == LossScaleRow(kind="none", initial=1.0, final=1.0)
    assert summary.skipped_steps == 0
    assert summary.memory_bytes.parameters == 2 * SIZES["mnist"]
    assert summary.memory_bytes.gradients == 4 * SIZES["mnist"]
    assert plain.memory_bytes.gradients == 2 * SIZES["mnist"]
    losses = [x["loss"] for x in read_lines(Path("run")) if x["kind"] == "step"]
    assert sum(losses[-6:]) < sum(losses[:6])


ADAMW = ["train.optimizer.name=adamw"]
MOMENTUM = ["train.optimizer.name=sgd", "train.optimizer.momentum=0.9"]


def test_moments_in_8_bits_take_the_bytes_of_a_hand_count() -> None:
    codes = ["precision.momentum_dtype=uint8", "precision.variance_dtype=uint8"]
    summary = quick("run", "precision=bf16_sr", *ADAMW, *codes, steps=4)
    assert summary.effective.momentum_dtype == summary.effective.variance_dtype == "uint8"
    states = trained(Path("run"))["optimizer"]["state"]
    assert {x["exp_avg"].dtype for x in states.values()} == {torch.uint8, torch.float32}
    expected = 0
    for state in states.values():
        count = state["exp_avg"].numel()
        expected += 4 + 2 * (count + 4 * -(-count // 256) if count >= 4096 else 4 * count)
    assert summary.memory_bytes.optimizer_state == expected


@pytest.mark.representative("fp16_true", "bf16_mixed")
@pytest.mark.parametrize("mode", ["fp16_true", "bf16_sr", "half_sr", "fp16_mixed", "bf16_mixed"])
def test_native_modes_can_be_emulated(mode: str) -> None:
    summary = quick("run", f"precision={mode}", "execution=emulated")
    assert summary.execution == "emulated"
    (every,) = summary.substitutions
    assert every.op == "*"
    assert "rounded to nearest to 16 bits" in every.reason
    native = quick("native", f"precision={mode}", "execution=native")
    assert native.execution == "native"
    assert native.memory_bytes == summary.memory_bytes  # what the mode needs, not its means
    ours, theirs = (read_lines(Path(name))[0]["loss"] for name in ("run", "native"))
    # A first loss is a mean of 32 losses from outputs with 8 or 11 bits of significand.
    assert ours == pytest.approx(theirs, rel=2**-6)


def test_float16_partials_are_emulated_and_reported() -> None:
    summary = quick("run", "precision=half_sr", "precision.partials_dtype=float16")
    assert summary.execution == "emulated"
    assert summary.effective.partials_dtype == "float16"
    named = {x.op: x.dtype for x in summary.substitutions}
    assert named["*"] == "float32"
    assert named["aten.mm"] == "float16"
    assert not any("convolution" in op for op in named)  # the model has none


# ---- the same again -----------------------------------------------------------------------------


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and for the rest of the test there are no compiled kernels."""
    if kernels.why_not() is not None:
        pytest.skip(f"no compiled kernels: {kernels.why_not()}")

    def take_away() -> None:
        monkeypatch.setenv("MPRUN_NO_KERNELS", "1")
        kernels.library.cache_clear()

    yield take_away
    kernels.library.cache_clear()


VARIANTS: dict[str, list[str]] = {
    **{mode: [f"precision={mode}"] for mode in TRUE_HALF},
    "kahan": ["precision=bf16_true", "precision.rounding=kahan"],
    "adamw": [
        *("precision=half_sr", *ADAMW, "precision.momentum_dtype=bfloat16"),
        "precision.variance_dtype=float16",
    ],
    "codes": [
        *("precision=bf16_true", "precision.rounding=split", *ADAMW),
        *("precision.momentum_dtype=uint8", "precision.variance_dtype=uint8"),
    ],
    "momentum": ["precision=bf16_sr", *MOMENTUM, "precision.momentum_dtype=float16"],
}


@pytest.mark.representative("half_sr_full", "adamw", "codes")
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_a_compiler_the_bits_are_the_same(
    without_compiler: Callable[[], None], variant: str
) -> None:
    words = VARIANTS[variant]
    assert quick("compiled", *words).backend.optimizer_impl == "c"
    without_compiler()
    assert quick("eager", *words).backend.optimizer_impl == "eager"
    assert_same_run(Path("eager"), Path("compiled"))


def test_a_run_begun_with_a_compiler_goes_on_without(without_compiler: Callable[[], None]) -> None:
    quick("whole", "precision=half_sr_full", steps=12)
    quick("run", "precision=half_sr_full", steps=5)
    without_compiler()
    assert main(["run.resume=run", "train.max_steps=12"]) == 0
    assert_same_run(Path("run"), Path("whole"))


# ---- going on ----------------------------------------------------------------------------------

RESUMED: dict[str, list[str]] = {
    **VARIANTS,
    "accumulated": ["precision=half_sr_full", "train.accumulate=2"],
    # A scale that grows every three steps overflows within some.
    "overflowing": [
        *("precision=half_sr", "loss_scale=dynamic", "loss_scale.growth_interval=3"),
        "loss_scale.growth_factor=16",
    ],
    "overflowing lists": [
        *("op_lists=hmp", "precision=fp16_mixed", "loss_scale=dynamic"),
        *("loss_scale.growth_interval=3", "loss_scale.growth_factor=16"),
    ],
    "emulated lists": ["op_lists=hmp", "execution=emulated", "precision.layers={4: fp32}"],
}


@pytest.mark.representative("half_sr_full", "adamw", "codes", "overflowing", "overflowing lists")
@pytest.mark.parametrize("variant", RESUMED)
def test_a_run_given_more_steps_is_the_longer_run(variant: str) -> None:
    words = RESUMED[variant]
    quick("whole", *words, steps=20)
    quick("run", *words, steps=7)
    assert main(["run.resume=run", "train.max_steps=20"]) == 0
    assert_same_run(Path("run"), Path("whole"))
    if variant.startswith("overflowing"):
        assert read_summary(Path("whole")).skipped_steps > 0
