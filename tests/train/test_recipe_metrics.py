"""Metrics of a recipe in a run: torchmetrics as the oracle, skipped steps, resumed epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from mprun.errors import RunFailedError, UsageError
from mprun.metrics import Accuracy
from mprun.precision import LossScale
from mprun.precision.nested import all_tensors
from mprun.records.run_record import Scores
from mprun.train import recipe_metrics
from mprun.train.data import Batch, MicroBatch
from mprun.train.loop import Limits, Trainer
from mprun.train.recipe_metrics import MetricPass, check_metric, metrics_of, placed
from tests.train.trainers import CPU, Base, SavingLog, samples, trainer_of

torchmetrics = pytest.importorskip("torchmetrics")


def pair(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return output, batch[1]


class Largest:
    """A user's own: the largest output, in a plain number, with the shapes it got."""

    def __init__(self) -> None:
        self.largest = -math.inf
        self.sizes: list[int] = []
        self.settings = {"of": "outputs", "twice": (1, 2.0)}

    def update(self, output: Tensor, batch: Any) -> None:
        self.largest = max(self.largest, output.max().item())
        self.sizes.append(len(batch[1]))

    def compute(self) -> float:
        return self.largest * sum(self.sizes)


class Judged(Base):
    """Judged by the shipped accuracy, with others beside it."""

    METRIC = ("right", "max")

    def metrics(self) -> dict[str, Any]:
        return {
            "right": "accuracy",
            "top": (torchmetrics.F1Score("multiclass", num_classes=3, average="macro"), pair),
            "auroc": (torchmetrics.AUROC("multiclass", num_classes=3), pair),  # keeps a list
            "largest": Largest(),
        }


def values(scores: Scores) -> dict[str, float]:
    assert scores.metrics is not None
    return {name: float(value) for name, value in scores.metrics.items() if value is not None}


def outputs_of(training: Trainer, log: SavingLog) -> list[tuple[int, Tensor, Tensor, bool]]:
    """What the model gives in each step of a training, beside its targets."""
    seen: list[tuple[int, Tensor, Tensor, bool]] = []
    step = training.optimizer_step

    def observed(batch: Any) -> Any:
        result = step(batch)
        for output, part in zip(result.outputs, batch.parts, strict=True):
            skipped = result.skipped is not None and bool(result.skipped)
            seen.append((training.epoch, output.clone(), part.content[1], skipped))
        return result

    training.optimizer_step = observed  # type: ignore[method-assign]
    return seen


