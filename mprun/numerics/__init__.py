"""Looking at the numerics of a step: what is alive, what is computed, in which dtype."""

from mprun.numerics.collect import Statistics, statistics

__all__ = ["Statistics", "statistics"]
