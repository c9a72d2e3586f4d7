"""Which modules of a model are its blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mprun.train.parallel.shards import blocks_of

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.relu(self.up(x)))
        return x + change


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, WIDTH), nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


BLOCKS = [f"blocks.{n}" for n in range(4)]


def test_blocks_are_the_repeated_modules_with_most_parameters() -> None:
    assert [path for path, _ in blocks_of(Net())] == BLOCKS
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    encoder = nn.Sequential(
        nn.Embedding(99999, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    )
    assert [path for path, _ in blocks_of(encoder)] == ["1.layers.0", "1.layers.1"]


def test_layers_are_blocks_where_nothing_else_is_repeated() -> None:
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert [path for path, _ in blocks_of(mlp)] == ["0", "2"]
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.LayerNorm(8))
    assert [path for path, _ in blocks_of(net)] == ["1", "2"]
    assert blocks_of(nn.ReLU()) == []
