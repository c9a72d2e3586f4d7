"""A torchvision detector: lists of images and of targets, losses in training only, its own metric.

mprun recipe=examples/detector.py precision=bf16_mixed
"""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou

DEFAULTS = {
    "train.max_steps": 12,
    "train.lr": 2e-3,
    "precision.layers": {"head": "fp32"},  # boxes; torchvision selects them in float32 alone
}
METRIC = ("best_iou", "max")


class BestIou:
    """The mean overlap of each true box with the best box of its image, in evaluation."""

    def __init__(self):
        self.overlaps = []

    def update(self, output, batch):
        boxes = [] if isinstance(output, dict) else zip(output, batch[1], strict=True)
        for made, target in boxes:  # in training the output is the losses
            overlaps = box_iou(made["boxes"].float(), target["boxes"])
            self.overlaps.append(overlaps.max().item() if overlaps.numel() else 0.0)

    def compute(self):
        return sum(self.overlaps) / len(self.overlaps) if self.overlaps else None


def model():
    layers = [nn.Conv2d(3, 32, 3, 4, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU()]
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 32
    anchors = AnchorGenerator(((8,),), ((1.0,),))
    return FCOS(backbone, 2, min_size=64, max_size=64, anchor_generator=anchors)


def data():
    """Noise [3, 64, 64] with a brighter square."""
    samples = []
    for left, top in torch.randint(0, 40, (24, 2)).tolist():
        image, box = 0.1 * torch.rand(3, 64, 64), [left, top, left + 20, top + 20]
        image[:, top : top + 20, left : left + 20] += 0.8
        boxes = torch.tensor([box], dtype=torch.float32)
        samples.append((image, {"boxes": boxes, "labels": torch.tensor([1])}))

    def loader(part, shuffle):
        return DataLoader(
            part, 2, shuffle, collate_fn=lambda batch: tuple(zip(*batch, strict=True))
        )

    return {"train": loader(samples[:20], True), "validation": loader(samples[20:], False)}


def forward(model, batch):
    images, targets = map(list, batch)
    return model(images, targets) if model.training else model(images)


def loss(output, batch):
    return output if isinstance(output, dict) else None  # none in evaluation


def metrics():
    return {"best_iou": BestIou()}
