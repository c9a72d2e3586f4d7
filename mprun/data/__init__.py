"""Data sets as tensors: where they come from, and how batches are made of them.

`image_files.py` checks the published files; `sources.py` locates, downloads and reads them;
`generated.py` draws a set as a substitute; `batches.py` has decoded samples in memory and batches
them there.
"""

from mprun.data.batches import (
    Batch,
    Batches,
    BatchForm,
    MicroBatch,
    Order,
    TensorBatches,
    TensorSet,
)
from mprun.data.sources import DataRequest, Splits, image_sample, image_splits

__all__ = [
    "Batch",
    "BatchForm",
    "Batches",
    "DataRequest",
    "MicroBatch",
    "Order",
    "Splits",
    "TensorBatches",
    "TensorSet",
    "image_sample",
    "image_splits",
]
