"""What runs on a GPU runs here on the CPU: the clock of events, the late readback, the constants of
a step that are never read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mprun
from mprun.cli.main import main
from mprun.precision import devices
from mprun.records.run_record import read_lines, read_summary
from mprun.train.clock import EventClock
from mprun.train.sums import DeviceReadback

SMALL = [
    *("recipe=mnist", "recipe.model.units=16", "data.source=generated", "device=cpu"),
    *("data.train_limit=64", "data.eval_limit=16", "train.batch_size=16"),
]


class Event:
    """An event of a device that needs a millisecond between two."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.at = Event.made

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def as_on_a_gpu() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "event", lambda device: Event())
        for module in ("mprun.train.assemble.parts", "mprun.train.observe.observe"):
            patch.setattr(f"{module}.clock_for", EventClock)
        for module in ("mprun.train.assemble.parts", "mprun.train.evaluation"):
            patch.setattr(f"{module}.readback_for", DeviceReadback)
        patch.setattr("mprun.optim.base.is_on_host", lambda p: False)
        patch.setattr("mprun.optim.engines.fastest", lambda device, storage=None: "eager")
        yield patch


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "command",
    [
        ["numerics", "numerics.steps=2", "numerics.warmup=1"],
        ["trace", "precision=bf16_mixed"],
        ["memory", "precision=bf16_mixed"],
        ["search-ops", "precision=bf16_mixed", "search_ops.batches=1"],
        ["sweep", "precision=fp32,bf16_sr", "seeds=1", "train.max_steps=6", "compare.report=false"],
        ["double", "precision=bf16_mixed", "train.epochs=1", "compare.report=false"],
    ],
    ids=lambda words: words[0],
)
def test_commands_answer(command: list[str]) -> None:
    assert main([command[0], *SMALL, *command[1:]]) == 0


@pytest.mark.parametrize("mode", ["fp32", "fp16_mixed", "bf16_sr", "half_sr"])
def test_a_run_is_the_same(mode: str, as_on_a_gpu: pytest.MonkeyPatch) -> None:
    words = [*SMALL, f"precision={mode}", "train.max_steps=8", "execution=emulated"]
    # without kernels, as on this GPU, RMSprop in float32 is PyTorch's
    words.insert(0, "train.optimizer.name=sgd")
    words = words[:-1] if mode == "fp32" else words
    assert main([*words, "run.dir=late"]) == 0
    as_on_a_gpu.undo()
    assert main([*words, "run.dir=plain"]) == 0
    rows = [[x for x in read_lines(Path(run)) if "lr" in x] for run in ("late", "plain")]
    late, plain = ([(x["step"], x["loss"], x.get("loss_scale")) for x in run] for run in rows)
    assert late == plain
    summaries = [read_summary(Path(run)) for run in ("late", "plain")]
    assert summaries[0].history == summaries[1].history
    assert summaries[0].step_time_ms.median == 1.0


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_own_loop_is_observed(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(30):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
    assert read_summary(tmp_path / "run").step_time_ms.median == 1.0