def expected(rows: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The metrics over all outputs at once."""
    outputs, targets = (torch.cat(x) for x in zip(*rows, strict=True))
    f1 = torchmetrics.functional.f1_score(
        outputs, targets, "multiclass", num_classes=3, average="macro"
    )
    auroc = torchmetrics.functional.auroc(outputs, targets, "multiclass", num_classes=3)
    largest = outputs.max().item() * len(outputs)
    right = float(outputs.argmax(1).eq(targets).double().mean())
    return {"right": right, "top": float(f1), "auroc": float(auroc), "largest": largest}


@pytest.mark.parametrize("micro", [None, 3], ids=["whole", "micro"])
def test_each_epoch_and_each_set_has_the_metrics_of_its_samples_alone(micro: int | None) -> None:
    held_out = samples(7, 5)
    training, log = trainer_of(Judged(), samples(20), micro=micro, validation=held_out)
    seen = outputs_of(training, log)
    training.fit()
    assert [epoch.epoch for epoch in log.epochs] == [1, 2]
    for epoch in log.epochs:
        own = expected((o, t) for number, o, t, _ in seen if number == epoch.epoch)
        assert values(epoch.train) == pytest.approx(own, rel=1e-6)
    with torch.no_grad():
        x, y = held_out.content
        last = expected([(training.parts.model(x), y)])
    assert values(log.epochs[-1].validation) == pytest.approx(last, rel=1e-6)
    assert log.epochs[0].train.value("auroc") != log.epochs[1].train.value("auroc")


class SkipsSecond(LossScale):
    """A loss scale that skips every second step."""

    steps = 0

    def step(self, optimizer: Any, clip: Any) -> Tensor:
        self.steps += 1
        if self.steps % 2:
            super().step(optimizer, clip)
        return torch.tensor(float(self.steps % 2 == 0))


def test_skipped_steps_do_not_count() -> None:
    training, log = trainer_of(Judged(), samples(20), batch=4, loss_scale=SkipsSecond())
    seen = outputs_of(training, log)
    training.fit()
    assert {skipped for *_, skipped in seen} == {True, False}
    for epoch in log.epochs:
        rows = [(o, t) for number, o, t, skip in seen if number == epoch.epoch and not skip]
        assert values(epoch.train) == pytest.approx(expected(rows), rel=1e-6)


class Flagged:
    """In place of a step on CUDA: its flag is known when it is asked for."""

    asked: ClassVar[list[int]] = []

    def __init__(self, outputs: Any, contents: Any, skipped: Tensor) -> None:
        self.outputs, self.contents, self.skipped = outputs, contents, int(skipped)

    def was_skipped(self) -> bool:
        self.asked.append(self.skipped)
        return bool(self.skipped)


@pytest.mark.parametrize("end", ["compute", "state_dict"])
def test_on_cuda_the_flag_of_a_step_is_read_after_the_next_one(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_metrics, "_HeldStep", Flagged)
    monkeypatch.setattr(Flagged, "asked", [])
    whole = MetricPass(metrics_of(with_metrics({"x": Largest()})), CPU)
    whole._device = torch.device("cuda")
    flags = [0, 1, 0, 1, 1, 0]
    for number, flag in enumerate(flags):
        x, y = torch.full((2, 3), float(flag)), torch.zeros(2)
        batch = Batch((MicroBatch((x, y), x, 2, 2.0),))
        whole.add([x], batch, torch.tensor(float(flag)))
        assert len(Flagged.asked) == number  # but not its own
    getattr(whole, end)()
    assert Flagged.asked == flags
    whole._device = CPU
    assert whole.compute() == {"x": 0.0}  # an output of a skipped step is 1
    assert whole._updates == flags.count(0)


# ---- resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_resumed_epoch_has_the_metrics_of_the_whole_epoch(step: int) -> None:
    options: dict[str, Any] = {"batch": 8, "validation": samples(7, 5), "shuffle": True}
    whole, log = trainer_of(Judged(), samples(20), checkpoint_every_steps=1, **options)
    whole.fit()
    (state,) = [x for x in log.states if x["step"] == step]
    again, resumed = trainer_of(Judged(), samples(20), **options)
    again.load_state_dict(state)
    again.fit()
    after = log.epochs[-len(resumed.epochs) :]
    assert resumed.epochs
    assert [values(x.train) for x in resumed.epochs] == [values(x.train) for x in after]
    assert not resumed.events


class ResetsItself(Largest):
    """A metric that begins again when it was computed, as some do."""

    def compute(self) -> float:
        value = super().compute()
        self.__init__()  # type: ignore[misc]
        return value


def test_a_checkpoint_does_not_compute_the_metric_of_the_epoch() -> None:
    metrics = {"x": ResetsItself()}
    plain, log = trainer_of(with_metrics(metrics), samples(20), batch=8)
    plain.fit()
    saving, saved = trainer_of(
        with_metrics(metrics), samples(20), batch=8, checkpoint_every_steps=1
    )
    saving.fit()
    assert values(saved.epochs[0].train) == values(log.epochs[0].train)


class Generator:
    """A metric whose state no checkpoint can hold."""

    def __init__(self) -> None:
        self.seen = iter(range(1000))
        self.count = 0

    def update(self, output: Tensor, batch: Any) -> None:
        self.count = next(self.seen)

    def compute(self) -> float:
        return self.count

    def __deepcopy__(self, memo: Any) -> Generator:
        return Generator()


class Hidden(nn.Module):
    """A module with plain attributes: `state_dict` is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def update(self, output: Tensor, batch: Any) -> None:
        self.count += 1

    def compute(self) -> int:
        return self.count


class Forgetful(Largest):
    """A metric whose state_dict leaves the sizes out."""

    def state_dict(self) -> dict[str, Any]:
        return {"largest": self.largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.largest = state["largest"]


class Unsavable(Base):
    METRIC = ("right", "max")

    def metrics(self) -> dict[str, Any]:
        metrics = {"forgetful": Forgetful(), "iter": Generator(), "module": Hidden()}
        return {"right": "accuracy", **metrics}


def test_a_metric_without_a_state_has_no_value_for_the_resumed_epoch() -> None:
    options: dict[str, Any] = {"batch": 8, "limits": Limits(2, None, None)}
    whole, log = trainer_of(Unsavable(), samples(20), checkpoint_every_steps=1, **options)
    whole.fit()
    (state,) = [x for x in log.states if x["step"] == 2]
    again, resumed = trainer_of(Unsavable(), samples(20), **options)
    again.load_state_dict(state)
    again.fit()
    first, second = resumed.epochs
    assert set(values(first.train)) == {"right"}
    assert first.train.metrics is not None
    assert set(first.train.metrics) == {"right", "forgetful", "iter", "module"}
    assert values(second.train) == values(log.epochs[1].train)
    assert [row["metric"] for row, _ in resumed.events] == ["forgetful", "iter", "module"]
    row, text = resumed.events[1]
    assert row["event"] == "metric_lost"
    assert (row["epoch"], row["step"]) == (1, 3)
    assert "the training iter of epoch 1 is not known" in (text or "")


# ---- what a recipe may give ----------------------------------------------------------------------


def test_metrics_are_copied_so_one_object_serves_every_epoch_and_set() -> None:
    shared = Accuracy()

    class Recipe(Base):
        METRIC = ("right", "max")

        def metrics(self) -> dict[str, Any]:
            return {"right": shared}

    training, log = trainer_of(Recipe(), samples(20), validation=samples(7, 5))
    seen = outputs_of(training, log)
    training.fit()
    for epoch in log.epochs:
        own = [(o, t) for number, o, t, _ in seen if number == epoch.epoch]
        right = sum(int(o.argmax(1).eq(t).sum()) for o, t in own)
        assert epoch.train.value("right") == right / 20
    assert math.isnan(shared.compute())


def test_select_may_give_named_arguments_or_one() -> None:
    class Recipe(Base):
        def metrics(self) -> dict[str, Any]:
            named = torchmetrics.Accuracy("multiclass", num_classes=3, average="micro")
            return {
                "named": (named, lambda out, batch: {"preds": out, "target": batch[1]}),
                "one": (torchmetrics.MeanMetric(), lambda out, batch: out.mean()),
            }

    training, log = trainer_of(Recipe(), samples(8), limits=Limits(1, None, None))
    seen = outputs_of(training, log)
    training.fit()
    ((_, output, targets, _),) = seen
    own = values(log.epochs[0].train)
    assert own["named"] == pytest.approx(output.argmax(1).eq(targets).float().mean().item())
    assert own["one"] == pytest.approx(output.mean().item())


def test_metrics_that_draw_random_numbers_do_not_change_the_run() -> None:
    class Draws(Base):
        def metrics(self) -> dict[str, Any]:
            torch.rand(5)
            return {"right": Accuracy()}

    torch.manual_seed(3)
    before = torch.get_rng_state()
    metrics_of(Draws())
    assert torch.equal(torch.get_rng_state(), before)


def with_metrics(given: Any, metric: Any = ("loss", "min")) -> Base:
    class Recipe(Base):
        METRIC = metric

        def metrics(self) -> Any:
            return given

    return Recipe()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([Accuracy()], r"metrics\(\) returned a list; legal is a dict"),
        ({"x": "acuracy"}, r"is 'acuracy' \(str\); did you mean 'accuracy'\?; legal: an object"),
        ({"x": Accuracy}, r"metrics\(\)\['x'\] is the class Accuracy, not an object of it"),
        ({"x": (Accuracy(), 3)}, r"metrics\(\)\['x'\] is a tuple; legal"),
        ({"loss": Accuracy()}, "names a metric 'loss', which the record uses"),
    ],
)
def test_what_is_no_metric_is_one_line(given: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        check_metric(with_metrics(given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (
            ("f1_scor", "max"),
            r"nothing measures 'f1_scor'; did you mean 'f1_score'\?; legal: loss, ",
        ),
        (("accuracy", "max"), r"nothing measures 'accuracy'.*needs a function correct"),
        (("f1", "up"), 'the second is "max" or "min"'),
        (("f1",), "legal is a pair"),
    ],
)
def test_a_wrong_judge_is_one_line(metric: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        check_metric(with_metrics({"f1_score": Accuracy()}, metric))
    assert "\n" not in str(caught.value)


class Returns:
    def __init__(self, value: Any) -> None:
        self.value = value

    def update(self, output: Any, batch: Any) -> None:
        pass

    def compute(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "number"),
    [(torch.tensor([0.5]), 0.5), (3, 3.0), (1e200, math.inf), (-1e200, -math.inf), (None, None)],
)
def test_a_value_is_a_number_that_records_can_hold(value: Any, number: float | None) -> None:
    whole = MetricPass(metrics_of(with_metrics({"x": Returns(value)})), CPU)
    assert whole.compute() == {"x": None}
    training, log = trainer_of(with_metrics({"x": Returns(value)}), samples(4))
    training.fit()
    assert log.epochs[0].train.value("x") == number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.zeros(3), r"a tensor of shape \[3\] \(float32\)"),
        ({"a": torch.zeros(())}, "a dict with 'a'"),
        ("high", r"'high' \(str\)"),
    ],
)
def test_a_value_that_is_no_number_is_one_line(value: Any, shown: str) -> None:
    training, _ = trainer_of(with_metrics({"x": Returns(value)}), samples(4))
    with pytest.raises(RunFailedError, match=f"metric 'x': compute returned {shown}; legal is one"):
        training.fit()


