"""The model of `char_gpt` in a raw PyTorch loop: nanoGPT's own way beside mprun's.

    MPRUN_DATA=FOLDER python -m benchmarks.char_gpt --seeds 2

Every step draws its windows at random places, with replacement, as nanoGPT does. Weight decay is on
all weights, as in mprun's recipe, or on matrices only, as in nanoGPT. The validation loss is that
of the whole held-out tenth, and of ten draws of 240 random windows, as nanoGPT estimates it.
"""

from __future__ import annotations

import argparse
import math
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.config import compose
from mprun.recipe import Recipe
from mprun.train.assemble.recipe_loading import recipe_of
from mprun.train.data import DataRequest, TensorSet

STEPS, WARMUP, BATCH, CONTEXT = 2000, 100, 12, 64
HIGH, LOW, DECAY = 1e-3, 1e-4, 0.1
WINDOWS, DRAWS = 240, 10


def learning_rate(step: int) -> float:
    """nanoGPT's warm-up and cosine."""
    if step < WARMUP:
        return HIGH * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (STEPS - WARMUP)
    return LOW + 0.5 * (1 + math.cos(math.pi * done)) * (HIGH - LOW)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of windows [B, T]."""
    return F.cross_entropy(model(inputs.long()).flatten(0, 1), targets.flatten().long())


def random_windows(count: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Windows at random places, from those that start at every character."""
    places = torch.randint(len(inputs), (count,))
    return inputs[places], targets[places]


def train(recipe: Recipe, seed: int, decay_all: bool, data: TensorSet) -> nn.Module:
    """The trained model."""
    torch.manual_seed(seed)
    model = recipe.model()
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": DECAY},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": DECAY * decay_all},
    ]
    optimizer = torch.optim.AdamW(groups, lr=HIGH, betas=(0.9, 0.99))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss_of(model, *random_windows(BATCH, data.inputs, data.targets)).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    seeds = parser.parse_args().seeds
    recipe = recipe_of(compose(("recipe=char_gpt",)).config)
    splits = recipe.data(DataRequest(validation_fraction=0.1))
    training, validation = splits.train, splits.validation
    assert isinstance(training, TensorSet)
    assert isinstance(validation, TensorSet)
    held_out = torch.cat([validation.inputs.flatten(), validation.targets[-1, -1:]])
    places = (held_out[:-1].unfold(0, CONTEXT, 1), held_out[1:].unfold(0, CONTEXT, 1))
    print(f"{splits.name}, PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    for decay_all in (True, False):
        for seed in range(seeds):
            with torch.enable_grad():
                model = train(recipe, seed, decay_all, training)
            whole = loss_of(model, validation.inputs, validation.targets).item()
            drawn = [loss_of(model, *random_windows(WINDOWS, *places)).item() for _ in range(DRAWS)]
            print(
                f"weight decay on {'all weights' if decay_all else 'matrices'}, seed {seed}: "
                f"validation loss {whole:.4f}; {WINDOWS} random windows {fmean(drawn):.4f} "
                f"({min(drawn):.4f} to {max(drawn):.4f}, {DRAWS} draws)",
                flush=True,
            )


if __name__ == "__main__":
    main()
