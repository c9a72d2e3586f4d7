"""A raw PyTorch loop: what mprun must equal bit for bit."""

from __future__ import annotations

import torch


def train(recipe, splits, optimizer, batch_size, steps, bf16, seed=0):
    """`steps` optimizer steps of `recipe`; the trained model."""
    torch.manual_seed(seed)
    model = recipe.model()
    update = optimizer(model.parameters())
    inputs, targets = splits.train.inputs, splits.train.targets
    order = torch.Generator().manual_seed(seed)
    done = 0
    while True:
        rows = torch.arange(len(inputs))
        if splits.shuffle:
            rows = torch.randperm(len(inputs), generator=order)
        for index in rows.split(batch_size):
            update.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                output = model(recipe.prepare(inputs[index]))
            recipe.loss(output.float(), (None, targets[index])).backward()
            update.step()
            done += 1
            if done == steps:
                return model
