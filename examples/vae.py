"""A variational autoencoder: one input, no target, and a loss of two named parts.

Source of the loss: Kingma and Welling, "Auto-Encoding Variational Bayes", 2013.

mprun recipe=examples/vae.py precision=bf16_mixed
"""

import torch
import torch.nn.functional as F
from torch import nn

DEFAULTS = {"train.batch_size": 16, "train.max_steps": 60, "train.lr": 3e-3}
METRIC = ("loss", "min")


class Vae(nn.Module):
    def __init__(self, width=64, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 48), nn.ReLU(), nn.Linear(48, width))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * torch.exp(log_variance / 2)
        return self.decoder(drawn), mean, log_variance


def model():
    return Vae()


def data():
    """Sums of two waves [64] with phases of their own."""
    phases, t = torch.rand(400, 2, 1) * 6.28, torch.linspace(0, 6.28, 64)
    waves = (torch.sin(t + phases[:, 0]) + torch.sin(3 * t + phases[:, 1])) / 2
    return {"train": (waves[:320],), "validation": (waves[320:],)}


def loss(output, batch):
    reconstruction, mean, log_variance = output
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return {
        "reconstruction": F.mse_loss(reconstruction, batch[0]),
        "divergence": 1e-3 * divergence.mean(),
    }
