"""A neural ODE: the law of a harmonic oscillator from its paths, by Runge-Kutta and the adjoint.

The answer is known: paths are circles, (q, p) turned by an angle t. The backward pass stores one
state: it integrates back in time, and the gradient with it (Chen et al., "Neural Ordinary
Differential Equations", 2018). So a gradient is as good as the path that is found again. Each step
adds a small change h f(y) to a large y and rounds the sum to the spacing of y. These errors add up,
forward and back, and smaller steps make it worse: in bfloat16 a change below y / 512 is lost.
Autocast ends with the forward pass: in mixed modes this backward pass runs in float32.

mprun recipe=examples/ode.py precision=fp64
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

DEFAULTS = {
    "train.batch_size": 64,
    "train.max_steps": 300,
    "train.lr": 3e-2,
    "train.scheduler": "cosine",
}
METRIC = ("error", "min")
STEPS, H = 10, 0.3


class Field(nn.Module):
    """dy/dt [B, 2] of a state y [B, 2]."""

    def __init__(self, width=16):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.bent = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, y):
        return self.linear(y) + self.bent(y)


def step(field, y, h):
    """A step of the classical Runge-Kutta method; h < 0 goes back in time."""
    a = field(y)
    b = field(y + h / 2 * a)
    c = field(y + h / 2 * b)
    return y + h / 6 * (a + 2 * b + 2 * c + field(y + h * c))


class Path(torch.autograd.Function):
    """The states [B, STEPS, 2] after each step from y; its backward pass keeps the last alone."""

    @staticmethod
    def forward(ctx, field, y, *parameters):
        states = []
        for _ in range(STEPS):
            y = step(field, y, H)
            states.append(y)
        ctx.field, ctx.parameters = field, parameters
        ctx.save_for_backward(y)
        return torch.stack(states, 1)

    @staticmethod
    def backward(ctx, grads):
        (y,) = ctx.saved_tensors
        adjoint, totals = torch.zeros_like(y), [torch.zeros_like(p) for p in ctx.parameters]
        for grad in reversed(grads.unbind(1)):
            adjoint = adjoint + grad
            with torch.enable_grad():
                y = step(ctx.field, y.detach(), -H).detach().requires_grad_()
                end = step(ctx.field, y, H)
            adjoint, *parts = torch.autograd.grad(end, (y, *ctx.parameters), adjoint)
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
        return None, adjoint, *totals


class RelativeError:
    """|path - exact| / |exact| over all states, in the 2-norm."""

    wrong = size = 0.0

    def update(self, output, batch):
        true = batch[1].double()
        self.wrong += (output.double() - true).square().sum().item()
        self.size += true.square().sum().item()

    def compute(self):
        return math.sqrt(self.wrong / self.size)


def model():
    return Field()


def data():
    """Starts on a ring, and their exact paths: q + ip turned by -t, in float64."""
    angle = 2 * math.pi * torch.rand(1200, 1, dtype=torch.float64)
    radius = 0.5 + torch.rand(1200, 1, dtype=torch.float64)
    path = torch.view_as_real(torch.polar(radius, angle - H * torch.arange(STEPS + 1)))
    samples = (path[:, 0], path[:, 1:])
    return {"train": tuple(x[:1024] for x in samples), "test": tuple(x[1024:] for x in samples)}


def forward(model, batch):
    return Path.apply(model, batch[0], *model.parameters())


def loss(output, batch):
    return F.mse_loss(output, batch[1].to(output))


def metrics():
    return {"error": RelativeError()}


def quantities():
    """The last state beside the exact one."""
    return {"end": (lambda model, batch: forward(model, batch)[:, -1], lambda b: b[1][:, -1])}
