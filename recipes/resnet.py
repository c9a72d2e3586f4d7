"""torchvision's ResNet-18 and ResNet-50, on FashionMNIST or on your images.

The stem halves the side twice before the first block, so FashionMNIST's 28x28 pixels are 7x7 there
and 1x1 at the end: small, and fast on a CPU. SGD with momentum 0.9, weight decay 5e-4 and a cosine
from 0.01 to 0, batches of 64, ten epochs. Zalando's table of FashionMNIST has a ResNet-18 at 0.949
on the test set, with random flips, translations and rotations of the images; there are none here.

`op_lists=hmp_resnet50` takes Habana's lists for its ResNet-50 example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .torchvision_model import TorchvisionModel


@dataclass(frozen=True)
class ResNet(TorchvisionModel):
    """ResNet-18 or ResNet-50."""

    NAMES: ClassVar[tuple[str, ...]] = ("resnet18", "resnet50")

    def _legal_names(self) -> str:
        return "resnet18 or resnet50; recipe=torchvision_model takes any other"
