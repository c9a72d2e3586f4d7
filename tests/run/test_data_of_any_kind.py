"""Data sets, loaders, streams and Hugging Face data in recipe files, through real runs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mprun.cli.main import main
from mprun.records.run_record import read_lines, read_summary
from tests.run.processes import Forking
from tests.run.test_resume import trained
from tests.waiting import wait_for

HEAD = """
import random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

def model(): return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
def loss(output, batch): return F.mse_loss(output, batch[1])
METRIC = ("loss", "min")

def samples(n=22):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(5))
    return x, x.sum(1, keepdim=True)

class Augmented(Dataset):
    def __init__(self, n=22): self.x, self.y = samples(n)
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        noise = torch.randn(3) + np.random.normal() + random.gauss(0, 1)
        with open("seen.txt", "a") as file: file.write(f"{i} {float(noise.sum()):.9f}\\n")
        return self.x[i] + 0.1 * noise.float(), self.y[i]

class Stream(IterableDataset):
    def __init__(self, n=22): self.n = n
    def __iter__(self): return iter(list(zip(*samples(self.n))))
"""
LOADER = "DataLoader(TensorDataset(*samples()), batch_size=4, shuffle=True)"
WORKERS = "DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2)"
PLAIN = ["device=cpu", "speed=plain", "train.lr=0.1", "train.optimizer.name=sgd"]


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs do not measure the memory of a step, which takes as long; `mprun memory` does so."""
    monkeypatch.setattr("mprun.train.run.footprint", lambda *_: ({}, None))


def recipe(train: str, rest: str = '"validation": None', more: str = "") -> str:
    """The override of a recipe file whose training data are an expression.

    Each text has a file of its own, because a process reads a file once.
    """
    text = f'{HEAD}\n{more}\ndef data(): return {{"train": {train}, {rest}}}\n'
    path = Path.cwd() / f"my_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    path.write_text(text, encoding="utf-8")
    return f"recipe={path}"


def run(*words: str, name: str = "run") -> Path:
    folder = Path.cwd() / name
    assert main([*words, *PLAIN, f"run.dir={folder}"]) == 0
    return folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder) if line["kind"] == "step"]


# ---- the same as a raw loop ----------------------------------------------------------------------


def raw_loop(seed: int, epochs: int, batch: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(22, 3, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), batch, shuffle=True, generator=generator
    )
    seen = []
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen, model.state_dict()


@pytest.mark.parametrize(
    ("train", "more"),
    [
        (LOADER, []),
        (LOADER.replace("4,", "4, num_workers=2,"), []),
        ("TensorDataset(*samples())", ["train.batch_size=4"]),
        ("TensorDataset(*samples())", ["train.batch_size=4", "data.workers=2"]),
    ],
    ids=["loader", "loader with workers", "data set", "data set with workers"],
)
def test_two_epochs_are_those_of_a_raw_loop_bit_for_bit(train: str, more: list[str]) -> None:
    folder = run(recipe(train), "seed=3", "train.epochs=2", *more)
    expected, weights = raw_loop(3, 2, 4)
    assert losses(folder) == expected
    found = trained(folder)["model"]
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_doubled_batch_accumulates_two_of_the_loader() -> None:
    folder = run(recipe(LOADER), "batch=double", "train.epochs=1")
    batch = read_summary(folder).batch
    assert (batch.micro, batch.accumulate, batch.effective, batch.base) == (4, 2, 8, 4)
    assert len(losses(folder)) == 3  # 22 samples: 8, 8 and 4 + 2


def test_fields_that_the_loader_decides_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    run(recipe(LOADER), "train.batch_size=7", "data.workers=1", "train.epochs=1")
    shown = " ".join(capsys.readouterr().err.split())
    assert "train.batch_size has no effect: the recipe's DataLoader has its own" in shown
    assert "data.workers has no effect" in shown


