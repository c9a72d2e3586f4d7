"""The shipped metrics against torchmetrics and counts by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mprun.errors import RunFailedError
from mprun.metrics import SHIPPED, Accuracy, Perplexity, SummedMetric

CLASSES = 5


def batches(*shape: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Three batches of unequal size: scores [n, *shape, classes] and targets [n, *shape]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, *shape, CLASSES, generator=generator),
            torch.randint(CLASSES, (n, *shape), generator=generator),
        )
        for n in (7, 3, 1)
    ]


def computed(metric: SummedMetric, data: list[tuple[Any, Any]]) -> float:
    for output, batch in data:
        metric.update(output, batch)
    return metric.compute()


def of_torchmetrics(metric: Any, data: list[tuple[Tensor, Tensor]]) -> float:
    for scores, targets in data:
        metric.update(scores, targets)
    return float(metric.compute())


def test_accuracy_is_the_share_of_right_targets_not_the_mean_of_batches() -> None:
    data = batches()
    right = sum(int(scores.argmax(1).eq(targets).sum()) for scores, targets in data)
    assert 0 < right < 11
    assert computed(Accuracy(), data) == right / 11
    assert computed(Accuracy(), [(s, (s, t)) for s, t in data]) == right / 11


def test_accuracy_is_torchmetrics_for_logits_of_one_class_and_of_two() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, generator=generator)
    targets = torch.randint(2, (40,), generator=generator)
    data = [(logits.sigmoid(), targets)]  # of probabilities, which torchmetrics takes as they are
    oracle = of_torchmetrics(torchmetrics.Accuracy("binary"), data)
    two = torch.stack((-logits, logits), 1)
    for scores in (logits, logits[:, None], two, logits.gt(0).long()):
        assert computed(Accuracy(), [(scores, targets)]) == pytest.approx(oracle, rel=3e-7)


def test_perplexity_is_of_all_tokens_with_ignored_ones_left_out() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    data = batches(6)
    for _, targets in data:
        targets[:, -2:] = -100
    oracle = torchmetrics.text.Perplexity(ignore_index=-100)
    assert computed(Perplexity(), data) == pytest.approx(of_torchmetrics(oracle, data), rel=1e-6)
    losses = [
        functional.cross_entropy(s.reshape(-1, CLASSES), t.reshape(-1), reduction="sum")
        for s, t in data
    ]
    assert computed(Perplexity(), data) == pytest.approx(math.exp(sum(losses) / (11 * 4)), rel=1e-6)


def test_shifted_perplexity_is_that_of_a_causal_model() -> None:
    (scores, targets), *_ = batches(6)
    shifted = computed(Perplexity(shift=True), [({"logits": scores}, {"labels": targets})])
    by_hand = functional.cross_entropy(
        scores[:, :-1].reshape(-1, CLASSES), targets[:, 1:].reshape(-1)
    )
    assert shifted == pytest.approx(math.exp(by_hand), rel=1e-6)


def test_scores_of_pictures_have_their_classes_second() -> None:
    (scores, targets), *_ = batches(2, 3)
    second = scores.movedim(-1, 1)
    assert computed(Accuracy(), [({"out": second}, (None, targets))]) == computed(
        Accuracy(), [(scores, targets)]
    )


def test_where_classes_cannot_be_told_from_positions_the_dimension_is_asked_for() -> None:
    scores, targets = torch.randn(2, CLASSES, CLASSES), torch.zeros(2, CLASSES, dtype=torch.long)
    with pytest.raises(RunFailedError, match=r"both dimension 1 and the last.* give class_dim"):
        Accuracy().update(scores, targets)
    right = scores.argmax(1).eq(0).double().mean()
    assert computed(Accuracy(class_dim=1), [(scores, targets)]) == float(right)


class _Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_scores_and_targets_are_found_where_models_and_data_have_them() -> None:
    (scores, targets), *_ = batches()
    expected = computed(Accuracy(), [(scores, targets)])
    outputs = [{"loss": 1, "logits": scores}, _Output(scores), (scores, None)]
    for output in outputs:
        for batch in (
            {"labels": targets},
            {"y": targets},
            [None, targets],
            (1, {"label": targets}),
        ):
            assert computed(Accuracy(), [(output, batch)]) == expected


@pytest.mark.parametrize("name", SHIPPED)
def test_without_a_batch_there_is_no_value_and_a_reset_forgets(name: str) -> None:
    metric = SHIPPED[name]()
    assert math.isnan(metric.compute())
    metric.update(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
    assert not math.isnan(metric.compute())
    metric.reset()
    assert math.isnan(metric.compute())


@pytest.mark.parametrize(
    ("metric", "output", "batch", "text"),
    [
        (Accuracy(), {"boxes": 1}, torch.zeros(2), "finds no scores in an output .* 'boxes'"),
        (Accuracy(), torch.zeros(2), {"ids": 1}, "finds no targets in a batch .* with 'ids'"),
        (Accuracy(), torch.zeros(2, 3), torch.zeros(4), r"shape \[2, 3\] do not fit .* \[4\]"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_remedy(
    metric: SummedMetric, output: Any, batch: Any, text: str
) -> None:
    with pytest.raises(RunFailedError, match=text) as caught:
        metric.update(output, batch)
    assert "\n" not in str(caught.value)
    assert "(metric, select)" in str(caught.value)
