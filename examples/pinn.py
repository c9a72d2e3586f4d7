"""A physics-informed network: Poisson's equation u'' = -pi^2 sin(pi x), whose answer is sin(pi x).

No sample shows the answer: the loss is the residual of the equation, with a second derivative of
the network by autograd. Each derivative makes rounding errors larger: weights of size w multiply
them by w, then by w^2. The residual is a small difference of two numbers near 10: for the exact
answer float64 leaves 2e-15 of it, float32 2e-6. Below that the gradient points nowhere. Adam is far
from that floor and float32 is enough for it, but TF32 doubled the error of u, and bfloat16 made it
20 times as large. The error of u is what counts, and the loss does not show it.

mprun recipe=examples/pinn.py precision=fp64
"""

import math

import torch
from torch import nn

DEFAULTS = {
    "train.batch_size": 128,
    "train.max_steps": 2000,
    "train.lr": 1e-2,
    "train.scheduler": "cosine",
}
METRIC = ("error", "min")


class RelativeError:
    """|u - exact| / |exact| over all points, in the 2-norm."""

    wrong = size = 0.0

    def update(self, output, batch):
        exact = batch[1].double()
        self.wrong += (output["u"].double() - exact).square().sum().item()
        self.size += exact.square().sum().item()

    def compute(self):
        return math.sqrt(self.wrong / self.size)


class Network(nn.Module):
    """u(x) [B, 1] that is zero at both ends, so that the equation is all that is left to learn."""

    def __init__(self, width=16):
        super().__init__()
        hidden = [nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x):
        return (1 - x.square()) * self.layers(x)


def exact(x):
    return torch.sin(math.pi * x)


def model():
    return Network()


def data():
    """Points and, for the metric alone, the answer there; drawn in float64."""
    sets = {"train": 2 * torch.rand(4096, 1, dtype=torch.float64) - 1}
    sets["test"] = torch.linspace(-1, 1, 201, dtype=torch.float64)[:, None]
    return {name: (x, exact(x)) for name, x in sets.items()}


def derivative(u, x):
    """du/dx [B, 1], itself with a graph."""
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def forward(model, batch):
    with torch.enable_grad():  # in evaluation too
        x = batch[0].detach().requires_grad_()
        u = model(x)
        second = derivative(derivative(u, x), x)
    return {"u": u, "residual": second + math.pi**2 * exact(x)}


def loss(output, batch):
    return output["residual"].square().mean()


def metrics():
    return {"error": RelativeError()}


def quantities():
    """u beside the exact answer, and what is left of the equation."""
    return {
        "u": (lambda model, batch: model(batch[0]), lambda batch: batch[1]),
        "residual": lambda model, batch: forward(model, batch)["residual"],
    }
