"""Metrics by name, under their public name: `mprun.metrics.F1("macro")`; see `train/metrics/`."""

from mprun.train.metrics import (
    F1,
    SHIPPED,
    Accuracy,
    MeanAbsoluteError,
    Perplexity,
    SummedMetric,
)

__all__ = ["F1", "SHIPPED", "Accuracy", "MeanAbsoluteError", "Perplexity", "SummedMetric"]
