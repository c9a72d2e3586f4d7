"""Labels beside points, without overlap.

Points of equivalent modes lie close together. For each label, places are tried around its point,
first near and then farther out, and at last on a grid over the drawing. The label takes the place
that covers least. A line connects a distant label with its point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

DISTANCES = (7.0, 16.0, 28.0, 42.0, 60.0, 82.0, 110.0)
ANGLES = (0, 180, 45, 315, 135, 225, 90, 270, 20, 340, 160, 200, 67, 113, 247, 293)
"""In the order tried: to the right first."""


class Box(NamedTuple):
    """A rectangle in points, y upwards."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: Box) -> float:
        """The area both cover."""
        wide = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        high = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return max(0.0, wide) * max(0.0, high)

    def inside(self, other: Box) -> bool:
        """Whether it lies completely inside `other`."""
        return (
            self.x >= other.x
            and self.y >= other.y
            and self.x + self.width <= other.x + other.width
            and self.y + self.height <= other.y + other.height
        )


class Placed(NamedTuple):
    """The place of a label, and whether it needs a line to its point."""

    box: Box
    is_far: bool


def place(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    obstacles: Sequence[Box],
    bounds: Box,
) -> list[Placed]:
    """A place for each label.

    Args:
        points: the labelled points.
        sizes: width and height of each label.
        obstacles: boxes that should not be covered; labels cover each other only without room.
        bounds: all labels lie inside this box.
    """
    placed: list[Placed] = []
    for point, size in zip(points, sizes, strict=True):
        taken = [p.box for p in placed]
        best, least = Placed(Box(*point, *size), False), math.inf
        for candidate, reach in _candidates(point, size, bounds):
            if not candidate.inside(bounds):
                continue
            covered = 8 * sum(candidate.overlap(box) for box in obstacles)
            cost = reach + covered + 1e3 * sum(candidate.overlap(box) for box in taken)
            if cost < least:
                best, least = Placed(candidate, reach > DISTANCES[1]), cost
            if cost == reach:  # it covers nothing, and the next places are farther off
                break
        placed.append(best)
    return placed


def _candidates(
    point: tuple[float, float], size: tuple[float, float], bounds: Box
) -> Iterator[tuple[Box, float]]:
    """Boxes around the point with their distance, then a grid over everything."""
    (x, y), (width, height) = point, size
    for distance in DISTANCES:
        for angle in ANGLES:
            dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            # the box touches the circle of this distance with the side that faces the point
            left = x + distance * dx + width * (dx - 1) / 2
            yield Box(left, y + distance * dy + height * (dy - 1) / 2, width, height), distance
    rows, columns = int(bounds.height // height), int(bounds.width // width)
    for row in range(rows):
        for column in range(columns):
            box = Box(bounds.x + column * width, bounds.y + row * height, width, height)
            yield box, math.dist(point, (box.x + width / 2, box.y + height / 2))
