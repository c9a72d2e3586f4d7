"""The same training by mprun and by what people run instead: the processes of `make bench`.

    python -m benchmarks.peers NAME --turn-s S

Started by `benchmarks.bench`, which lets the processes take turns (`benchmarks.turns`). A task is
`BATCH_SIZE PRECISION`, the precision fp32 or bf16_mixed. All train the CNN of
`recipes/fashion_mnist.py` with AdamW on the CPU, without a validation set and without checkpoints.
In all but the tutorial's way a batch is gathered in memory and resized at once
(`FashionMnist.prepare`), so that what differs is the loop; the tutorial's way pays for an image and
its transforms per sample. What else a loop does per step is its docstring here, and a line below
the table: reading the loss, keeping metrics, writing a record.
"""

from __future__ import annotations

import argparse
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.turns import Turns, serve
from mprun.data import DataRequest, Splits, TensorSet
from recipes.fashion_mnist import FashionMnist

LR, WEIGHT_DECAY = 1e-3, 0.01  # those of conf/recipe/fashion_mnist.yaml
DATA = "MPRUN_BENCH_DATA"
"""Environment variable: the file of `save_data`."""


def save_data(splits: Splits, file: Path) -> None:
    """Keep decoded training samples, so that no process decodes or draws them again."""
    assert isinstance(splits.train, TensorSet)
    torch.save(splits.train.content, file)


@dataclass(frozen=True)
class StoredFashionMnist(FashionMnist):
    """The recipe, with the samples of `save_data`."""

    draws_data: ClassVar[bool] = False

    def data(self, request: DataRequest) -> Splits:
        train = TensorSet(*torch.load(os.environ[DATA]))
        return Splits("FashionMNIST", "local", train, train.first(0), train.first(0))


class Task(NamedTuple):
    """What is trained, the same for all."""

    batch_size: int
    precision: str
    """fp32 or bf16_mixed."""

    @property
    def recipe(self) -> FashionMnist:
        return StoredFashionMnist(image_size=128, log_softmax_dim=1)

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16_mixed"

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches for ever: images [B, 1, 128, 128] float32, classes [B]."""
        recipe, data = self.recipe, self.recipe.data(DataRequest()).train
        assert isinstance(data, TensorSet)
        while True:
            for index in torch.randperm(len(data)).split(self.batch_size):
                if len(index) == self.batch_size:
                    yield recipe.prepare(data.inputs[index]), data.targets[index]

    def built(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer, PyTorch's defaults."""
        model = self.recipe.model()
        return model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)


def raw(task: Task, turns: Turns, channels_last: bool = False, compiled: bool = False) -> None:
    """reads no loss, keeps no metric"""
    model, optimizer = task.built()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=memory_format)
    forward = torch.compile(model) if compiled else model
    for x, y in task():
        optimizer.zero_grad()
        with task.autocast():
            loss = F.nll_loss(forward(x.contiguous(memory_format=memory_format)), y)
        loss.backward()
        optimizer.step()
        turns()


class Pictures(Dataset[tuple[Tensor, int]]):
    """A picture per sample, transformed one by one, as torchvision.datasets.FashionMNIST gives."""

    def __init__(self, data: TensorSet) -> None:
        from torchvision import transforms

        self._data = data
        self._transform = transforms.Compose(
            [transforms.Resize(128), transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))]
        )

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self._data.inputs[index, 0].numpy())
        return self._transform(image), int(self._data.targets[index])


def tutorial(task: Task, turns: Turns) -> None:
    """DataLoader without workers, transforms per sample, reads the loss at each step"""
    data = task.recipe.data(DataRequest()).train
    assert isinstance(data, TensorSet)
    loader = DataLoader(Pictures(data), task.batch_size, shuffle=True)
    model, optimizer = task.built()
    running_loss = 0.0
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            with task.autocast():
                loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            turns()


def lightning_fabric(task: Task, turns: Turns) -> None:
    """reads no loss, keeps no metric"""
    from lightning.fabric import Fabric

    precision = "bf16-mixed" if task.bf16 else "32-true"
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer = fabric.setup(*task.built())
    for x, y in task():
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        turns()


