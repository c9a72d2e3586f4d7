"""Short runs that the tests of the rows share."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mprun.cli.main import main
from mprun.records.run_record import Summary, read_lines, read_summary

MNIST = [
    *("recipe=mnist", "recipe.model.units=16", "data.source=generated", "device=cpu"),
    *("data.train_limit=160", "data.eval_limit=32", "train.batch_size=32"),
    "train.eval_batch_size=32",
]
FASHION = [
    *("recipe=fashion_mnist", "recipe.model.image_size=28", "data.source=generated"),
    *("device=cpu", "data.train_limit=64", "data.eval_limit=32", "train.batch_size=8"),
]
LINEAR = [
    *("recipe=linear", "recipe.model.in_features=32", "recipe.model.out_features=8"),
    *("recipe.model.samples=16", "train.batch_size=16", "device=cpu"),
]


def run(*words: str, recipe: list[str] = MNIST, steps: int = 3, name: str = "run") -> Summary:
    """The record of a completed run of a few steps into the folder `name`."""
    given = {word.partition("=")[0] for word in words}
    base = [word for word in recipe if word.partition("=")[0] not in given]
    assert main([*base, f"train.max_steps={steps}", *words, f"run.dir={name}"]) == 0
    summary = read_summary(Path(name))
    assert summary.status == "completed"
    return summary


def weights(name: str = "run") -> dict[str, Tensor]:
    """The trained weights of a run."""
    saved = torch.load(Path(name) / "checkpoints/last.pt", weights_only=True)
    model: dict[str, Tensor] = saved["trainer"]["model"]
    return model


def losses(name: str = "run") -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in read_lines(Path(name)) if line["kind"] == "step"]


def written(*words: str, file: str, name: str = "run") -> dict[str, Any]:
    """What a command leaves in a JSON file of the folder `name`."""
    assert main([*words, f"run.dir={name}"]) == 0
    content: dict[str, Any] = json.loads((Path(name) / file).read_text(encoding="utf-8"))
    return content


def dtypes(name: str = "run") -> set[torch.dtype]:
    """The dtypes of a run's trained weights."""
    return {x.dtype for x in weights(name).values() if x.is_floating_point()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def compared(*names: str) -> tuple[str, str]:
    """The terminal's text and the page of a comparison of runs, with plain single spaces."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(["compare", "--verbose", *names, "compare.dir=report"]) == 0
    page = (Path("report") / "report.html").read_text(encoding="utf-8")
    return " ".join(shown.getvalue().split()), " ".join(page.split())


@cache
def mnist_compared() -> tuple[str, str, str]:
    """Of mnist in fp32 and bf16_mixed: the terminal's text, the page, and the file of figures."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for mode in ("fp32", "bf16_mixed"):
            words = [f"precision={mode}", "data.validation_fraction=0.2", "train.epochs=5"]
            run(*words, steps=25, name=f"outputs/{mode}")
        shown, page = compared("outputs/fp32", "outputs/bf16_mixed")
        return shown, page, Path("report/comparison.json").read_text(encoding="utf-8")


def recipes_page() -> str:
    """recipes/README.md, with plain single spaces."""
    path = Path(__file__).resolve().parents[2] / "recipes" / "README.md"
    return " ".join(path.read_text(encoding="utf-8").split())
