"""Energies and forces of small Lennard-Jones clusters, which are known exactly.

The network gives the energy from the distances of pairs, so turning or moving a cluster changes
nothing. The force is -dE/dx by autograd, and training differentiates it again. The repulsion grows
as 1/r^12: a relative error e of a distance is one of 13 e of a steep force, and a force on an atom
is a sum of large parts of both signs. A distance is the difference of two positions, so it has the
rounding of the whole box: the exact formula is wrong by 6 % in bfloat16 and by 1e-6 in float32.
Positions must stay wide even where the layers are narrow.

mprun recipe=examples/forces.py precision=fp64
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

DEFAULTS = {
    "train.batch_size": 32,
    "train.max_steps": 1200,
    "train.lr": 1e-2,
    "train.scheduler": "cosine",
}
METRIC = ("force_error", "min")
ATOMS, BOX, NEAREST = 6, 2.5, 0.95
FIRST, SECOND = torch.triu_indices(ATOMS, ATOMS, 1)


class ForceError:
    """|force - exact| / |exact| over all atoms, in the 2-norm."""

    wrong = size = 0.0

    def update(self, output, batch):
        exact = batch["forces"].double()
        self.wrong += (output["forces"].double() - exact).square().sum().item()
        self.size += exact.square().sum().item()

    def compute(self):
        return math.sqrt(self.wrong / self.size)


def distances(x):
    """The distances [B, pairs] between atoms at x [B, ATOMS, 3]."""
    return (x[:, FIRST] - x[:, SECOND]).norm(dim=2)


class Energy(nn.Module):
    """The energy [B] as a sum over pairs of a learned function of 1/r."""

    def __init__(self, width=32):
        super().__init__()
        hidden = [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.pair = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x):
        inverse = 1 / distances(x)
        features = torch.stack([inverse, inverse**6], 2)
        return (inverse[..., None] ** 6 * self.pair(features)).sum((1, 2))


def lennard_jones(x):
    """The exact energy [B]."""
    sixth = distances(x) ** -6
    return 4 * (sixth.square() - sixth).sum(1)


def model():
    return Energy()


def data():
    """Clusters without close pairs; float64, as exact forces are."""
    x = BOX * torch.rand(40000, ATOMS, 3, dtype=torch.float64)
    x = x[distances(x).amin(1) > NEAREST][:640]
    answers = forward(lennard_jones, {"x": x})
    samples = {"x": x, **{name: value.detach() for name, value in answers.items()}}
    return {
        "train": {name: rows[:512] for name, rows in samples.items()},
        "test": {name: rows[512:] for name, rows in samples.items()},
    }


def forward(model, batch):
    with torch.enable_grad():  # in evaluation too
        x = batch["x"].detach().requires_grad_()
        energy = model(x)
        slope = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
    return {"energy": energy, "forces": -slope}


def loss(output, batch):
    return {name: F.mse_loss(made, batch[name].to(made)) for name, made in output.items()}


def metrics():
    return {"force_error": ForceError()}


def quantities():
    """The energy and the forces beside the exact ones."""

    def named(name):
        return lambda model, batch: forward(model, batch)[name], lambda batch: batch[name]

    return {name: named(name) for name in ("energy", "forces")}
