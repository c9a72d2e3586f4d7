"""Runs of `speed.compile=true`: recorded, resumed as they were, close to eager ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mprun.cli.main import main
from mprun.precision.kernels import why_not
from mprun.records.run_record import read_summary
from mprun.train import checkpoint

pytestmark = pytest.mark.usefixtures("native_is_fast")

needs_compiler = pytest.mark.skipif(why_not() is not None, reason="needs a compiler")
# Batches of 16 train, of 10 validate after each epoch of four steps.
WORDS = ["recipe=tabular", "recipe.model.layers=1", "device=cpu", "train.batch_size=16"]
WORDS += ["data.train_limit=64", "data.eval_limit=10", "train.eval_batch_size=10"]


def weights(folder: str) -> dict[str, torch.Tensor]:
    saved = checkpoint.load(Path(folder))
    assert saved is not None
    model: dict[str, torch.Tensor] = saved["trainer"]["model"]
    return model


@needs_compiler
def test_a_compiled_run_is_recorded_resumed_and_close_to_an_eager_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Equal bits although an evaluation, of another shape, was between what the two compiled.

    Compiled float32 adds in another order: 1e-5 after twelve steps of values below 1.
    """
    assert main([*WORDS, "speed.compile=true", "train.epochs=3", "run.dir=whole"]) == 0
    assert ", compiled" in capsys.readouterr().out
    backend = read_summary(Path("whole")).backend
    assert backend.compile
    assert backend.compile_s is not None
    assert backend.compile_s > 0
    assert main([*WORDS, "speed.compile=true", "train.epochs=2", "run.dir=part"]) == 0
    assert main(["run.resume=part", "train.epochs=3"]) == 0
    assert read_summary(Path("part")).backend.compile
    assert main([*WORDS, "train.epochs=3", "run.dir=eager"]) == 0
    assert not read_summary(Path("eager")).backend.compile
    for name, x in weights("whole").items():
        assert torch.equal(x, weights("part")[name]), name
        assert torch.allclose(x, weights("eager")[name], rtol=1e-5, atol=1e-5), name