# ---- the same samples in every mode --------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_every_mode_sees_the_same_augmented_samples(workers: int) -> None:
    seen = {}
    name = recipe(WORKERS.replace("num_workers=2", f"num_workers={workers}"))
    for mode in ("fp32", "bf16_sr"):
        Path("seen.txt").write_text("", encoding="utf-8")
        run(name, f"precision={mode}", "train.epochs=2", name=mode)
        seen[mode] = sorted(Path("seen.txt").read_text(encoding="utf-8").split("\n"))
    assert len(seen["fp32"]) >= 44
    assert seen["fp32"] == seen["bf16_sr"]
    numbers = {line.split()[1] for line in seen["fp32"] if line}
    assert len(numbers) >= 44  # each epoch draws others


# ---- killed and resumed --------------------------------------------------------------------------


@pytest.mark.representative(
    "*num_workers=2)-8", "*shuffle=True)-6", "Augmented()-3", "*Stream*-3", "*Stream*-8"
)
@pytest.mark.parametrize("steps", [3, 6, 8])
@pytest.mark.parametrize("train", [WORKERS, LOADER, "Augmented()", "DataLoader(Stream(), 12)"])
def test_a_run_in_two_parts_is_the_run_in_one(train: str, steps: int) -> None:
    """An epoch of the loaders has six steps, that of the others two."""
    words = [recipe(train, '"validation": TensorDataset(*samples(6))'), "train.batch_size=12"]
    run(*words, "train.max_steps=10", name="whole")
    parted = run(*words, f"train.max_steps={steps}", name="parted")
    assert main([f"run.resume={parted}", "train.max_steps=10"]) == 0
    assert losses(parted) == losses(Path("whole"))
    a, b = trained(parted), trained(Path("whole"))
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    assert torch.equal(a["next_order"], b["next_order"])


# ---- kinds of data -------------------------------------------------------------------------------


def test_a_stream_ends_its_epochs_itself() -> None:
    folder = run(
        recipe(
            "DataLoader(Stream(), 4)",
            '"validation": DataLoader(Stream(5), 4), "test": DataLoader(Stream(7), 4)',
        ),
        "train.epochs=3",
    )
    summary = read_summary(folder)
    assert (summary.steps, summary.epochs, summary.data.train_samples) == (18, 3, None)
    assert len(summary.history) == 3
    assert all(epoch.validation.loss is not None for epoch in summary.history)
    assert summary.test.loss is not None


def test_a_schedule_over_an_unknown_number_of_steps_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = recipe("DataLoader(Stream(), 4)")
    assert main([name, "train.epochs=1", "train.scheduler=cosine", *PLAIN]) == 2
    assert "set train.max_steps" in " ".join(capsys.readouterr().err.split())
    run(name, "train.max_steps=2", "train.scheduler=cosine")


def test_hugging_face_rows_are_dictionaries_of_tensors() -> None:
    pytest.importorskip("datasets")
    more = """
from datasets import Dataset as Rows
def loss(output, batch):
    assert isinstance(batch, dict) and batch["text"][0].startswith("row")
    return F.mse_loss(output, batch["y"])
def forward(model, batch): return model(batch["x"])
def rows(n):
    x, y = samples(n)
    text = [f"row {i}" for i in range(n)]
    return Rows.from_dict({"x": x.tolist(), "y": y.tolist(), "text": text})
"""
    folder = run(recipe("rows(22)", more=more), "train.epochs=2", "train.batch_size=4", "seed=3")
    expected, _ = raw_loop(3, 2, 4)
    assert losses(folder) == expected


def test_batches_of_a_detector_are_lists(capsys: pytest.CaptureFixture[str]) -> None:
    more = """
class Images(Dataset):
    def __len__(self): return 10
    def __getitem__(self, i):
        boxes = torch.ones(1 + i % 2, 4)
        return torch.full((3, 4 + i % 3), float(i)), {"boxes": boxes, "id": str(i)}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
    def forward(self, images): return torch.stack([(x * self.scale).mean() for x in images])
def model(): return Net()
def forward(model, batch): return model(batch[0])
def loss(output, batch):
    return F.mse_loss(output, torch.stack([t["boxes"].mean() for t in batch[1]]))
def together(rows): return [list(x) for x in zip(*rows)]
"""
    train = "DataLoader(Images(), 4, shuffle=True, collate_fn=together)"
    for mode in ("bf16_mixed", "bf16_sr"):
        folder = run(
            recipe(train, more=more),
            *("train.epochs=1", "train.lr=0.001", f"precision={mode}"),
            name=mode,
        )
        epoch = read_summary(folder).history[-1]
        assert epoch.train.loss is not None
        assert read_summary(folder).data.train_samples == 10
    assert main(["memory", recipe(train, more=more), "device=cpu"]) == 0
    capsys.readouterr()


