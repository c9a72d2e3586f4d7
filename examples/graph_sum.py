"""A graph network that learns two steps of diffusion, where some nodes have 639 neighbours.

Each node's value moves towards the mean of its neighbours, twice; the exact answer takes two lines.
Diffusion is linear, and so is the network: it can be exact. The hard part is the sum: `index_add_`
adds messages one by one in their own dtype. In bfloat16 a sum of ones stops at 256, as 256 + 1
rounds to 256, in float16 at 2048, in float32 at 16 million. The exact formula in bfloat16 is wrong
by 15 % at the hubs and 2 % over all nodes, so a mean over nodes hides it. On a GPU the order of the
messages, and so the last digits, may differ between runs.

mprun recipe=examples/graph_sum.py precision=fp64
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

DEFAULTS = {
    "train.batch_size": 2,
    "train.max_steps": 600,
    "train.lr": 3e-2,
    "train.scheduler": "cosine",
}
METRIC = ("error", "min")
NODES, HUBS, RATE = 640, 4, 0.5


def edges():
    """Source and target [E] of each edge: a few hubs are tied to all nodes, the rest at random."""
    drawn = torch.Generator().manual_seed(0)
    tied = torch.rand(NODES, NODES, generator=drawn) < 4 / NODES
    tied[:HUBS] = True
    tied = (tied | tied.T).fill_diagonal_(False)
    return tied.nonzero().T


class RelativeError:
    """|value - exact| / |exact| over all nodes, in the 2-norm."""

    wrong = size = 0.0

    def update(self, output, batch):
        exact = batch[1].double()
        self.wrong += (output.double() - exact).square().sum().item()
        self.size += exact.square().sum().item()

    def compute(self):
        return math.sqrt(self.wrong / self.size)


def mean_of_neighbours(values, source, target):
    """The mean [B, NODES, C] of what each node's neighbours have."""
    total = torch.zeros_like(values).index_add_(1, target, values[:, source])
    return total / torch.bincount(target, minlength=NODES)[:, None].to(values.dtype)


def diffused(values, source, target):
    """The exact answer: two steps of diffusion."""
    for _ in range(2):
        values = values + RATE * (mean_of_neighbours(values, source, target) - values)
    return values


class Diffusion(nn.Module):
    """Two rounds of messages, each with weights for a node itself and for its neighbours."""

    def __init__(self, width=4):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(1, width), nn.Linear(width, 1)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.neighbours = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        for name, index in zip(("source", "target"), edges(), strict=True):
            self.register_buffer(name, index)

    def forward(self, values):
        hidden = self.encoder(values)
        for own, neighbours in zip(self.own, self.neighbours, strict=True):
            messages = mean_of_neighbours(neighbours(hidden), self.source, self.target)
            hidden = hidden + own(hidden) + messages
        return self.decoder(hidden)


def model():
    return Diffusion()


def data():
    """Temperatures [640, 1] between 0 and 2, and those after two steps, in float64."""
    values = 2 * torch.rand(160, NODES, 1, dtype=torch.float64)
    answers = diffused(values, *edges())
    return {"train": (values[:128], answers[:128]), "test": (values[128:], answers[128:])}


def loss(output, batch):
    return F.mse_loss(output, batch[1].to(output))


def metrics():
    return {"error": RelativeError()}


def quantities():
    """The values of the hubs beside the exact ones: they have the longest sums."""
    return {
        "hubs": (lambda model, batch: model(batch[0])[:, :HUBS], lambda batch: batch[1][:, :HUBS])
    }
