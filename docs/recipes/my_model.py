"""A model of one's own in a file: handwritten digits, read by torchvision."""

import os

from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.datasets import MNIST

DEFAULTS = {"train.lr": 1e-3, "train.batch_size": 250, "train.epochs": 1}
ROOT = os.environ.get("MPRUN_DATA", "data")


def model():
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))


def data():
    parts = {"train": MNIST(ROOT, download=True), "test": MNIST(ROOT, train=False)}
    return {name: (part.data.flatten(1) / 255, part.targets) for name, part in parts.items()}


def loss(output, batch):
    return cross_entropy(output, batch[1])


def correct(output, batch):
    return (output.argmax(1) == batch[1]).sum()
