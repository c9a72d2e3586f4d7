"""The tabular recipe is an MLP on scikit-learn's digits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.recipes.tabular import Tabular
from mprun.records.run_record import read_summary
from mprun.train.data import DataRequest

pytest.importorskip("sklearn", reason="scikit-learn is not installed: mprun[tabular]")


def test_the_model_is_an_mlp() -> None:
    shapes = [tuple(p.shape) for p in Tabular(units=32, layers=2).model().parameters()]
    assert shapes == [(32, 64), (32,), (32, 32), (32,), (10, 32), (10,)]


def test_every_sample_is_in_one_part_and_each_class_in_the_test_set() -> None:
    splits = Tabular(32, 1).data(DataRequest(validation_fraction=0.1))
    parts = (splits.train, splits.validation, splits.test)
    assert [len(part) for part in parts] == [1293, 144, 360]
    counts = splits.test.targets.bincount()
    assert counts.min() >= 34, "a tenth of 360, less a rounding"
    assert counts.max() <= 37
    assert (splits.name, splits.source) == ("scikit-learn digits", "local")


def test_all_seeds_have_the_same_split() -> None:
    one, two = (Tabular(32, 1).data(DataRequest(seed=s)).train for s in (1, 2))
    assert torch.equal(one.inputs, two.inputs)


def test_features_are_scaled_to_one() -> None:
    train = Tabular(32, 1).data(DataRequest()).train
    scaled = Tabular(32, 1).prepare(train.inputs)
    assert (scaled.min(), scaled.max()) == (0, 1)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'mprun\[tabular\]'"):
        Tabular(8, 1).data(DataRequest())


@pytest.mark.representative("fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_sr"])
def test_it_trains_in_seconds(precision: str) -> None:
    assert main(["recipe=tabular", f"precision={precision}", "run.dir=run"]) == 0
    accuracy = float(read_summary(Path("run")).test.accuracy or 0)
    # scikit-learn's own MLP of this size has 0.97; 0.94 is ten samples of 360 below.
    assert accuracy > 0.94
