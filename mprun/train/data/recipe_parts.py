"""What a recipe's `data` gives, as splits: {"train": part, "validation": part, "test": part}.

A part is a tuple or a mapping of tensors with samples along dimension 0, nested as a batch is to
be; or a data set or a `DataLoader` (`loader_sets.py`). A tuple of parts in this order may replace
the mapping. Without `validation` a tenth of the training samples is held out, unless a `DataLoader`
gives them.

`folder_splits` makes them of images in folders, one folder for each class, as torchvision's
`ImageFolder` reads them:

    folder/train/CLASS/*.jpg    folder/val/CLASS/*.jpg    folder/test/CLASS/*.jpg (optional)

or only folder/CLASS/*.jpg, of which a part is held out for validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mprun.errors import UsageError, hint
from mprun.precision.nested import leaves
from mprun.train.data.batches import TensorSet
from mprun.train.data.loader_sets import DatasetSet, LoadedSet, loaded_set
from mprun.train.data.sources import DataRequest, Splits

PARTS = {"train": "train", "validation": "val", "test": "test"}
NAMES = tuple(PARTS)
FORM = 'return {"train": (inputs, targets)}, and "validation" and "test" if there are any'
# Share of the training samples that validates where the recipe has no validation data
HELD_OUT = 0.1
NOT_VALIDATED = 'no "validation": nothing is validated; "validation": None says that it is meant so'


def as_splits(parts: Any, name: str, request: DataRequest) -> Splits:
    """The splits of what a recipe's `data` returned; the request's limits and share hold.

    The parts are by name, or in the order of `NAMES`; one that is missing or None has no samples.

    Raises:
        UsageError: it has another form; the message has the one that works.
    """
    if isinstance(parts, Splits):
        return parts
    named = _by_name(parts)
    given = {key: _as_set(part, key) for key, part in named.items() if part is not None}
    if "train" not in given:
        raise UsageError(f"data() gives no training samples; {FORM}")
    train, notice = given["train"], None
    none = train.first(0)
    validation, test = given.get("validation", none), given.get("test", none)
    if "validation" not in named:
        train, validation, notice = _held_out(train, request.validation_fraction)
    elif request.validation_fraction:
        notice = "data.validation_fraction has no effect: data() gives its own validation samples"
    return Splits(name, "recipe", train, validation, test, notice=notice).limited(request)


def _by_name(parts: Any) -> dict[str, Any]:
    """The parts by name."""
    if isinstance(parts, Mapping):
        for key in parts:
            if key not in NAMES:
                raise UsageError(
                    f"data() gives a part {key!r}; legal: {', '.join(NAMES)}"
                    f"{hint(str(key), NAMES)}; {FORM}"
                )
        return dict(parts)
    received = None
    if not isinstance(parts, tuple):
        received = "nothing" if parts is None else f"a {type(parts).__name__}"
    elif any(isinstance(part, Tensor) for part in parts):  # inputs and targets, or parts
        received = "tensors directly"
    elif not 1 <= len(parts) <= len(NAMES):
        received = f"{len(parts)} parts"
    if received is not None:
        raise UsageError(
            f"data() gives {received}; legal is a tuple of {', '.join(NAMES)}, of which the first "
            f"is needed and none is a tensor; or {FORM}"
        )
    return dict(zip(NAMES, parts, strict=False))


def _as_set(part: Any, key: str) -> TensorSet | LoadedSet:
    """A part as samples."""
    if isinstance(part, TensorSet):
        return part
    if isinstance(part, Tensor | tuple | Mapping):
        return _in_memory(part, key)
    if (loaded := loaded_set(part, key)) is not None:
        return loaded
    raise UsageError(
        f"data() gives a {type(part).__name__} as {key}; legal is a tuple or a dict of tensors, a "
        f"Dataset or a DataLoader; {FORM}"
    )


def _in_memory(content: Any, key: str) -> TensorSet:
    """Nested tensors as samples, each with as many of them."""
    sizes = set()
    for leaf in leaves(content):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            kind = "tensor without dimensions" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise UsageError(
                f"data(): {key} contains a {kind}; legal are tensors with the samples along "
                "dimension 0; torch.as_tensor(...) makes one of an array"
            )
        sizes.add(len(leaf))
    if len(sizes) != 1:
        counts = ", ".join(map(str, sorted(sizes)))
        received = f"tensors of {counts} samples" if sizes else "no tensor"
        raise UsageError(
            f"data(): {key} contains {received}; legal are tensors with equally many samples "
            f"along dimension 0; {FORM}"
        )
    return TensorSet(content)


def _held_out(
    train: TensorSet | LoadedSet, share: float
) -> tuple[TensorSet | LoadedSet, TensorSet | LoadedSet, str | None]:
    """The training samples without the held-out ones, those, and what the user has to know."""
    none = train.first(0)
    if train.samples == 0:
        return train, none, None
    if train.samples == 1:
        return train, none, f"data() gives one training sample and {NOT_VALIDATED}"
    if not isinstance(train, TensorSet | DatasetSet):
        return train, none, f"data() gives a DataLoader, which is not divided, and {NOT_VALIDATED}"
    held_out = max(1, round(train.samples * (share or HELD_OUT)))
    if held_out >= train.samples:
        raise UsageError(f"data.validation_fraction={share} leaves no training sample")
    # at random, because samples are often sorted; by a seed of its own, so that runs with any seed
    # are judged by the same samples
    order = torch.randperm(train.samples, generator=torch.Generator().manual_seed(0))
    places = (order[held_out:], order[:held_out])
    rest, out = (train.select(x.sort().values.tolist()) for x in places)
    return rest, out, None


# ---- images in folders ---------------------------------------------------------------------------

# Folders of parts by other names, or without `train`; as classes they would train nonsense
NO_CLASSES = {"training", "val", "valid", "validation", "test", "testing"}


def folder_splits(folder: str, image_size: int, request: DataRequest) -> Splits:
    """The images as bytes [3, image_size, image_size], and their class indices.

    Raises:
        UsageError: the folder has no images in folders of classes, or its parts differ in classes.
    """
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    # resized so that the shorter side is the wanted one, and no augmentation, so that runs of
    # different precisions see the same samples
    steps = [transforms.Resize(image_size), transforms.CenterCrop(image_size)]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])
    sets = {}
    for name, path in _parts(Path(folder)).items():
        with _refusals(path):
            sets[name] = ImageFolder(str(path), transform, loader=_image)
    classes = class_names(folder)
    for name, images in sets.items():
        if images.classes != classes:
            raise UsageError(
                f"{PARTS[name]} of {folder} has the classes {', '.join(images.classes)}; "
                f"legal are those of {PARTS['train']}: {', '.join(classes)}"
            )
    if "validation" in sets:  # else `as_splits` warns that a recipe's data() ignores the share
        request = replace(request, validation_fraction=0.0)
    return replace(as_splits(sets, Path(folder).name, request), source="local")


def class_names(folder: str) -> list[str]:
    """The classes: the names of the folders with images.

    Raises:
        UsageError: there are fewer than two, or they are parts of a data set, not classes.
    """
    from torchvision.datasets.folder import find_classes

    path = _parts(Path(folder))["train"]
    with _refusals(path):
        classes = list(find_classes(str(path))[0])
    if parts := [name for name in classes if name.lower() in NO_CLASSES]:
        raise UsageError(
            f"{path} has a folder {parts[0]} but none named train; legal is train, val and, if you "
            "like, test, each with a folder for each class"
        )
    if len(classes) < 2:
        raise UsageError(f"{path} has one class, {classes[0]}; legal is two or more")
    return classes


def _parts(folder: Path) -> dict[str, Path]:
    """The folders of the parts; the folder itself trains where it has no parts."""
    folder = folder.expanduser()
    if not (folder / PARTS["train"]).is_dir():
        return {"train": folder}
    named = {name: folder / part for name, part in PARTS.items()}
    return {name: path for name, path in named.items() if path.is_dir()}


def _image(path: str) -> Any:
    """An image as RGB; raises `UsageError` for a file that is none."""
    from torchvision.datasets.folder import pil_loader

    try:
        return pil_loader(path)
    except (OSError, SyntaxError) as error:  # the latter: a damaged PNG
        raise UsageError(f"the image {path} cannot be read ({error}); replace it") from None


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Inside, torchvision's error names what is missing: the folder, classes, images of a class."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} lacks images in folders of classes; legal is FOLDER/CLASS/*.jpg, or "
            "FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg, with an image in each CLASS; "
            f"torchvision says: {error}"
        ) from None
