"""The same training by mprun and by what people run instead: the processes of `make bench`.

    python -m benchmarks.peers NAME --turn-s S

Started by `benchmarks.bench`, which lets the processes take turns (`benchmarks.turns`). All train a
task of `benchmarks.tasks` on the CPU, without a validation set and without checkpoints. In all but
the tutorial's way a batch is gathered in memory and prepared at once, so that what differs is the
loop; the tutorial's way pays for an image and its transforms per sample. What else a loop does per
step is its docstring here, and a line below the table: reading the loss, keeping metrics, writing a
record.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.tasks import CASES, Task
from benchmarks.turns import Turns, serve
from mprun.train.data import TensorSet


def raw(task: Task, turns: Turns, channels_last: bool = False, compiled: bool = False) -> None:
    """reads no loss, keeps no metric"""
    model, optimizer = task.built()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=memory_format)
    forward = torch.compile(model) if compiled else model
    for x, y in task():
        optimizer.zero_grad()
        with task.autocast():
            output = forward(x.contiguous(memory_format=memory_format) if channels_last else x)
        task.loss(output, y).backward()
        optimizer.step()
        turns()


class Pictures(Dataset[tuple[Tensor, int]]):
    """A picture per sample, transformed one by one, as torchvision's data sets give."""

    def __init__(self, data: TensorSet, name: str) -> None:
        from torchvision import transforms

        self._data = data
        steps = [transforms.ToTensor(), transforms.Lambda(torch.flatten)]
        if name == "fashion_mnist":
            normalize = transforms.Normalize((0.5,), (0.5,))
            steps = [transforms.Resize(128), transforms.ToTensor(), normalize]
        self._transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self._data.inputs[index, 0].numpy())
        return self._transform(image), int(self._data.targets[index])


def tutorial(task: Task, turns: Turns) -> None:
    """DataLoader without workers, transforms per sample, reads the loss at each step"""
    batches: Iterable[tuple[Tensor, Tensor]] = task()
    if task.name != "linear":  # its one batch is in memory
        batches = DataLoader(Pictures(task.samples(), task.name), task.batch_size, shuffle=True)
    model, optimizer = task.built()
    running_loss = 0.0
    while True:
        for x, y in batches:
            optimizer.zero_grad()
            with task.autocast():
                output = model(x)
            loss = task.loss(output, y)
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
        fabric.backward(task.loss(model(x), y))
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
            loss = task.loss(self.model(batch[0]), batch[1])
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
        accelerator.backward(task.loss(model(x), y))
        optimizer.step()
        turns()


def _fashion_mnist_layers(layers: Any) -> list[Any]:
    return [
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


def _mnist_layers(layers: Any) -> list[Any]:
    hidden = [layers.Dense(256, activation="relu") for _ in range(2)]
    return [layers.Input((784,)), *hidden, layers.Dense(10, dtype="float32")]


def _linear_layers(layers: Any) -> list[Any]:
    return [layers.Input((1024,)), layers.Dense(512), layers.Activation("linear", dtype="float32")]


KERAS_LAYERS = {
    "fashion_mnist": _fashion_mnist_layers,
    "mnist": _mnist_layers,
    "linear": _linear_layers,
}


def keras(task: Task, turns: Turns) -> None:
    """`fit`, which keeps the mean loss; no accuracy; the same layers in Keras, channels first"""
    import keras as k

    k.config.set_image_data_format("channels_first")
    k.config.set_dtype_policy("mixed_bfloat16" if task.bf16 else "float32")
    model = k.Sequential(KERAS_LAYERS[task.name](k.layers))
    optimizers = {
        "fashion_mnist": lambda: k.optimizers.AdamW(1e-3, weight_decay=0.01, epsilon=1e-8),
        "mnist": lambda: k.optimizers.RMSprop(1e-3, rho=0.9, epsilon=1e-7),
        "linear": lambda: k.optimizers.SGD(1e-3),
    }
    classes = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = k.losses.MeanSquaredError() if task.name == "linear" else classes
    model.compile(optimizers[task.name](), loss)

    class TakeTurns(k.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            turns()

    steps = 500 if task.name == "linear" else 60_000 // task.batch_size
    model.fit(task(), epochs=10**6, steps_per_epoch=steps, callbacks=[TakeTurns()], verbose=0)


def mprun(task: Task, turns: Turns, speed: str) -> None:
    """the whole command: loss and accuracy of each step, record on disk, progress"""
    from mprun.cli.main import main
    from mprun.train.signals import StopSignals

    def requested(_: StopSignals) -> bool:  # the loop asks after each step whether to stop
        turns()
        return False

    arguments = [
        f"recipe={task.name}",
        f"recipe.target={task.case.target}",
        f"precision={task.precision}",
        f"speed={speed}",
        "device=cpu",
        f"train.batch_size={task.batch_size}",
        "train.epochs=1000000",
    ]
    with mock.patch.object(StopSignals, "requested", requested):
        main(arguments)


class Peer(NamedTuple):
    """A way to train."""

    train: Callable[[Task, Turns], None]
    needs: tuple[str, ...] = ()
    """Packages beyond mprun's own."""
    imports: tuple[str, ...] = ()
    """Modules that it imports before it trains."""
    images: bool = False
    """Whether it is another way for recipes with images alone."""

    @property
    def includes(self) -> str:
        """What a step has besides the arithmetic."""
        function = self.train.func if isinstance(self.train, partial) else self.train
        return function.__doc__ or ""


RAW = "raw loop"
MPRUN = ("mprun.cli.main", "mprun.cli.train_command", "mprun.train.run")
PEERS = {
    RAW: Peer(raw),
    "raw loop, channels-last": Peer(partial(raw, channels_last=True), images=True),
    "raw loop, compiled": Peer(
        partial(raw, compiled=True), imports=("torch._inductor.compile_fx",), images=True
    ),
    "tutorial": Peer(tutorial, imports=("torchvision.transforms",)),
    "Lightning Fabric": Peer(lightning_fabric, ("lightning",), ("lightning.fabric",)),
    "Lightning Trainer": Peer(lightning_trainer, ("lightning",), ("lightning.pytorch",)),
    "Accelerate": Peer(accelerate, ("accelerate",), ("accelerate",)),
    "Keras 3 on torch": Peer(keras, ("keras",), ("keras",)),
    "mprun speed=plain": Peer(partial(mprun, speed="plain"), imports=MPRUN),
    "mprun speed=auto": Peer(partial(mprun, speed="auto"), imports=MPRUN),
}


def peers_of(recipe: str) -> list[str]:
    """The names of the peers that train a recipe."""
    return [name for name, peer in PEERS.items() if CASES[recipe].images or not peer.images]


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
        peer.train(Task.parse(task), turns)

    serve(train, args.turn_s)


if __name__ == "__main__":
    main()
