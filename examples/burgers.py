"""Burgers' equation u_t + u u_x = nu u_xx by a physics-informed network, on a travelling front.

The exact answer is u = (1 - tanh((x - t / 2) / (4 nu))) / 2: a front that moves at half the speed
of the flow. With nu = 0.01 / pi it is 0.013 wide, so u_xx reaches 2000 and is multiplied by a small
nu, and the terms of the equation cancel. A point x just above 1 has a spacing of 1e-7 in float32,
1e-3 in TF32 and 8e-3 in bfloat16: the last puts a whole front between two or three numbers. Small
differences grow in this training, so two precisions differ as much as two seeds: 4 seeds do not
even settle float64 against float32.

mprun recipe=examples/burgers.py precision=fp64
"""

import math

import torch
from torch import nn

DEFAULTS = {
    "train.batch_size": 256,
    "train.max_steps": 1500,
    "train.lr": 1e-2,
    "train.scheduler": "cosine",
}
METRIC = ("error", "min")
NU = 0.01 / math.pi


class RelativeError:
    """|u - exact| / |exact| over all points, in the 2-norm."""

    wrong = size = 0.0

    def update(self, output, batch):
        true = batch[2].double()
        self.wrong += (output["u"].double() - true).square().sum().item()
        self.size += true.square().sum().item()

    def compute(self):
        return math.sqrt(self.wrong / self.size)


class Network(nn.Module):
    """u(x, t) [B, 1], the start u(x, 0) built in: what is learned is multiplied by t."""

    def __init__(self, width=16):
        super().__init__()
        hidden = [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x, t):
        shift = self.layers(torch.cat([x, t], 1))
        return exact(x - t * shift, torch.zeros_like(t))


def exact(x, t):
    return (1 - torch.tanh((x - t / 2) / (4 * NU))) / 2


def model():
    return Network()


def data():
    """Points (x, t), half of them near the front, and the answer there for the metric alone."""
    t = torch.rand(5120, 1, dtype=torch.float64)
    x = 2 * torch.rand(5120, 1, dtype=torch.float64) - 1
    x[::2] = t[::2] / 2 + 8 * NU * torch.randn(2560, 1, dtype=torch.float64)
    samples = (x, t, exact(x, t))
    return {"train": tuple(s[:4096] for s in samples), "test": tuple(s[4096:] for s in samples)}


def derivative(u, x):
    """du/dx [B, 1], itself with a graph."""
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def forward(model, batch):
    with torch.enable_grad():  # in evaluation too
        x, t = (part.detach().requires_grad_() for part in batch[:2])
        u = model(x, t)
        slope = derivative(u, x)
        residual = derivative(u, t) + u * slope - NU * derivative(slope, x)
    return {"u": u, "residual": residual}


def loss(output, batch):
    return output["residual"].square().mean()


def metrics():
    return {"error": RelativeError()}


def quantities():
    """u beside the exact answer, and what is left of the equation."""
    return {
        "u": (lambda model, batch: model(*batch[:2]), lambda batch: batch[2]),
        "residual": lambda model, batch: forward(model, batch)["residual"],
    }
