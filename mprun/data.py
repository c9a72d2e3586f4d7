"""Samples for recipes, by their public name: `from mprun.data import Splits`; see `train/data/`."""

from mprun.train.data import (
    Batch,
    Batches,
    BatchForm,
    DataRequest,
    LoadedSet,
    LoaderBatches,
    LoaderOrder,
    MicroBatch,
    Order,
    Splits,
    TensorBatches,
    TensorOrder,
    TensorSet,
    image_sample,
    image_splits,
    loaded_set,
)

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
