"""Data sets as tensors: where they come from, and how batches are made of them.

`files.py` knows the published files and checks them; `sources.py` finds, downloads and reads them;
`generated.py` draws a set where there are none; `batches.py` holds decoded samples in memory and
batches them there.
"""

from mprun.data.batches import Batch, Batches, Order, TensorSet
from mprun.data.sources import DataRequest, Splits, image_sample, image_splits

__all__ = [
    "Batch",
    "Batches",
    "DataRequest",
    "Order",
    "Splits",
    "TensorSet",
    "image_sample",
    "image_splits",
]
