"""Loading a recipe: its class, the user's parameters, its data."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from mprun.config import Config
from mprun.config.reference import describe_type
from mprun.errors import MprunError, UsageError, first_line, hint
from mprun.recipe import Recipe
from mprun.records.run_folder import RECIPE as COPY
from mprun.records.run_record import read_summary
from mprun.train.assemble.file_recipe import RecipeSource, class_in, extends, file_source, imported
from mprun.train.data import DataRequest, LoadedSet, Splits, TensorSet
from mprun.train.data.loader_sets import NOTHING
from mprun.train.data.recipe_parts import as_splits
from mprun.train.recipe_metrics import check_metric
from mprun.train.user_code import explain_mistakes

Load = Callable[[Recipe, DataRequest], Splits]  # Gives a recipe's samples
NO_DATA = "none"  # The source of splits without samples, which only say what samples look like


def recipe_of(config: Config, untrusted: Path | None = None) -> Recipe:
    """The recipe of a configuration; see `load_recipe`."""
    row = config.recipe
    return load_recipe(row.target, row.model, untrusted, row.file)


def source_of(config: Config) -> RecipeSource | None:
    """The file of the recipe of a configuration; None for a recipe by name.

    Raises:
        UsageError: it cannot be read, or is not the one that the resumed run was trained with.
    """
    if config.recipe.file is None:
        return None
    resume = config.run.resume
    try:
        source = file_source(Path(config.recipe.file))
    except UsageError as error:
        if resume is None:
            raise
        raise UsageError(f"run.resume={resume}: {error}; put it back: {_copy_in(resume)}") from None
    if resume is not None:
        sha256 = _recorded_sha256(Path(resume))
        if sha256 not in (None, source.sha256):
            raise UsageError(
                f"run.resume={resume}: {source.path} was changed since the run began; put it "
                f"back as it was ({_copy_in(resume)}), or begin a new run with it"
            )
    return source


def _recorded_sha256(run: Path) -> str | None:
    try:
        return read_summary(run).recipe_sha256
    except MprunError:  # a run killed at once has no summary
        return None


def _copy_in(resume: str) -> str:
    return f"the run's copy is {Path(resume) / COPY}"


def load_recipe(
    target: str,
    parameters: dict[str, Any],
    untrusted: Path | None = None,
    file: str | None = None,
) -> Recipe:
    """The recipe's class with the user's parameters, each checked against its annotated type.

    Args:
        target: its import path; with a file, its name there or empty.
        parameters: the user's.
        untrusted: a folder whose code is not run, or None.
        file: the recipe's Python file, or None.
    """
    if file is None:
        kind = _import_recipe(target, untrusted)
    else:
        kind = class_in(Path(file), target, untrusted)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name, value in parameters.items():
        if name not in known:
            raise UsageError(
                f"'recipe.model.{name}={value}': {kind.__name__} has no such parameter"
                f"{hint(name, known)}; {_legal_parameters(kind, name, known)}"
            )
    try:
        schema = OmegaConf.structured(kind)
    except OmegaConfBaseException as error:
        raise UsageError(
            f"{kind.__name__} has a parameter of a type that no override can have "
            f"({first_line(error)}); legal are int, float, bool, str, enums, and lists and "
            "dictionaries of them"
        ) from None
    OmegaConf.set_readonly(schema, False)  # the class is frozen, the values being merged are not
    for name, value in parameters.items():
        try:
            OmegaConf.update(schema, name, value)
        except OmegaConfBaseException:
            legal = describe_type(get_type_hints(kind)[name])
            raise UsageError(f"'recipe.model.{name}={value}': {name} is {legal}") from None
    try:
        recipe = OmegaConf.to_object(schema)
    except (OmegaConfBaseException, ValueError) as error:
        raise UsageError(f"recipe.model: {str(error).splitlines()[0]}") from None
    assert isinstance(recipe, Recipe)
    with explain_mistakes(f"the metrics of {type(recipe).__name__} cannot be made"):
        check_metric(recipe)
    return recipe


def _legal_parameters(kind: type[Recipe], name: str, known: list[str]) -> str:
    """What can be set instead of a name that is no parameter."""
    if hasattr(kind, name) and not hasattr(Recipe, name):
        return f"a type makes it one: write `{name}: int = ...` in the class"
    if known:
        return "legal: " + ", ".join(f"recipe.model.{k}" for k in known)
    return "it has none; the annotated fields of a class are its parameters: units: int = 64"


def _import_recipe(target: str, untrusted: Path | None) -> type[Recipe]:
    """The class at an import path."""
    legal = "write module.Class of a recipe that can be imported from here"
    kind = imported("recipe.target", target, untrusted, legal)
    if extends(kind, Recipe) and "__dataclass_fields__" in vars(kind):
        return kind
    raise UsageError(
        f"recipe.target={target} is not a dataclass that extends mprun.recipe.Recipe; {legal}"
    )


def load_data(recipe: Recipe, request: DataRequest) -> Splits:
    """The recipe's samples; an error in the recipe's own code becomes one line."""
    with explain_mistakes(f"the data of {type(recipe).__name__} cannot be made"):
        parts = recipe.data(request) if _takes_request(recipe) else recipe.data()  # type: ignore[call-arg]
        return as_splits(parts, _name_of(recipe), request)


def _takes_request(recipe: Recipe) -> bool:
    """Whether `data` has a parameter; that of a class in a user's file may have none."""
    return bool(inspect.signature(recipe.data).parameters)


def _name_of(recipe: Recipe) -> str:
    """The stem of the file that the recipe is from."""
    module = sys.modules.get(type(recipe).__module__)
    return Path(getattr(module, "__file__", None) or type(recipe).__name__).stem


def load_shapes(recipe: Recipe, request: DataRequest) -> Splits:
    """One training sample with shapes and dtypes, but without values or memory.

    It is the recipe's `sample`; without one, the data are loaded. The memory of a step of such a
    plan can be counted (`process_memory`), but the step cannot run.
    """
    with (
        explain_mistakes(f"a sample of {type(recipe).__name__} cannot be made"),
        torch.device("meta"),
    ):
        like = recipe.sample()
        if not isinstance(like, TensorSet | None):
            raise TypeError(f"sample gives a {type(like).__name__}; legal is a TensorSet or None")
    notice = None
    train: TensorSet | LoadedSet | None = like
    if like is None:
        train = load_data(recipe, request).train
        notice = (
            f"the data were loaded to see a sample's shape; {type(recipe).__name__}.sample "
            "(see mprun.recipe.Recipe) makes that needless"
        )

    def one(x: Tensor) -> Tensor:
        return torch.empty(1, *x.shape[1:], dtype=x.dtype, device="meta")

    assert train is not None
    if isinstance(train, TensorSet):
        train = train.map(one)
    return Splits("no data", NO_DATA, train, NOTHING, NOTHING, notice=notice)


class DataCache:
    """Loads samples only if they differ from those of the last load: runs share them.

    One set of samples is in memory. A recipe that draws its data from the run's seed is loaded
    again for each seed.
    """

    def __init__(self) -> None:
        self._key: tuple[type[Recipe], str, DataRequest] | None = None
        self._splits: Splits | None = None

    def __call__(self, recipe: Recipe, request: DataRequest) -> Splits:
        own = request if recipe.draws_data else replace(request, seed=0)
        key = (type(recipe), repr(recipe), own)
        if self._splits is None or key != self._key:
            self._key, self._splits = None, None  # not two sets at once
            self._splits = load_data(recipe, request)
            self._key = key
        return self._splits
