"""A recipe's file as a recipe: its functions or a class in it, run once, checked."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mprun.errors import UsageError
from mprun.recipe import Recipe
from mprun.train.assemble import DataCache, recipe_loading
from mprun.train.assemble.recipe_loading import file_source, load_recipe
from mprun.train.data import DataRequest

FUNCTIONS = """
import torch
from torch import nn
def model(): return nn.Linear(2, 1)
def data():
    x = torch.rand(20, 2)
    return {"train": (x, x.sum(1, keepdim=True))}
def loss(output, batch): return (output - batch[1]).square().mean()
"""

CLASS = """
import mprun, torch
from torch import nn
class Base(mprun.Recipe):
    METRIC = ("loss", "min")
    units: int = 8
    kind: str = "tanh"
    def data(self):
        x = torch.ones(20, 2)
        return ((x, x),)
class Small(Base):
    def __post_init__(self):
        if self.units < 1:
            raise ValueError(f"units={self.units}: legal is 1 or more")
    def model(self): return nn.Linear(2, self.units)
"""


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No file was run, no module imported: what a test loads is forgotten after it."""
    monkeypatch.setattr(recipe_loading, "_loaded", {})
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(text: str, name: str = "mine.py") -> Path:
    path = Path(name).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def load(text: str, class_name: str = "", name: str = "mine.py", **parameters: Any) -> Recipe:
    return load_recipe(class_name, parameters, file=str(write(text, name)))


def refusal(text: str, class_name: str = "", **parameters: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(text, class_name, **parameters)
    message = str(caught.value)
    assert message.isprintable()
    return message


# ---- functions -----------------------------------------------------------------------------------


def test_functions_are_the_methods_of_a_recipe() -> None:
    recipe = load(FUNCTIONS)
    assert isinstance(recipe, Recipe)
    assert type(recipe).__name__ == "mine"
    model = recipe.model()
    splits = recipe.data(DataRequest())
    x, y = splits.train.content
    assert (len(splits.train), len(splits.validation), splits.name) == (18, 2, "mine")
    output = recipe.forward(model, (x, y))
    assert torch.equal(output, model(x))
    assert recipe.loss(output, (x, y)) == (output - y).square().mean()
    assert recipe.METRIC == ("loss", "min")
    made = ("counts", "forwards_target", "prepares", "draws_data")
    assert [name for name in made if getattr(recipe, name)] == []
    assert recipe.correct(output, (x, y)) is None


def test_functions_that_are_there_replace_the_defaults() -> None:
    recipe = load(
        FUNCTIONS
        + """
METRIC = ("accuracy", "max")
def forward(model, batch): return model(2 * batch[0])
def count(batch): return 7
def correct(output, batch): return torch.tensor(3)
"""
    )
    model, batch = recipe.model(), (torch.ones(1, 2), torch.ones(1, 1))
    assert torch.equal(recipe.forward(model, batch), model(torch.full((1, 2), 2.0)))
    assert (recipe.counts, recipe.count(batch), recipe.forwards_target) == (True, 7, True)
    assert recipe.correct(None, batch) == 3
    assert recipe.METRIC == ("accuracy", "max")


def test_an_imported_function_counts_and_modules_beside_the_file_are_found() -> None:
    write("from torch import nn\ndef model(): return nn.Identity()\n", "lib/parts_of_mine.py")
    recipe = load("from parts_of_mine import model\ndef data(): ...\n", name="lib/mine.py")
    assert isinstance(recipe.model(), nn.Identity)


def test_data_are_the_same_in_every_run_and_leave_random_numbers_alone() -> None:
    text = FUNCTIONS.replace(
        "x = torch.rand(20, 2)",
        "import random, numpy\n"
        "    x = torch.rand(20, 2) + random.random() + float(numpy.random.rand())",
    )
    recipe = load(text)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = recipe.data(DataRequest(seed=0))
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    again = recipe.data(DataRequest(seed=5))
    assert torch.equal(first.train.content[0], again.train.content[0])


def test_a_cache_keeps_the_data_of_two_files_apart() -> None:
    load_data = DataCache()
    ones = load("def model(): ...\nimport torch\ndef data(): return ((torch.ones(4),),)\n")
    twos = load(
        "def model(): ...\nimport torch\ndef data(): return ((2 * torch.ones(4),),)\n",
        name="other/mine.py",
    )
    assert load_data(ones, DataRequest()).train.content[0][0] == 1
    assert load_data(twos, DataRequest()).train.content[0][0] == 2


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("def data(): ...", ["no function model()", "or a class that extends mprun.Recipe"]),
        ("def model(): ...", ["no function data()"]),
        ("def modle(): ...\ndef data(): ...", ["no function model()", "did you mean 'modle'?"]),
        ("x = 1\ny = x / 0", ["cannot be loaded: ZeroDivisionError", "(mine.py:2); correct"]),
        (FUNCTIONS + "METRIC = 'f1'", ["mine.METRIC = 'f1'"]),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text: str, fragments: list[str]) -> None:
    message = refusal(text)
    assert "mine" in message
    assert all(fragment in message for fragment in fragments), message


