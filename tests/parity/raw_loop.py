"""Raw PyTorch loops: what mprun must equal bit for bit.

A case is a function that makes a `RawLoop`, with data, model and optimizer of its own. The models
are drawn after `torch.manual_seed`, and the order of samples comes from a generator of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.recipe import Recipe
from mprun.recipes.char_gpt import Gpt
from mprun.recipes.fashion_mnist import FashionMnist
from mprun.recipes.linear import Linear
from mprun.recipes.mnist import Mnist
from mprun.records.run_record import read_lines
from mprun.train.data import DataRequest, image_splits
from mprun.train.data.text import python_library
from tests.run.test_resume import trained


@dataclass
class RawLoop:
    """A training written out."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    """One for each step."""
    forward: Callable[[Any], Any]
    """Batch to output, computed under autocast."""
    loss: Callable[[Any, Any], Any]
    """Of a float32 output and its batch."""
    words: Sequence[str] = ()
    """The overrides of a run of mprun's that does the same."""
    clip_norm: float | None = None
    schedule: Callable[[int], float] | None = None
    """Step to learning rate."""

    def train(
        self, low: torch.dtype | None, scaler: torch.amp.GradScaler | None = None
    ) -> list[float]:
        """Train under autocast to `low`, or without; the losses of all steps."""
        scaler = scaler or torch.amp.GradScaler(enabled=False)
        losses = []
        for step, batch in enumerate(self.batches):
            if self.schedule is not None:
                self.optimizer.param_groups[0]["lr"] = self.schedule(step)
            self.optimizer.zero_grad()
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                output = self.forward(batch)
            loss = self.loss(output.float() if isinstance(output, Tensor) else output, batch)
            scaler.scale(loss).backward()
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            scaler.step(self.optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses


def assert_same(
    raw: RawLoop, low: torch.dtype | None, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Train, and compare with the run in the folder `run`: its losses and weights, in every bit."""
    losses = raw.train(low, scaler)
    steps = [line for line in read_lines(Path("run")) if line["kind"] == "step"]
    assert [line["loss"] for line in steps] == losses
    ours, weights = trained(Path("run"))["model"], raw.model.state_dict()
    assert ours.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(value, ours[key]), f"{key} differs"


def drawn(
    samples: int, size: int, steps: int, shuffle: bool = True, seed: int = 0
) -> Iterator[Tensor]:
    """The indices of the samples of each step, epoch after epoch."""
    order, done = torch.Generator().manual_seed(seed), 0
    while True:
        rows = torch.randperm(samples, generator=order) if shuffle else torch.arange(samples)
        for index in rows.split(size):
            if done == steps:
                return
            yield index
            done += 1


def of_recipe(
    recipe: Recipe,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    size: int,
    steps: int,
    **of_request: Any,
) -> RawLoop:
    """A loop over samples in memory, with a recipe's own model and loss."""
    splits = recipe.data(DataRequest(source="generated", **of_request))
    inputs, targets = splits.train.inputs, splits.train.targets  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = recipe.model()
    return RawLoop(
        model,
        optimizer(model.parameters()),
        drawn(len(inputs), size, steps, splits.shuffle),
        lambda index: model(recipe.prepare(inputs[index])),  # type: ignore[attr-defined]
        lambda output, index: recipe.loss(output, (None, targets[index])),
        [f"train.max_steps={steps}", "data.eval_limit=64", f"train.batch_size={size}"],
    )


def linear() -> RawLoop:
    return of_recipe(Linear(1024, 512, 64), lambda p: torch.optim.SGD(p, lr=1e-3), 64, 60)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, alpha=0.9, eps=1e-7)


def mnist() -> RawLoop:
    return of_recipe(Mnist(256), rmsprop, 1024, 8, validation_fraction=0.2)


def fashion_mnist() -> RawLoop:
    return of_recipe(FashionMnist(128, 1), lambda p: torch.optim.AdamW(p, lr=1e-3), 12, 20)


def resnet() -> RawLoop:
    """torchvision's model and torch's formula of a cosine."""
    from torchvision.models import resnet18

    steps, size = 3, 4
    request = DataRequest(source="generated", validation_fraction=0.1)
    train: Any = image_splits("FashionMNIST", request).train
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    optimizer.register_step_post_hook(lambda *_: schedule.step())

    def forward(index: Tensor) -> Tensor:
        images = train.inputs[index].float() / 255
        output: Tensor = model(((images - 0.2860) / 0.3530).repeat(1, 3, 1, 1))
        return output

    return RawLoop(
        model,
        optimizer,
        drawn(len(train), size, steps),
        forward,
        lambda output, index: F.cross_entropy(output, train.targets[index]),
        [f"train.max_steps={steps}", "data.eval_limit=4", f"train.batch_size={size}"],
    )


def windows(context: int, size: int, steps: int) -> Iterator[Tensor]:
    """Windows of `context` + 1 characters of the text's training part, all but the last tenth."""
    text = python_library()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    ids = ids[: len(ids) - round(len(ids) * 0.1)]
    for starts in drawn(len(ids) - context, size, steps):
        yield torch.stack([ids[i : i + context + 1] for i in starts])


def char_gpt() -> RawLoop:
    steps, warmup, size, context = 8, 3, 12, 16
    high, low = 1e-3, 1e-4
    sizes = {"vocabulary": 128, "context": context, "layers": 2, "heads": 4, "width": 64}
    torch.manual_seed(0)
    model = Gpt(*sizes.values())
    options: dict[str, Any] = {"lr": high, "betas": (0.9, 0.99), "weight_decay": 0.1}

    def learning_rate(step: int) -> float:
        if step < warmup:
            return high * (step + 1) / warmup
        fall = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        return low + (high - low) * fall

    return RawLoop(
        model,
        torch.optim.AdamW(model.parameters(), **options),
        windows(context, size, steps),
        lambda ids: model(ids[:, :-1]),
        lambda output, ids: F.cross_entropy(output.flatten(0, 1), ids[:, 1:].flatten()),
        [
            *(f"recipe.model.{name}={value}" for name, value in sizes.items()),
            *(f"train.max_steps={steps}", f"train.warmup_steps={warmup}"),
            *(f"train.batch_size={size}", "data.eval_limit=64"),
        ],
        clip_norm=1.0,
        schedule=learning_rate,
    )


def transformer() -> RawLoop:
    """A Llama from its config; transformers itself shifts the labels."""
    transformers = pytest.importorskip("transformers", reason="mprun[transformer]")
    steps, context = 4, 32
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    return RawLoop(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.99), weight_decay=0.1),
        (ids[:, :-1] for ids in windows(context, 12, steps)),
        lambda ids: model(input_ids=ids, labels=ids),
        lambda output, ids: output.loss,
        [
            *("recipe.model.layers=2", "recipe.model.width=64", "recipe.model.vocabulary=128"),
            *(f"recipe.model.context={context}", "train.scheduler=none", "train.warmup_steps=0"),
            *("train.min_lr=0", f"train.max_steps={steps}", "data.eval_limit=32"),
        ],
        clip_norm=1.0,
    )


def tabular() -> RawLoop:
    """A small network on scikit-learn's digits."""
    datasets = pytest.importorskip("sklearn.datasets", reason="mprun[tabular]")
    selection = pytest.importorskip("sklearn.model_selection", reason="mprun[tabular]")
    features, classes = datasets.load_digits(return_X_y=True)
    inputs, _, targets, _ = selection.train_test_split(
        features, classes, test_size=0.2, random_state=0, stratify=classes
    )
    inputs, targets = torch.from_numpy(inputs).float() / 16, torch.from_numpy(targets)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    return RawLoop(
        model,
        torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01),
        drawn(1293, 32, 4),
        lambda index: model(inputs[index]),
        lambda output, index: F.cross_entropy(output, targets[index]),
        ["train.max_steps=4", "data.eval_limit=32"],
    )