def test_a_resumed_metric_s_tensors_are_on_the_device_they_were_on() -> None:
    state = {"total": torch.ones(2), "parts": [torch.ones(1), torch.zeros(1)], "batches": 3}
    put = placed(state, ["cpu", "cuda", "cpu"], torch.device("meta"))
    assert [x.device.type for x in all_tensors(put)] == ["cpu", "meta", "cpu"]
    assert put["batches"] == 3
    assert placed(state, (), torch.device("meta")) is state


class Collected(Base):
    """Metrics of torchmetrics without a function that selects, and two collections of them."""

    METRIC = ("MulticlassF1Score", "max")

    def metrics(self) -> dict[str, Any]:
        classes: dict[str, Any] = {"task": "multiclass", "num_classes": 3}
        collection = torchmetrics.MetricCollection(
            [
                torchmetrics.F1Score(**classes, average="macro"),
                torchmetrics.Accuracy(**classes, average="micro"),
            ]
        )
        return {
            "auroc": torchmetrics.AUROC(**classes),
            "here": collection,
            "there": (collection.clone(prefix="same_"), pair),
        }


class OnlyACollection(Collected):
    METRIC = ("same_MulticlassAccuracy", "max")

    def metrics(self) -> Any:
        return super().metrics()["there"][0]


