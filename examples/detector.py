"""A torchvision detector of bright squares: lists of images and targets, no loss in evaluation.

mprun recipe=examples/detector.py precision=bf16_mixed
"""

import torch
from torch.utils.data import DataLoader
from torchvision.models.detection import FCOS, anchor_utils
from torchvision.ops import box_iou

DEFAULTS = {"train.max_steps": 12}
METRIC = ("best_iou", "max")


class BestIou:
    """The mean overlap of each true box with the best box of its image, in evaluation."""

    total = boxes = 0

    def update(self, output, batch):
        if isinstance(output, list):  # in training it is a dictionary of losses
            for made, target in zip(output, batch[1], strict=True):
                overlaps = box_iou(made["boxes"].float(), target["boxes"]).flatten().tolist()
                self.total, self.boxes = self.total + max(overlaps, default=0), self.boxes + 1

    def compute(self):
        return self.total / self.boxes if self.boxes else None


def model():
    backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 7, 8, 3), torch.nn.ReLU())
    backbone.out_channels = 32
    anchors = anchor_utils.AnchorGenerator(((8,),), ((1.0,),))
    network = FCOS(backbone, 2, min_size=64, max_size=64, anchor_generator=anchors)
    # torchvision selects boxes in float32 and float16 alone
    network.head.register_forward_hook(lambda head, x, out: {k: v.float() for k, v in out.items()})
    return network


def data():
    images, samples = 0.1 * torch.rand(24, 3, 64, 64), []
    for image, (left, top) in zip(images, torch.randint(0, 40, (24, 2)).tolist(), strict=True):
        image[:, top : top + 20, left : left + 20] += 0.8
        box = torch.tensor([[left, top, left + 20, top + 20]])
        samples.append((image, {"boxes": box, "labels": torch.tensor([1])}))
    options = {"batch_size": 2, "collate_fn": lambda x: tuple(zip(*x, strict=True))}
    return DataLoader(samples[:20], shuffle=True, **options), DataLoader(samples[20:], **options)


def forward(model, batch):
    return model(*batch) if model.training else model(batch[0])


def metrics():
    return {"best_iou": BestIou()}


def loss(output, batch):
    return output if isinstance(output, dict) else None  # no loss in evaluation
