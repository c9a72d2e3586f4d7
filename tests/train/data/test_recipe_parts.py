"""What a recipe's `data` may give, and what becomes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from mprun.errors import UsageError
from mprun.train.data import DataRequest, Splits, TensorSet
from mprun.train.data.recipe_parts import as_splits

ASKED = DataRequest()


def samples(n: int, start: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.arange(start, start + n)
    return x, -x


def splits(parts: Any, request: DataRequest = ASKED) -> Splits:
    return as_splits(parts, "mine", request)


def sizes(of: Splits) -> tuple[int, int, int]:
    return len(of.train), len(of.validation), len(of.test)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    "parts",
    [
        {"train": samples(6), "validation": samples(3), "test": samples(2)},
        (samples(6), samples(3), samples(2)),
        ({"a": samples(6)}, {"a": samples(3)}, {"a": samples(2)}),
        (TensorSet(*samples(6)), TensorSet(*samples(3)), TensorSet(*samples(2))),
        (Pair(*samples(6)), Pair(*samples(3)), Pair(*samples(2))),
        {"test": samples(2)[0], "train": samples(6)[0], "validation": samples(3)[0]},
    ],
)
def test_forms_of_parts(parts: Any) -> None:
    found = splits(parts)
    assert sizes(found) == (6, 3, 2)
    assert (found.name, found.source, found.shuffle) == ("mine", "recipe", True)
    first = parts["train"] if isinstance(parts, dict) else parts[0]
    assert type(found.train.content) is type(getattr(first, "content", first))


def test_a_tenth_validates_where_nothing_else_does() -> None:
    found = splits({"train": samples(50)})
    assert sizes(found) == (45, 5, 0)
    x, y = found.train.content
    out, out_y = found.validation.content
    assert sorted([*x.tolist(), *out.tolist()]) == list(range(50))
    assert torch.equal(y, -x)
    assert torch.equal(out_y, -out)
    assert out.tolist() != list(range(45, 50)), "samples are often sorted by class"
    assert x.tolist() == sorted(x.tolist())


def test_the_held_out_samples_are_the_same_for_every_seed() -> None:
    torch.manual_seed(1)
    other = splits({"train": samples(50)}, DataRequest(seed=1)).validation
    assert torch.equal(other.content[0], splits((samples(50),)).validation.content[0])


@pytest.mark.parametrize(
    ("n", "share", "expected"),
    [(2, 0, (1, 1, 0)), (9, 0, (8, 1, 0)), (20, 0.5, (10, 10, 0)), (3, 0.1, (2, 1, 0))],
)
def test_how_many_are_held_out(n: int, share: float, expected: tuple[int, int, int]) -> None:
    request = DataRequest(validation_fraction=share)
    assert sizes(splits((samples(n),), request)) == expected


def test_one_sample_is_trained_and_not_validated() -> None:
    found = splits((samples(1),))
    assert sizes(found) == (1, 0, 0)
    assert found.notice is not None
    assert "one training sample" in found.notice
    silent = splits({"train": samples(1), "validation": None})
    assert (sizes(silent), silent.notice) == ((1, 0, 0), None)


def test_limits_hold() -> None:
    parts = {"train": samples(6), "validation": samples(3), "test": samples(2)}
    found = splits(parts, DataRequest(train_limit=4, eval_limit=1))
    assert sizes(found) == (4, 1, 1)
    assert sizes(splits((samples(50),), DataRequest(train_limit=7, eval_limit=2))) == (7, 2, 0)


def test_a_share_beside_own_validation_samples_is_reported() -> None:
    parts = {"train": samples(6), "validation": samples(3)}
    found = splits(parts, DataRequest(validation_fraction=0.5))
    assert sizes(found) == (6, 3, 0)
    assert found.notice is not None
    assert found.notice.startswith("data.validation_fraction has no effect")


X, Y = samples(4)


@pytest.mark.parametrize(
    ("parts", "fragments"),
    [
        ((X, Y), ["tensors directly", 'return {"train": (inputs, targets)}']),
        (((X, Y),) * 4, ["4 parts; legal is a tuple of train"]),
        (None, ["data() gives nothing", 'return {"train"']),
        ({"trian": (X, Y)}, ["'trian'", "did you mean 'train'?"]),
        ({"validation": (X, Y)}, ["no training samples"]),
        ({"train": (X, Y[:3])}, ["train contains tensors of 3, 4 samples", "equally many"]),
        ({"train": (X, torch.tensor(3))}, ["train contains a tensor without dimensions"]),
        ({"train": (X, ["a"] * 4)}, ["train contains a str"]),
        ({"train": (X, np.arange(4))}, ["contains a ndarray", "torch.as_tensor"]),
    ],
)
def test_other_forms_are_refused_with_the_one_that_works(parts: Any, fragments: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        splits(parts)
    message = str(caught.value)
    assert message.isprintable()
    assert all(fragment in message for fragment in fragments), message


def test_all_samples_held_out_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data.validation_fraction=0.9 leaves no training"):
        splits((samples(2),), DataRequest(validation_fraction=0.9))


def test_a_loader_is_not_divided() -> None:
    found = splits({"train": DataLoader(TensorDataset(*samples(46)), 4, drop_last=True)})
    assert found.train.samples == 44
    assert found.validation.is_empty
    assert "is not divided" in str(found.notice)
