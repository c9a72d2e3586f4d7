"""Which of three spiral arms a point belongs to."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

DEFAULTS = {"train.lr": 1e-3, "train.batch_size": 500, "train.epochs": 8}


def model():
    wide = [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(nn.Linear(2, 1024), nn.ReLU(), *wide, nn.Linear(1024, 3))


def data():
    arm, radius = torch.randint(3, (6000,)), torch.rand(6000)
    angle = 2.1 * arm + 5 * radius + 0.1 * torch.randn(6000)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return {"train": (points[:4000], arm[:4000]), "test": (points[4000:], arm[4000:])}


def loss(output, batch):
    return cross_entropy(output, batch[1])


def correct(output, batch):
    return (output.argmax(1) == batch[1]).sum()