# ---- classes -------------------------------------------------------------------------------------


def test_a_class_needs_no_decorator_and_inherits_parameters() -> None:
    recipe = load(CLASS, units=3)
    assert repr(recipe) == "Small(units=3, kind='tanh')"
    assert recipe.model().out_features == 3
    with pytest.raises(AttributeError):
        recipe.units = 4  # type: ignore[attr-defined]


def test_a_recipe_of_a_file_can_be_sent_to_worker_processes() -> None:
    recipe = load(CLASS, units=3)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize(
    ("parameters", "fragments"),
    [
        ({"units": "x"}, ["'recipe.model.units=x': units is a whole number"]),
        ({"units": 0}, ["units=0: legal is 1 or more"]),
        ({"unit": 3}, ["Small has no such parameter; did you mean 'units'?", "recipe.model.kind"]),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], fragments: list[str]) -> None:
    message = refusal(CLASS, **parameters)
    assert all(fragment in message for fragment in fragments), message


def test_a_name_picks_one_of_several_classes() -> None:
    text = CLASS + "class Large(Small):\n    units: int = 64\n"
    message = refusal(text)
    path = Path("mine.py").absolute()
    assert message.endswith(f"recipe={path}:Small, recipe={path}:Large")
    assert load(text, "Large").model().out_features == 64
    assert load(text, "Small").model().out_features == 8
    assert "no class Larg that extends mprun.Recipe; did you mean 'Large'?" in refusal(text, "Larg")


@pytest.mark.parametrize(
    ("body", "fragments"),
    [
        ("loss: str = 'mse'", ["Mine.loss has the name of a part", "give it another name"]),
        ("sizes: list = [1]", ["Mine cannot have these fields (mutable default"]),
        ("x: torch.Tensor = None", ["Mine has a parameter of a type that no override can have"]),
    ],
)
def test_fields_that_cannot_be_parameters_are_refused(body: str, fragments: list[str]) -> None:
    text = (
        "import mprun, torch\nclass Mine(mprun.Recipe):\n"
        f"    {body}\n    def model(self): ...\n    def data(self): ...\n"
    )
    message = refusal(text)
    assert all(fragment in message for fragment in fragments), message


# ---- the file ------------------------------------------------------------------------------------


def test_a_files_code_is_announced_and_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    path = write("print('run')\n" + FUNCTIONS)
    for _ in range(2):
        load_recipe("", {}, file=str(path))
    output = capsys.readouterr()
    assert output.out == "run\n"
    assert output.err == f"note: recipe={path} runs the code of this file\n"


def test_the_recorded_file_is_the_one_that_ran() -> None:
    path = write(FUNCTIONS)
    load_recipe("", {}, file=str(path))
    before = file_source(path)
    path.write_text("other", encoding="utf-8")
    assert file_source(path) == before
    assert before.content.decode() == textwrap.dedent(FUNCTIONS)


def test_a_file_with_the_name_of_a_module_does_not_replace_it() -> None:
    assert load(FUNCTIONS, name="json.py").model() is not None
    assert sys.modules["json"] is json
    assert load(FUNCTIONS, name="torchvision.py").model() is not None
    import torchvision

    assert hasattr(torchvision, "models")


def test_only_a_regular_file_of_a_sane_size_is_read() -> None:
    os.mkfifo("pipe.py")
    with pytest.raises(UsageError, match="there is no such file"):
        load_recipe("", {}, file=str(Path("pipe.py").absolute()))
    with Path("large.py").open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(UsageError, match="it is larger than 4"):
        load_recipe("", {}, file=str(Path("large.py").absolute()))
