"""Images in folders, one folder for each class, as torchvision's `ImageFolder` reads them.

    folder/train/CLASS/*.jpg    folder/val/CLASS/*.jpg    folder/test/CLASS/*.jpg (optional)

or only folder/CLASS/*.jpg, of which a part is held out for validation. Images are resized so that
their shorter side is the wanted one, cropped in the middle, and stay bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mprun.errors import UsageError
from mprun.train.data.recipe_parts import as_splits
from mprun.train.data.sources import DataRequest, Splits

PARTS = {"train": "train", "validation": "val", "test": "test"}
# Folders of parts by other names, or without `train`; as classes they would train nonsense
NO_CLASSES = {"training", "val", "valid", "validation", "test", "testing"}


def folder_splits(folder: str, image_size: int, request: DataRequest) -> Splits:
    """The images as bytes [3, image_size, image_size], and their class indices.

    Raises:
        UsageError: the folder has no images in folders of classes, or its parts differ in classes.
    """
    from torchvision import transforms

    # no augmentation, so that runs of different precisions see the same samples
    steps = [transforms.Resize(image_size), transforms.CenterCrop(image_size)]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])
    sets = {name: _images(path, transform) for name, path in _parts(Path(folder)).items()}
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
    try:
        classes = list(find_classes(str(path))[0])
    except OSError as error:
        raise _refused(path, error) from None
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


def _images(path: Path, transform: Any) -> Any:
    from torchvision.datasets import ImageFolder

    try:
        return ImageFolder(str(path), transform, loader=_image)
    except OSError as error:  # it names what is missing: the folder, classes, images of a class
        raise _refused(path, error) from None


def _image(path: str) -> Any:
    """An image as RGB; raises `UsageError` for a file that is none."""
    from torchvision.datasets.folder import pil_loader

    try:
        return pil_loader(path)
    except (OSError, SyntaxError) as error:  # the latter: a damaged PNG
        raise UsageError(
            f"the image {path} cannot be read ({error}); replace or delete it"
        ) from None


def _refused(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path} lacks images in folders of classes; legal is FOLDER/CLASS/*.jpg, or "
        "FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg, with an image in each CLASS; "
        f"torchvision says: {error}"
    )
