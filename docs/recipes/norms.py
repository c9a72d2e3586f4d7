"""MNIST with pixels from 0 to 255, and a normalization whose squares overflow float16."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from mprun import Recipe
from mprun.train.data import DataRequest, Splits, image_splits


class RmsNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        power = x * x
        return x / (power.mean(-1, keepdim=True) + 1e-6).sqrt()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm1, self.fc2 = nn.Linear(784, 256), RmsNorm(), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.relu(self.norm1(self.fc1(x))))
        return output


@dataclass(frozen=True)
class Norms(Recipe):
    def model(self) -> nn.Module:
        return Layers()

    def data(self, request: DataRequest) -> Splits:
        return image_splits("MNIST", request)

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1).float()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])

    def correct(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return output.argmax(1).eq(batch[1]).sum()
