"""Real runs with op lists: records, files, mistakes, layers, resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from mprun.cli.main import main
from mprun.config import compose
from mprun.records.run_record import Summary, read_summary
from mprun.train.assemble import build_parts, make_plan
from tests.run.conftest import AtStep
from tests.run.test_resume import assert_equal, assert_same_run, crash
from tests.schema import conforms
from tests.train.parallel.test_equal_runs import losses
from tests.train.parallel.test_equal_runs import model as weights

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

MNIST = [
    *("recipe=mnist", "recipe.model.units=32", "data.source=generated", "device=cpu"),
    *("data.train_limit=320", "data.eval_limit=64", "data.validation_fraction=0.1"),
    *("train.batch_size=32", "train.eval_batch_size=64"),
]


def run(name: str, *words: str, steps: int = 3) -> Summary:
    """A run of a few steps of `mnist` into the folder `name`."""
    assert main([*MNIST, f"train.max_steps={steps}", *words, f"run.dir={name}"]) == 0
    summary = read_summary(Path(name))
    conforms(summary, Summary)
    return summary


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which these words are refused; no folder is made."""
    capsys.readouterr()
    assert main([*MNIST, "train.max_steps=1", *words, "run.dir=refused"]) == 2
    assert not Path("refused").exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def file(name: str, *lines: str) -> str:
    Path(name).write_text("\n".join(lines), encoding="utf-8")
    return name


# ---- what the record says ------------------------------------------------------------------------


def test_hmp_alone_takes_bf16_mixed_and_the_record_says_so() -> None:
    summary = run("run", "op_lists=hmp")
    assert (summary.precision, summary.variant) == ("bf16_mixed", "bf16_mixed+hmp")
    for row in (summary.requested, summary.effective):
        assert (row.casting, row.op_lists) == ("op_lists", "hmp")
        assert (row.param_dtype, row.compute_dtype) == ("float32", "bfloat16")
        assert (row.accum_dtype, row.layers) == ("float32", {})
    assert summary.loss_scale.kind == "none"
    assert {x.dtype for x in weights("run").values()} == {torch.float32}
    plain = run("autocast", "precision=bf16_mixed")
    assert plain.variant == "bf16_mixed"
    assert plain.requested.op_lists == "none"
    assert plain.variant_hash != summary.variant_hash
    assert run("fp32", "precision=fp32").variant == "fp32"
    assert losses("run") != losses("fp32")
    # A first loss is a mean of 32 losses from outputs with 8 bits of significand.
    assert losses("run")[0] == pytest.approx(losses("fp32")[0], rel=2**-6)


def test_fp16_mixed_with_hmp_has_a_dynamic_loss_scale() -> None:
    summary = run("run", "precision=fp16_mixed", "op_lists=hmp")
    assert (summary.precision, summary.variant) == ("fp16_mixed", "fp16_mixed+hmp")
    assert summary.effective.compute_dtype == "float16"
    assert summary.loss_scale.kind == "dynamic"
    assert summary.loss_scale.initial == 65536


def test_empty_lists_train_as_float32_does() -> None:
    """Bit for bit: a region in which no rule casts changes nothing."""
    words = [*MNIST, "train.max_steps=4", "speed=plain"]
    empty = ["op_lists=hmp", "op_lists.lower=[]", "op_lists.fp32=[]", "op_lists.promote=[]"]
    assert main([*words, *empty, "run.dir=empty"]) == 0
    assert main([*words, "precision=fp32", "run.dir=fp32"]) == 0
    assert_equal(weights("empty"), weights("fp32"))


# ---- what does not go together -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "half_sr"])
def test_modes_without_casts_are_refused_with_the_fix(
    capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    message = refused(capsys, f"precision={mode}", "op_lists=hmp")
    assert f"precision={mode}" in message
    assert "precision=bf16_mixed" in message
    assert "precision=fp16_mixed" in message


def test_a_file_without_lists_is_refused_with_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    name = file("ops.txt", "relu")
    message = refused(capsys, f"op_lists.lower_file={name}", "precision=bf16_mixed")
    assert "op_lists.lower_file" in message
    assert "op_lists=hmp" in message


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["op_lists=hmp", "precision.casting=autocast"], "legal: precision.casting=op_lists"),
        (["precision=bf16_mixed", "precision.casting=op_lists"], "op_lists=hmp"),
        (["op_lists=hpm"], "did you mean 'hmp'"),
        (["op_lists=hmp", "op_lists.lower_file=''"], "a file"),
    ],
)
def test_other_mistakes_are_refused_with_what_is_legal(
    capsys: pytest.CaptureFixture[str], words: list[str], fix: str
) -> None:
    assert fix in refused(capsys, *words)