# ---- mistakes ------------------------------------------------------------------------------------

NO_LENGTH = "class NoLength(Dataset):\n    def __getitem__(self, i): return torch.ones(3)\n"
ONCE = """class Once(IterableDataset):
    def __iter__(self): return self
    def __next__(self): raise StopIteration
"""


@pytest.mark.parametrize(
    ("train", "more", "status", "text"),
    [
        ("TensorDataset(torch.empty(0, 3))", "", 2, "has no training sample"),
        ("DataLoader(Stream(0), 4)", "", 1, "the data gave no batch"),
        ("NoLength()", NO_LENGTH, 2, "train is a NoLength without __len__; legal is a Dataset"),
        ("Stream()", "", 2, "train is a Stream, a stream; legal is a loader of it"),
        ("DataLoader(Once(), 4)", ONCE, 1, "or an iterator that gives its samples once"),
    ],
)
def test_mistakes_are_one_line(
    train: str, more: str, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe(train, more=more), "train.max_steps=3", *PLAIN]) == status
    error = capsys.readouterr().err
    assert text in " ".join(error.split())
    assert "Traceback" not in error


def test_ctrl_c_ends_a_run_with_workers(forking: Forking) -> None:
    words = [recipe(WORKERS), *PLAIN, "train.epochs=1000", "run.dir=stopped"]
    pid = forking.start(words, Path.cwd(), {"SLOW_DISK": "yes"})
    wait_for(lambda: len(_children(pid)) == 2 and Path("seen.txt").exists())
    workers = _children(pid)
    for one in (pid, *workers):  # as a terminal does
        os.kill(one, signal.SIGINT)
    assert forking.wait() == 130, Path("log.txt").read_text(encoding="utf-8")
    assert read_summary(Path("stopped")).status == "interrupted"
    wait_for(lambda: not any(Path(f"/proc/{one}").exists() for one in workers))


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    except OSError:
        return []
    return [int(one) for one in text.split()]


# ---- the other commands --------------------------------------------------------------------------


@pytest.mark.representative("trace-stream", "memory-stream", "numerics-loader", "search-ops-loader")
@pytest.mark.parametrize("train", [LOADER, "DataLoader(Stream(), 4)"], ids=["loader", "stream"])
@pytest.mark.parametrize(
    "words",
    [
        ["trace"],
        ["memory"],
        [
            *("numerics", "precision=fp16_mixed", "numerics.steps=2", "numerics.warmup=1"),
            "numerics.span=3",
        ],
        [
            *("search-ops", "precision=fp16_mixed"),
            *("search_ops.batches=1", "search_ops.warmup_steps=1"),
        ],
    ],
    ids=lambda words: words[0],
)
def test_every_command_takes_them(
    words: list[str], train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *more = words
    name = recipe(train, '"validation": TensorDataset(*samples(8))')
    status = main([command, name, *more, "device=cpu", "train.batch_size=4", "train.max_steps=8"])
    assert status == 0, capsys.readouterr().err


def test_the_largest_batch_is_planned_beyond_the_samples() -> None:
    assert main(["memory", recipe(LOADER), "device=cpu", "memory.fits=1MiB"]) == 0
    (record,) = Path("outputs").rglob("memory.json")
    fits = json.loads(record.read_text(encoding="utf-8"))["modes"][0]["fits"]
    assert 22 < fits["batch_size"] < 2**20 / 32  # a sample takes 4 inputs and 8 activations or more
    assert fits["peak_bytes"] <= 2**20 < fits["next_peak_bytes"]
