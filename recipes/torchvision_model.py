"""Any classifier of torchvision by name, with random weights, on FashionMNIST or your images.

FashionMNIST's 28x28 images are repeated in three channels; `recipe.model.folder=PATH` takes images
in folders of classes instead. Both are normalised by their usual means and deviations. The weights
are torchvision's random ones; `train.init_from` takes others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from mprun.errors import hint
from mprun.recipe import Classification
from mprun.train.data import DataRequest, Splits, TensorSet, image_sample, image_splits
from mprun.train.data.recipe_parts import class_names, folder_splits

CLASSIFIERS = tuple(models.list_models(module=models))
FASHION_CLASSES, FASHION_SIZE = 10, 28
FASHION = (0.2860, 0.3530)
"""Mean and deviation of the training images' pixels, from 0 to 1."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
FOLDER_SIZE = 224
MAXVIT_STEP = 224
"""A MaxViT halves the side five times, and its windows are 7 wide."""
ONE_OUTPUT = {"aux_logits": False, "init_weights": False}
"""Without the second classifier of training; its weights would take minutes to draw."""


@dataclass(frozen=True)
class TorchvisionModel(Classification):
    """A classifier of torchvision."""

    name: str
    """Name in torchvision.models: mobilenet_v3_small, vit_b_16, ..."""
    image_size: int | None
    """Side of the images in pixels; null: 28 for FashionMNIST, 224 for a folder, or the next that
    the model takes."""
    folder: str | None
    """Folder of train/CLASS/*.jpg and val/CLASS/*.jpg, or of CLASS/*.jpg; null: FashionMNIST."""

    NAMES: ClassVar[tuple[str, ...]] = CLASSIFIERS
    draws_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.name not in self.NAMES:
            near = "" if self.name in CLASSIFIERS else hint(self.name, self.NAMES)
            raise ValueError(f"name={self.name}: legal is {self._legal_names()}{near}")
        if self.image_size is not None and self.image_size < 1:
            raise ValueError(f"image_size={self.image_size}: legal is 1 or more")
        if self.image_size not in (None, self.side):
            least, step = self._sides()
            legal = f"a multiple of {step}" if step > 1 else f"{least} or more"
            raise ValueError(f"image_size={self.image_size}: legal with {self.name} is {legal}")

    def _legal_names(self) -> str:
        return "a classifier of torchvision.models"

    @property
    def side(self) -> int:
        """Side of the model's images in pixels: what is asked for, or the next legal one."""
        default = FASHION_SIZE if self.folder is None else FOLDER_SIZE
        least, step = self._sides()
        wanted = max(least, default if self.image_size is None else self.image_size)
        return -(-wanted // step) * step

    def _sides(self) -> tuple[int, int]:
        """The least side that the model takes, and the step from one to the next."""
        if self.name.startswith("vit_"):
            patch = int(self.name.rpartition("_")[2])
            return patch, patch
        if self.name.startswith("maxvit_"):
            return MAXVIT_STEP, MAXVIT_STEP
        if self.name.startswith("swin_"):
            return 1, 1
        least: int = models.get_model_weights(self.name).DEFAULT.meta["min_size"][0]
        return least, 1

    def model(self) -> nn.Module:
        classes = FASHION_CLASSES if self.folder is None else len(class_names(self.folder))
        arguments: dict[str, Any] = {"num_classes": classes}
        if self.name in ("googlenet", "inception_v3"):
            arguments |= ONE_OUTPUT
        elif self.name.startswith("vit_"):
            arguments["image_size"] = self.side
        elif self.name.startswith("maxvit_"):
            arguments["input_size"] = (self.side, self.side)
        model: nn.Module = models.get_model(self.name, weights=None, **arguments)
        return model

    def data(self, request: DataRequest) -> Splits:
        if self.folder is None:
            return image_splits("FashionMNIST", request)
        return folder_splits(self.folder, self.side, request)

    def sample(self) -> TensorSet:
        if self.folder is None:
            return image_sample()
        images = torch.empty(1, 3, self.side, self.side, dtype=torch.uint8)
        return TensorSet(images, torch.empty(1, dtype=torch.int64))

    def prepare(self, inputs: Tensor) -> Tensor:
        """[B, 1 or 3, H, W] of bytes to [B, 3, S, S], normalised."""
        pixels = inputs.float() / 255
        if inputs.shape[-1] != self.side:
            size = (self.side, self.side)
            pixels = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        if inputs.shape[1] == 1:
            return ((pixels - FASHION[0]) / FASHION[1]).repeat(1, 3, 1, 1)
        mean, deviation = (pixels.new_tensor(x).view(3, 1, 1) for x in IMAGENET)
        return (pixels - mean) / deviation

    def loss(self, output: Tensor, batch: tuple[Any, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])