def lightning_trainer(task: Task, turns: Turns) -> None:
    """`self.log` of the loss; no progress bar, logger or checkpoint"""
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = task.built()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss = F.nll_loss(self.model(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    class TakeTurns(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            turns()

    class BatchSource:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return task()

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if task.bf16 else "32-true",
        max_epochs=-1,
        callbacks=[TakeTurns()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), BatchSource())


def accelerate(task: Task, turns: Turns) -> None:
    """reads no loss, keeps no metric"""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if task.bf16 else "no")
    model, optimizer = accelerator.prepare(*task.built())
    for x, y in task():
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        turns()


def keras(task: Task, turns: Turns) -> None:
    """`fit`, which keeps the mean loss; no accuracy; the same layers in Keras, channels first"""
    import keras as k

    k.config.set_image_data_format("channels_first")
    k.config.set_dtype_policy("mixed_bfloat16" if task.bf16 else "float32")
    layers = k.layers
    model = k.Sequential(
        [
            layers.Input((1, 128, 128)),
            layers.Conv2D(5, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(12, 5, activation="relu"),
            layers.GroupNormalization(3, axis=1, epsilon=1e-5),
            layers.Flatten(),
            layers.Dense(100, activation="relu"),
            layers.Dense(10),
            layers.Activation("log_softmax", dtype="float32"),
        ]
    )
    model.compile(
        k.optimizers.AdamW(LR, weight_decay=WEIGHT_DECAY, epsilon=1e-8),
        k.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    class TakeTurns(k.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            turns()

    steps = 60_000 // task.batch_size
    model.fit(task(), epochs=10**6, steps_per_epoch=steps, callbacks=[TakeTurns()], verbose=0)


def mprun(task: Task, turns: Turns, speed: str) -> None:
    """the whole command: loss and accuracy of each step, record on disk, progress"""
    from mprun.cli.main import main
    from mprun.train.signals import StopSignals

    def requested(_: StopSignals) -> bool:  # the loop asks after each step whether to stop
        turns()
        return False

    arguments = [
        "recipe=fashion_mnist",
        "recipe.target=benchmarks.peers.StoredFashionMnist",
        f"precision={task.precision}",
        f"speed={speed}",
        "device=cpu",
        f"train.batch_size={task.batch_size}",
        "train.epochs=1000000",
    ]
    with mock.patch.multiple(StopSignals, requested=requested, check=lambda _: None):
        main(arguments)


class Peer(NamedTuple):
    """A way to train."""

    train: Callable[[Task, Turns], None]
    needs: tuple[str, ...] = ()
    """Packages beyond mprun's own."""
    imports: tuple[str, ...] = ()
    """Modules that it imports before it trains."""

    @property
    def includes(self) -> str:
        """What a step has besides the arithmetic."""
        function = self.train.func if isinstance(self.train, partial) else self.train
        return function.__doc__ or ""


RAW = "raw loop"
MPRUN = ("mprun.cli.main", "mprun.cli.train_command", "mprun.run")
PEERS = {
    RAW: Peer(raw),
    "raw loop, channels-last": Peer(partial(raw, channels_last=True)),
    "raw loop, compiled": Peer(
        partial(raw, compiled=True), imports=("torch._inductor.compile_fx",)
    ),
    "tutorial": Peer(tutorial, imports=("torchvision.transforms",)),
    "Lightning Fabric": Peer(lightning_fabric, ("lightning",), ("lightning.fabric",)),
    "Lightning Trainer": Peer(lightning_trainer, ("lightning",), ("lightning.pytorch",)),
    "Accelerate": Peer(accelerate, ("accelerate",), ("accelerate",)),
    "Keras 3 on torch": Peer(keras, ("keras",), ("keras",)),
    "mprun speed=plain": Peer(partial(mprun, speed="plain"), imports=MPRUN),
    "mprun speed=auto": Peer(partial(mprun, speed="auto"), imports=MPRUN),
}


def main() -> None:
    """Train one peer until the parent has enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--turn-s", type=float, required=True, help="seconds of a turn")
    args = parser.parse_args()
    peer = PEERS[args.name]
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for package in peer.imports:
        importlib.import_module(package)

    def train(task: str, turns: Turns) -> None:
        batch_size, precision = task.split()
        peer.train(Task(int(batch_size), precision), turns)

    serve(train, args.turn_s)


if __name__ == "__main__":
    main()
