"""A run in several processes is the run of one process with the same global batch.

The oracle is one process that takes the same parts of each batch as micro-batches, one after the
other (`train.accumulate`): its sums have the same terms. With two processes each sum is x + y,
which is rounded once in any order. So nothing may differ, except where one process sums in another
order:

- FSDP2's clipping norm is the root of a sum of two sums.
- A process's part is smaller than the whole batch, so products of matrices add other terms up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mprun.cli.main import main
from mprun.records.mode_names import SHIPPED_MODES
from mprun.records.run_record import read_lines, read_summary
from tests.run.test_resume import assert_equal, trained
from tests.train.parallel.processes import Groups

PLAIN = ["speed=plain", "train.checkpoint_every_steps=1000"]
MNIST = [
    *("recipe=mnist", "recipe.model.units=32", "data.source=generated", "data.train_limit=160"),
    *("data.eval_limit=64", "train.max_steps=10", "train.batch_size=16", *PLAIN),
]
"""Two epochs of five steps of 32 samples."""
TEXT = [
    *("data.source=generated", "data.train_limit=96", "data.eval_limit=8"),
    *("recipe.model.layers=1", "recipe.model.width=32", "recipe.model.heads=2"),
    *("train.max_steps=4", "train.batch_size=4", *PLAIN),
]
RECIPES = {
    "mnist": MNIST,
    "char_gpt": ["recipe=char_gpt", *TEXT],
    "transformer": ["recipe=transformer", *TEXT],
}
MODES = ["fp32", "bf16_mixed", "fp16_mixed", "bf16_sr", "half_sr"]
KINDS = ["ddp", "fsdp2"]
OTHER_NORM = {
    "fp32": 1e-5,
    "bf16_mixed": 1e-3,
    "fp16_mixed": 1e-3,
    "bf16_sr": 1e-2,
    "half_sr": 1e-2,
}
"""Relative difference of losses where the clipping norm differs in its last bit: a few units of
the dtype that the weights are stored or computed in, after four steps."""


WHOLE_BATCH = 1e-4
"""Relative difference of losses and of weights in float32 where products of matrices add up other
terms: it keeps 7 digits, and AdamW's first steps have the size of lr whatever the gradient is, so a
difference in its last digits is magnified. 16-bit modes magnify it beyond any useful limit; they
are compared with one process that accumulates the same micro-batches, bit for bit."""


def losses(folder: str) -> list[float]:
    return [x["loss"] for x in read_lines(Path(folder)) if x["kind"] == "step"]


def model(folder: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = trained(Path(folder))["model"]
    return found


def plain(value: Any) -> Any:
    """Mappings as dict: FSDP2's whole model is one, and a module's own is an OrderedDict."""
    return dict(value) if isinstance(value, dict) else value


def assert_same_training(a: str, b: str) -> None:
    """The same losses, weights, moments, order of samples and scores, bit for bit."""
    assert losses(a) == losses(b)
    one, other = trained(Path(a)), trained(Path(b))
    names = "model", "optimizer", "scheduler", "loss_scale", "step", "epoch", "order", "next_order"
    for name in names:
        assert_equal(plain(one[name]), plain(other[name]), name)
    ours, theirs = read_summary(Path(a)), read_summary(Path(b))
    for name in ("steps", "skipped_steps", "epochs", "loss_scale"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for mine, other_epoch in zip(ours.history, theirs.history, strict=True):
        assert mine.train == other_epoch.train
        expected = other_epoch.validation.loss
        if expected is not None:
            # one process evaluates larger batches: its float32 means add up in another order
            expected = pytest.approx(expected, rel=1e-4)
        assert mine.validation.loss == expected


@pytest.mark.representative(
    "mnist-half_sr-fsdp2", "mnist-fp16_mixed-ddp", "char_gpt-bf16_mixed-ddp"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_train_as_one_with_two_micro_batches(
    groups: Groups, recipe: str, mode: str, kind: str
) -> None:
    words = [*RECIPES[recipe], f"precision={mode}"]
    if mode == "fp16_mixed":  # a scale that grows often overflows within a few steps
        words += ["loss_scale.growth_interval=3"]
    assert main([*words, "train.accumulate=2", "run.dir=one"]) == 0
    counted = {"FOOTPRINT": "real"}  # draws random numbers, and puts them back
    ended = groups.run([*words, f"parallel={kind}", "run.dir=many"], environment=counted)
    assert ended.statuses == [0, 0], ended.errors
    if recipe == "mnist" or kind == "ddp":
        assert_same_training("many", "one")
        return
    torch.testing.assert_close(losses("many"), losses("one"), rtol=OTHER_NORM[mode], atol=0)


EXECUTIONS = {
    **{mode: ["native", "emulated"] for mode in (*MODES, "bf16_true", "fp16_true")},
    **{mode: ["native"] for mode in ("fp64", "fp32")},
    **{mode: ["emulated"] for mode in ("tf32", "half_sr_full", "mxfp8", "nvfp4")},
    **{f"fp8_{kind}": ["emulated"] for kind in ("tensorwise", "rowwise", "rowwise_hp")},
}
BITS_OF_THE_PLACE = {"half_sr_full": 1e-2, "nvfp4": 5e-2}
"""Modes whose results are rounded stochastically, with random bits by the place in the step: the
second process has other bits than a second micro-batch. The relative difference of losses that the
noise of their formats makes in some steps."""


@pytest.mark.representative("bf16_mixed-emulated-fsdp2", "fp8_tensorwise-emulated-fsdp2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mode", "execution"), [(mode, x) for mode, every in EXECUTIONS.items() for x in every]
)
def test_every_mode_is_that_of_one_process(
    groups: Groups, mode: str, execution: str, kind: str
) -> None:
    """Emulation sees the ops that gather and cut: they move numbers, and round none."""
    assert {*EXECUTIONS} == {*SHIPPED_MODES}
    words = [*MNIST, f"precision={mode}", f"execution={execution}", "train.max_steps=5"]
    assert main([*words, "train.accumulate=2", "run.dir=one"]) == 0
    ended = groups.run([*words, f"parallel={kind}", "run.dir=many"])
    assert ended.statuses == [0, 0], ended.errors
    limit = BITS_OF_THE_PLACE.get(mode, 0.0)
    torch.testing.assert_close(losses("many"), losses("one"), rtol=limit, atol=0)


@pytest.mark.representative("mnist-fsdp2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_train_as_one_with_the_whole_batch(
    groups: Groups, recipe: str, kind: str
) -> None:
    words = RECIPES[recipe]
    size = next(int(x.partition("=")[2]) for x in words if x.startswith("train.batch_size"))
    assert main([*words, f"train.batch_size={2 * size}", "run.dir=one"]) == 0
    ended = groups.run([*words, f"parallel={kind}", "run.dir=many"])
    assert ended.statuses == [0, 0], ended.errors
    torch.testing.assert_close(losses("many"), losses("one"), rtol=WHOLE_BATCH, atol=0)
    steps = read_summary(Path("one")).steps
    lr = max(x["lr"] for x in read_lines(Path("one")) if x["kind"] == "step")
    for name, weights in model("one").items():
        # AdamW moves a weight by about lr at most; the sign of a tiny gradient may differ
        assert (weights - model("many")[name]).abs().max() <= 2 * lr * steps
        moved = (weights - model("many")[name]).norm() / weights.norm()
        assert moved <= WHOLE_BATCH, name


@pytest.mark.representative("half_sr-2")
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("mode", ["bf16_sr", "half_sr", "fp16_mixed"])
def test_replicas_stay_equal_bit_for_bit(groups: Groups, mode: str, processes: int) -> None:
    words = [*MNIST, "train.max_steps=40", f"precision={mode}", "parallel=ddp"]
    ended = groups.run(words, processes, {"DIGESTS": str(Path.cwd())})
    assert ended.statuses == [0] * processes, ended.errors
    digests = [Path(f"digest-{rank}").read_text(encoding="utf-8") for rank in range(processes)]
    assert len(set(digests)) == 1
    assert len(digests[0]) == 64


@pytest.mark.parametrize("kind", KINDS)
def test_validations_and_averaged_weights_are_those_of_one_process(
    groups: Groups, kind: str
) -> None:
    words = [*MNIST, "train.max_steps=9", "train.checkpoint_every_steps=4", "precision=half_sr"]
    more = [*words, "data.validation_fraction=0.2", "train.validations=4"]
    more.append("train.average_weights=3")
    assert main([*more, "train.accumulate=2", "run.dir=one"]) == 0
    ended = groups.run([*more, f"parallel={kind}", "run.dir=many"])
    assert ended.statuses == [0, 0], ended.errors
    assert_same_training("many", "one")
    assert_equal(trained(Path("many"))["average"], trained(Path("one"))["average"])
    ours, theirs = read_summary(Path("many")), read_summary(Path("one"))
    assert ours.validations == theirs.validations
    assert ours.averaged is not None
    assert theirs.averaged is not None
    assert (ours.averaged.places, theirs.averaged.places) == (3, 3)
    for mine, other in (
        (ours.averaged.validation, theirs.averaged.validation),
        (ours.averaged.test, theirs.averaged.test),
    ):
        assert mine.loss == pytest.approx(other.loss, rel=1e-4)
        assert mine.accuracy == other.accuracy
    before = ours.averaged
    ended = groups.run(["run.resume=many"])  # all steps are taken: the mean is the saved one
    assert ended.statuses == [0, 0], ended.errors
    assert read_summary(Path("many")).averaged == before
