"""resnet and torchvision_model: classifiers by name, on FashionMNIST or on folders of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.recipes.resnet import ResNet
from mprun.recipes.torchvision_model import TorchvisionModel
from mprun.records.run_record import read_lines, read_summary
from mprun.train.data import DataRequest
from mprun.train.data.loader_sets import LoadedSet

pytestmark = pytest.mark.usefixtures("native_is_fast")

COLOURS = {"blue": (20, 30, 200), "green": (30, 200, 20), "red": (200, 20, 30)}


def images(folder: Path, classes: tuple[str, ...] = tuple(COLOURS), count: int = 8) -> Path:
    """A folder for each class, with images of its colour, each a little different."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for n in range(count):
            colour = tuple(min(255, value + 3 * n) for value in COLOURS[name])
            Image.new("RGB", (48, 40), colour).save(folder / name / f"{n}.png")
    return folder


def resnet(**changes: Any) -> ResNet:
    return ResNet(**{"name": "resnet18", "image_size": None, "folder": None, **changes})


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "millions"), [("resnet18", 11.18), ("resnet50", 23.53)])
def test_a_resnet_by_name(name: str, millions: float) -> None:
    model = resnet(name=name).model()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions
    assert model.eval()(torch.zeros(2, 3, 28, 28)).shape == (2, 10)


@pytest.mark.representative("googlenet-64", "squeezenet1_1-28")
@pytest.mark.parametrize(
    ("name", "size"),
    [("mobilenet_v3_small", 28), ("vit_b_32", 32), ("googlenet", 64), ("squeezenet1_1", 28)],
)
def test_other_classifiers_have_one_output(name: str, size: int) -> None:
    model = TorchvisionModel(name, size, None).model()
    assert model.train()(torch.randn(2, 3, size, size)).shape == (2, 10)


def test_names_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"resnet18 or resnet50.*torchvision_model takes any other$"
    ):
        resnet(name="resnet34")
    with pytest.raises(ValueError, match=r"torchvision.models.*did you mean 'vgg16'"):
        TorchvisionModel("vg16", None, None)
    with pytest.raises(ValueError, match="a classifier"):
        TorchvisionModel("maskrcnn_resnet50_fpn", None, None)
    with pytest.raises(ValueError, match="image_size=0: legal is 1 or more"):
        resnet(image_size=0)


@pytest.mark.parametrize(
    ("name", "side"), [("vit_b_16", 32), ("vgg11", 32), ("inception_v3", 75), ("resnet18", 28)]
)
def test_the_side_is_one_that_the_model_takes(name: str, side: int) -> None:
    recipe = TorchvisionModel(name, None, None)
    assert recipe.side == side
    assert recipe.prepare(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape[2:] == (side, side)


@pytest.mark.parametrize(
    ("name", "size", "legal"),
    [
        ("vit_b_16", 40, "a multiple of 16"),
        ("maxvit_t", 64, "a multiple of 224"),
    ],
)
def test_a_side_that_the_model_cannot_take_is_refused(name: str, size: int, legal: str) -> None:
    with pytest.raises(ValueError, match=f"image_size={size}: legal with {name} is {legal}"):
        TorchvisionModel(name, size, None)


# ---- images --------------------------------------------------------------------------------------


def test_grey_images_are_normalised_and_repeated() -> None:
    grey = torch.randint(0, 256, (4, 1, 28, 28), dtype=torch.uint8)
    found = resnet().prepare(grey)
    assert found.shape == (4, 3, 28, 28)
    expected = (grey.double() / 255 - 0.2860) / 0.3530
    for channel in range(3):  # float32 against float64: a few roundings
        torch.testing.assert_close(
            found[:, channel : channel + 1].double(), expected, rtol=1e-5, atol=1e-6
        )


def test_a_folder_with_its_own_validation(tmp_path: Path) -> None:
    images(tmp_path / "train")
    images(tmp_path / "val", count=2)
    recipe = resnet(folder=str(tmp_path), image_size=32)
    assert recipe.model().fc.out_features == 3  # type: ignore[union-attr]
    splits = recipe.data(DataRequest(validation_fraction=0.1))
    assert (splits.train.samples, splits.validation.samples, splits.test.samples) == (24, 6, 0)
    assert (splits.name, splits.source, splits.notice) == (tmp_path.name, "local", None)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    recipe = resnet(folder=str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"lacks images in folders of classes; legal is FOL"):
        recipe.data(DataRequest())


def test_a_damaged_image_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    png = images(Path("photos")) / "red" / "3.png"
    png.write_bytes(png.read_bytes()[:60])
    words = ["recipe=resnet", "recipe.model.folder=photos", "recipe.model.image_size=32"]
    assert main([*words, "train.max_steps=3", "train.batch_size=24"]) != 0
    assert "the image photos/red/3.png cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "I;16"])
def test_images_of_any_kind_become_rgb(mode: str, tmp_path: Path) -> None:
    for name in images(tmp_path / "all").glob("*/*.png"):
        Image.new(mode, (40, 48)).save(name)
    train = resnet(folder=str(tmp_path / "all"), image_size=32).data(DataRequest()).train
    assert isinstance(train, LoadedSet)
    assert train.example(4)[0].shape == (4, 3, 32, 32)


def test_a_folder_of_images_trains() -> None:
    images(Path("photos/train"), count=16)
    images(Path("photos/val"), count=4)
    words = ["recipe=resnet", "recipe.model.folder=photos", "recipe.model.image_size=32"]
    words += ["train.max_steps=8", "train.batch_size=12", "run.dir=run"]
    assert main(words) == 0
    summary = read_summary(Path("run"))
    assert (summary.data.name, summary.data.train_samples) == ("photos", 48)
    losses = [x["loss"] for x in read_lines(Path("run")) if x["kind"] == "step"]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), "the colours tell the classes apart"


# ---- modes ---------------------------------------------------------------------------------------


def test_habanas_lists_cast_convolutions_and_not_the_loss() -> None:
    words = ["trace", "recipe=resnet", "op_lists=hmp_resnet50", "data.source=generated"]
    assert main([*words, "train.batch_size=2", "run.dir=run"]) == 0
    rows = json.loads(Path("run/trace.json").read_text(encoding="utf-8"))["rows"]
    found = {row["op"]: (row["rule"], {*row["dtypes_out"]}) for row in rows}
    read = {row["op"]: {*row["dtypes_in"]} for row in rows}
    assert found["conv2d"] == ("listed lower", {"bfloat16"})
    assert found["batch_norm"][0] == "first input"
    assert read["batch_norm"] == {"bfloat16", "float32"}, "statistics stay in float32"
    assert found["nll_loss_backward"][1] == {"float32"}