def test_metrics_of_torchmetrics_are_taken_as_they_are() -> None:
    training, log = trainer_of(Collected(), samples(20))
    seen = outputs_of(training, log)
    training.fit()
    for epoch in log.epochs:
        rows = [(o, t) for number, o, t, _ in seen if number == epoch.epoch]
        own, found = expected(rows), values(epoch.train)
        right = sum(int((o.argmax(1) == t).sum()) for o, t in rows)
        accuracy = right / sum(len(t) for _, t in rows)
        assert found == pytest.approx(
            {
                "auroc": own["auroc"],
                "MulticlassF1Score": own["top"],
                "MulticlassAccuracy": accuracy,
                "same_MulticlassF1Score": own["top"],
                "same_MulticlassAccuracy": accuracy,
            },
            rel=1e-6,
        )


def test_a_recipe_may_return_a_collection_alone() -> None:
    found = metrics_of(OnlyACollection())
    assert set(found) == {"same_MulticlassF1Score", "same_MulticlassAccuracy"}
    check_metric(OnlyACollection())


def test_a_metric_of_torchmetrics_needs_targets_that_can_be_found() -> None:
    metric = metrics_of(Collected())["auroc"]
    with pytest.raises(RunFailedError, match="give the pair \\(metric, select\\)"):
        metric.update(torch.randn(4, 3), {"picture": torch.zeros(4)})