def test_fields_of_lists_have_no_effect_without_lists(capsys: pytest.CaptureFixture[str]) -> None:
    run("run", "precision=bf16_mixed", "op_lists.strict=true", "op_lists.fp32=[softmax]")
    warnings = capsys.readouterr().err
    assert "op_lists.strict has no effect" in warnings
    assert "op_lists.fp32 has no effect" in warnings


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_replaces_a_list_and_its_names_are_kept() -> None:
    lower, full = file("low.txt", "# mine", "relu", "", "dropout"), file("full.yaml", "[F.linear]")
    words = [f"op_lists.lower_file={lower}", f"op_lists.fp32_file={full}"]
    summary = run("run", "op_lists=hmp", *words)
    assert summary.variant == "bf16_mixed+hmp+files"
    recorded = yaml.safe_load(Path("run/config.yaml").read_text(encoding="utf-8"))["op_lists"]
    assert (recorded["lower"], recorded["fp32"]) == (["relu", "dropout"], ["F.linear"])
    assert "add" in recorded["promote"]
    assert recorded["lower_file"] == "low.txt"
    run("hmp", "op_lists=hmp")
    assert losses("run") != losses("hmp")

    inline = ["op_lists.lower=[relu,dropout]", "op_lists.fp32=[F.linear]"]
    same = run("inline", "op_lists=hmp", *inline)
    assert_equal(weights("run"), weights("inline"))
    assert same.variant_hash == summary.variant_hash


def test_a_file_replaces_cuda_s_lists_too() -> None:
    config = compose(
        ["recipe=mnist", "op_lists=native", f"op_lists.lower_file={file('ops.txt', 'mm')}"]
    ).config.op_lists
    assert config.lower == ["mm"]
    assert config.cuda_lower is None
    assert config.cuda_fp32 is not None


def warnings_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning: ")]


# ---- layers --------------------------------------------------------------------------------------


def dtypes_of_layers(*words: str) -> dict[str, torch.dtype]:
    """The dtype each layer of `mnist` computes in, one forward pass."""
    composed = compose([*MNIST, "op_lists=hmp", *words])
    parts = build_parts(make_plan(composed.config, composed.given))
    seen: dict[str, torch.dtype] = {}

    def remember(name: str) -> Callable[..., None]:
        return lambda module, args, out: seen.update({name: out.dtype})

    for name, module in parts.model.named_modules():
        if name and not list(module.children()):
            module.register_forward_hook(remember(name))
    batch = next(iter(parts.validation))
    parts.precision.forward(parts.model, batch.parts[0].inputs[0])
    return seen


def test_a_layer_kept_in_float32_is_cast_in_nothing() -> None:
    every = dtypes_of_layers()
    assert set(every.values()) == {torch.bfloat16}
    name = next(iter(every))
    one_wide = dtypes_of_layers(f"precision.layers={{{name}: fp32}}")
    assert one_wide == {**every, name: torch.float32}
    half = dtypes_of_layers(f"precision.layers={{{name}: fp16}}")
    assert half == {**every, name: torch.float16}


# ---- going on ------------------------------------------------------------------------------------


def test_a_run_that_failed_goes_on_without_its_files(
    at_step: AtStep,
    capsys: pytest.CaptureFixture[str],
) -> None:
    low = file("low.txt", "linear", "habana_op")
    full = file("full.yaml", "fp32: [relu]", "promote: [add]")
    words = ["op_lists=hmp", f"op_lists.lower_file={low}", f"op_lists.fp32_file={full}"]
    words += [f"op_lists.promote_file={full}", "train.checkpoint_every_steps=4"]
    expected = run("whole", *words, steps=12)
    at_step(7, crash)
    assert main([*MNIST, *words, "train.max_steps=12", "run.dir=run"]) == 1
    Path(low).unlink()
    Path(full).write_text("fp32: [no such: yaml", encoding="utf-8")
    capsys.readouterr()
    assert main(["run.resume=run"]) == 0
    assert_same_run(Path("run"), Path("whole"))
    summary = read_summary(Path("run"))
    assert summary.variant_hash == expected.variant_hash
    assert summary.variant == expected.variant
    assert [x for x in warnings_of(capsys) if "habana_op" in x]


# ---- one file alone ------------------------------------------------------------------------------


def planned(*words: str) -> dict[str, str]:
    """The rules of a run of these words, by canonical name."""
    made = make_plan(compose([*MNIST, *words]).config, ())
    assert made.op_lists is not None
    assert not made.warnings
    return dict(made.op_lists.rules)


def test_a_file_may_spell_an_op_in_another_way_than_the_shipped_list() -> None:
    """`hmp` has div, divide and truediv; `conv2d` is one of six that `_convolution` stands for."""
    rules = planned("op_lists=hmp", f"op_lists.lower_file={file('f', '__truediv__')}")
    assert rules["div"] == "lower"
    words = ["op_lists=hmp", "op_lists.lower=[_convolution]"]
    rules = planned(*words, f"op_lists.fp32_file={file('g', 'conv2d')}")
    assert (rules["conv2d"], rules["conv1d"], rules["conv3d"]) == ("fp32", "lower", "lower")
