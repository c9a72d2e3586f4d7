"""Segmentation: a torchvision network with a dictionary of outputs, on generated shapes.

mprun recipe=examples/segmentation.py precision=bf16_mixed
"""

import torch
import torch.nn.functional as F
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

DEFAULTS = {"train.batch_size": 4, "train.max_steps": 20, "train.lr": 1e-3}
METRIC = ("pixel_accuracy", "max")


class PixelAccuracy:
    """The share of pixels with the right class."""

    def __init__(self):
        self.right = self.pixels = 0

    def update(self, output, batch):
        self.right += (output["out"].argmax(1) == batch[1]).sum().item()
        self.pixels += batch[1].numel()

    def compute(self):
        return self.right / self.pixels


def model():
    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)


def data():
    """Noise [3, 64, 64] with a brighter rectangle, which is the second class."""
    images, masks = torch.randn(48, 3, 64, 64), torch.zeros(48, 64, 64, dtype=torch.long)
    for image, mask in zip(images, masks, strict=True):
        (top, left), (height, width) = torch.randint(0, 32, (2,)), torch.randint(16, 32, (2,))
        mask[top : top + height, left : left + width] = 1
        image += 2 * mask
    return {"train": (images[:40], masks[:40]), "validation": (images[40:], masks[40:])}


def loss(output, batch):
    return F.cross_entropy(output["out"], batch[1])


def metrics():
    return {"pixel_accuracy": PixelAccuracy()}
