"""Data sets as tensors: where they come from, and how batches are made of them.

`sources.py` checks, downloads and reads the published files, or draws a set in their place;
`text.py` cuts a text into windows; `recipe_parts.py` takes what a recipe gives, and folders of
images; `batches.py` has decoded samples in memory and batches them there; `loader_sets.py` reads
samples one by one, by PyTorch's loader, with random numbers of their own (`random_numbers.py`).
"""

from mprun.train.data.batches import (
    Batch,
    Batches,
    BatchForm,
    MicroBatch,
    Order,
    TensorBatches,
    TensorOrder,
    TensorSet,
)
from mprun.train.data.loader_sets import LoadedSet, LoaderBatches, LoaderOrder, loaded_set
from mprun.train.data.sources import DataRequest, Splits, image_sample, image_splits

__all__ = [
    "Batch",
    "BatchForm",
    "Batches",
    "DataRequest",
    "LoadedSet",
    "LoaderBatches",
    "LoaderOrder",
    "MicroBatch",
    "Order",
    "Splits",
    "TensorBatches",
    "TensorOrder",
    "TensorSet",
    "image_sample",
    "image_splits",
    "loaded_set",
]
