"""A set of ten glyph classes drawn from a seed, for machines without data or network.

Each class is a glyph of a few strokes. A sample is its class's glyph under a random rotation,
scale, shear, shift and stroke width, with the strokes' ends wobbling, dimmed and with noise: enough
variation that a model has to learn, little enough that the recipes reach over 90 %. The shape is
MNIST's: 60,000 + 10,000 images of 28x28 bytes.

How one is drawn: the brightness of a pixel is a soft step of its distance to the nearest stroke.
For the segment from a to b and a pixel p, with t = clamp((p - a).(b - a) / |b - a|^2, 0, 1), the
distance is |p - (a + t (b - a))|. The random transform moves the strokes' ends, so widths stay
round.

Its purpose is to show that a run works. Accuracies on it are not those of MNIST, and every place
that shows one is labelled "generated".
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mprun.data.batches import TensorSet

SEED = 20_240_229
TRAIN_SAMPLES = 60_000
TEST_SAMPLES = 10_000
SIDE = 28
CHUNK = 2_000  # samples drawn at once: some 30 MB of distances

# Strokes (x0, y0, x1, y1) in a frame from -1 to 1; y points down.
GLYPHS: tuple[tuple[tuple[float, float, float, float], ...], ...] = (
    (
        (-0.6, -0.8, 0.6, -0.8),
        (0.6, -0.8, 0.6, 0.8),
        (0.6, 0.8, -0.6, 0.8),
        (-0.6, 0.8, -0.6, -0.8),
    ),
    ((0.0, -0.9, 0.0, 0.9), (-0.4, -0.5, 0.0, -0.9)),
    ((-0.6, -0.8, 0.6, -0.8), (0.6, -0.8, -0.6, 0.8), (-0.6, 0.8, 0.6, 0.8)),
    ((-0.7, -0.7, 0.7, 0.7), (-0.7, 0.7, 0.7, -0.7)),
    ((-0.6, -0.8, -0.6, 0.1), (-0.6, 0.1, 0.6, 0.1), (0.5, -0.8, 0.5, 0.8)),
    ((-0.8, 0.0, 0.8, 0.0), (0.0, -0.8, 0.0, 0.8)),
    ((0.0, -0.9, -0.8, 0.7), (-0.8, 0.7, 0.8, 0.7), (0.8, 0.7, 0.0, -0.9)),
    ((-0.7, -0.8, 0.7, -0.8), (0.0, -0.8, 0.0, 0.9)),
    ((-0.6, -0.9, -0.6, 0.9), (0.6, -0.9, 0.6, 0.9), (-0.6, 0.0, 0.6, 0.0)),
    ((-0.8, -0.8, 0.0, 0.8), (0.0, 0.8, 0.8, -0.8)),
)


@cache
def draw() -> tuple[TensorSet, TensorSet]:
    """The training and the test part: images [N, 1, 28, 28] of bytes, classes [N] (int64)."""
    generator = torch.Generator().manual_seed(SEED)
    train, test = (_draw_part(n, generator) for n in (TRAIN_SAMPLES, TEST_SAMPLES))
    return train, test


def _draw_part(samples: int, generator: torch.Generator) -> TensorSet:
    classes = torch.randint(0, len(GLYPHS), (samples,), generator=generator)
    images = torch.empty(samples, 1, SIDE, SIDE, dtype=torch.uint8)
    strokes, used = _glyph_table()
    for start in range(0, samples, CHUNK):
        part = classes[start : start + CHUNK]
        images[start : start + CHUNK, 0] = _draw_chunk(strokes[part], used[part], generator)
    return TensorSet(images, classes)


def _glyph_table() -> tuple[Tensor, Tensor]:
    """Strokes padded to one length [10, S, 2 ends, 2], and which of them are real [10, S]."""
    most = max(len(g) for g in GLYPHS)
    strokes = torch.zeros(len(GLYPHS), most, 2, 2)
    used = torch.zeros(len(GLYPHS), most, dtype=torch.bool)
    for i, glyph in enumerate(GLYPHS):
        strokes[i, : len(glyph)] = torch.tensor(glyph).view(-1, 2, 2)
        used[i, : len(glyph)] = True
    return strokes, used


def _draw_chunk(strokes: Tensor, used: Tensor, generator: torch.Generator) -> Tensor:
    """Images [B, 28, 28] of bytes from strokes [B, S, 2, 2] and their mask [B, S]."""
    n = len(strokes)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(n, *shape, generator=generator) * (high - low) + low

    angle, shear = uniform(-0.25, 0.25), uniform(-0.2, 0.2)
    scale_x, scale_y = uniform(0.5, 0.8), uniform(0.5, 0.8)
    cos, sin = angle.cos(), angle.sin()
    column_x = torch.stack([cos, sin], dim=1) * scale_x[:, None]
    column_y = torch.stack([shear * cos - sin, shear * sin + cos], dim=1) * scale_y[:, None]
    transform = torch.stack([column_x, column_y], dim=2).unsqueeze(1)
    ends = (strokes + uniform(-0.12, 0.12, *strokes.shape[1:])) @ transform.mT
    ends = ends + uniform(-0.12, 0.12, 1, 1, 2)

    distance = _distance(ends[:, :, 0], ends[:, :, 1])
    distance = distance.masked_fill(~used[:, :, None], torch.inf).amin(1)
    width = uniform(0.05, 0.13, 1)
    ink = torch.sigmoid((width - distance) * 30) * uniform(0.6, 1.0, 1)
    noise = torch.randn(n, SIDE * SIDE, generator=generator) * uniform(0.0, 0.12, 1)
    return ((ink + noise).clamp(0, 1) * 255).to(torch.uint8).view(n, SIDE, SIDE)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Distance [B, S, 784] of each pixel's centre to the segments from a to b [B, S, 2]."""
    axis = (torch.arange(SIDE) + 0.5) * (2 / SIDE) - 1
    x, y = axis.repeat(SIDE), axis.repeat_interleave(SIDE)
    (ax, ay), (dx, dy) = a.unsqueeze(-1).unbind(2), (b - a).unsqueeze(-1).unbind(2)
    length = (dx.square() + dy.square()).clamp_min(1e-6)
    t = (((x - ax) * dx + (y - ay) * dy) / length).clamp(0, 1)
    return torch.hypot(x - ax - t * dx, y - ay - t * dy)
