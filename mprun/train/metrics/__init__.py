"""Metrics by name: accuracy, F1, perplexity and mean absolute error.

A metric has `update(output, batch)`, called once for each batch, and `compute()`, called at the end
of an epoch or of a data set:

    def metrics():
        return {"f1": mprun.metrics.F1("binary"), "perplexity": "perplexity"}

    METRIC = ("f1", "max")

Any object with these two methods is a metric. For one whose `update` takes something else, give a
pair `(metric, select)`: `select(output, batch)` returns the arguments of `update`. Metrics of
torchmetrics get the scores and the targets, and a `MetricCollection` is as many metrics, under its
names:

    {"auroc": torchmetrics.AUROC("multiclass", num_classes=10)}

The scores of an output are the output itself if it is a tensor, else its `logits`, its `out`, or
the first item of a tuple. The targets of a batch are the last item of a tuple, or the `labels`,
`label`, `targets`, `target` or `y` of a mapping.
"""

from mprun.train.metrics.summed import (
    F1,
    SHIPPED,
    Accuracy,
    MeanAbsoluteError,
    Perplexity,
    SummedMetric,
)

__all__ = ["F1", "SHIPPED", "Accuracy", "MeanAbsoluteError", "Perplexity", "SummedMetric"]
