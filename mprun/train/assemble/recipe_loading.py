"""Loading a recipe: its class, the user's parameters, its data; and running the user's code for it.

A recipe is a class at an import path, a class or functions in a Python file, or objects that are
given in Python (`given_recipe`). Functions become the methods of a class made here, so the rest of
mprun knows one kind of recipe:

    def model(): return nn.Linear(4, 1)
    def data(): return {"train": (x, y)}
    def loss(output, batch): return F.mse_loss(output, batch[1])

Importing a module runs it, so outside of mprun its file is named before it runs. A run is resumed
with its own configuration, which names the recipe's class. In a folder from someone else that name
can lead to a module in the same folder: it is refused unless the user trusts the folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import wraps
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, get_type_hints

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mprun.config import Config
from mprun.config.recipe_file import read_source
from mprun.config.reference import describe_type, quoted
from mprun.errors import MprunError, UsageError, first_line, hint
from mprun.precision.nested import all_tensors, copied_model, map_tensors
from mprun.recipe import Recipe
from mprun.records.console import note
from mprun.records.run_folder import FILE
from mprun.records.run_folder import RECIPE as COPY
from mprun.records.run_record import read_summary
from mprun.train.data import DataRequest, LoadedSet, Splits, TensorSet
from mprun.train.data.loader_sets import NOTHING
from mprun.train.data.random_numbers import seeded
from mprun.train.data.recipe_parts import as_splits
from mprun.train.recipe_metrics import check_metric
from mprun.train.recipe_quantities import quantities_of
from mprun.train.user_code import described, explain_mistakes

Load = Callable[[Recipe, DataRequest], Splits]  # Gives a recipe's samples
NO_DATA = "none"  # The source of splits without samples, which only say what samples look like


def recipe_of(config: Config, untrusted: Path | None = None) -> Recipe:
    """The recipe of a configuration; see `load_recipe`."""
    row = config.recipe
    return load_recipe(row.target, row.model, untrusted, row.file)


def source_of(config: Config) -> RecipeSource | None:
    """The file of the recipe of a configuration; None for a recipe by name.

    Raises `UsageError` if it is not the one that the resumed run was trained with.
    """
    if config.recipe.file is None:
        return None
    path, resume = Path(config.recipe.file), config.run.resume
    if resume is None:
        return file_source(path)
    copy = f"the run's copy is {Path(resume) / COPY}"
    try:
        source = file_source(path)
    except UsageError as error:
        raise UsageError(f"run.resume={resume}: {error}; put it back: {copy}") from None
    sha256 = None
    with suppress(MprunError):  # a run killed at once has no summary
        sha256 = read_summary(Path(resume)).recipe_sha256
    if sha256 not in (None, source.sha256):
        raise UsageError(
            f"run.resume={resume}: {path} was changed since the run began; put it back as it was "
            f"({copy}), or begin a new run with it"
        )
    return source


def load_recipe(
    target: str, parameters: dict[str, Any], untrusted: Path | None = None, file: str | None = None
) -> Recipe:
    """The recipe's class with the user's parameters, each checked against its annotated type.

    With a Python file, `target` is the class's name there or empty, else its import path. The code
    in the folder `untrusted` is not run.
    """
    if file is None:
        legal = "write module.Class of a recipe that can be imported from here"
        kind = imported(target, untrusted, legal)
        if not (extends(kind, Recipe) and "__dataclass_fields__" in vars(kind)):
            raise UsageError(
                f"recipe.target={target} is not a dataclass that extends mprun.recipe.Recipe; "
                f"{legal}"
            )
    else:
        kind = class_in(Path(file), target, untrusted)
    known = [f.name for f in fields(kind)]
    for name, value in parameters.items():
        if name not in known:
            legal = ", ".join(f"recipe.model.{k}" for k in known)
            raise UsageError(
                f"'recipe.model.{name}={value}': {kind.__name__} has no such parameter"
                f"{hint(name, known)}; legal: {legal or 'none'}; the fields of a class with a type "
                "are its parameters: units: int = 64"
            )
    try:
        schema = OmegaConf.structured(kind)
    except OmegaConfBaseException as error:
        raise UsageError(
            f"{kind.__name__} has a parameter of a type that no override can have "
            f"({first_line(error)}); legal are int, float, bool, str, enums, and lists and "
            "dictionaries of them"
        ) from None
    OmegaConf.set_readonly(schema, False)  # the class is frozen, the merged values are not
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
    with explain_mistakes(f"the quantities of {type(recipe).__name__} cannot be made"):
        quantities_of(recipe)
    return recipe


# ---- its data ------------------------------------------------------------------------------------


def load_data(recipe: Recipe, request: DataRequest) -> Splits:
    """The recipe's samples; an error in the recipe's own code becomes one line."""
    with explain_mistakes(f"the data of {type(recipe).__name__} cannot be made"):
        # a recipe in a user's file may write data() without a parameter
        arguments = [request] if inspect.signature(recipe.data).parameters else []
        module = sys.modules.get(type(recipe).__module__)
        name = Path(getattr(module, "__file__", None) or type(recipe).__name__).stem
        return as_splits(recipe.data(*arguments), name, request)


def load_shapes(recipe: Recipe, request: DataRequest) -> Splits:
    """One training sample with shapes and dtypes, but without values or memory.

    It is the recipe's `sample`; without one, the data are loaded. The memory of a step of such a
    plan can be counted (`planned_memory`), but the step cannot run.
    """
    # on the meta device even a sample of a large data set takes no memory
    with (
        explain_mistakes(f"a sample of {type(recipe).__name__} cannot be made"),
        torch.device("meta"),
    ):
        like = recipe.sample()
        if not isinstance(like, TensorSet | None):
            raise TypeError(f"sample gives a {type(like).__name__}; legal is a TensorSet or None")
    train: TensorSet | LoadedSet = load_data(recipe, request).train if like is None else like
    if isinstance(train, TensorSet):
        # one row stands for any number: a plan's step has rows of its own batch size
        train = without_values(train.content, 1)
    return Splits("no data", NO_DATA, train, NOTHING, NOTHING)


def without_values(content: Any, rows: int) -> TensorSet:
    """So many samples of the shapes and dtypes of `content`, on the meta device."""

    def one(x: Tensor) -> Tensor:
        return torch.empty(rows, *x.shape[1:], dtype=x.dtype, device="meta")

    return TensorSet(map_tensors(one, content))


class DataCache:
    """Loads samples only if they differ from those of the last load: runs share them.

    One set of samples is in memory. A recipe that draws its data from the run's seed is loaded
    again for each seed.
    """

    def __init__(self) -> None:
        self._key: tuple[type[Recipe], str, DataRequest] | None = None
        self._splits: Splits | None = None

    def __call__(self, recipe: Recipe, request: DataRequest) -> Splits:
        # samples that do not depend on the seed are the same for all seeds
        own = request if recipe.draws_data else replace(request, seed=0)
        key = (type(recipe), repr(recipe), own)
        if self._splits is None or key != self._key:
            self._key, self._splits = None, None  # memory has room for one set, not for two
            self._splits = load_data(recipe, request)
            self._key = key
        return self._splits


# ---- which code runs -----------------------------------------------------------------------------


def refuse_untrusted(what: str, file: Path, untrusted: Path | None) -> None:
    """Raise `UsageError` for a file in a folder whose code is not run."""
    if untrusted is not None and lies_in(file, untrusted):
        raise UsageError(
            f"{what} would run {file}, which is a part of {untrusted} itself and may be anyone's "
            "code; read it, then add run.trust=true"
        )


def imported(target: str, untrusted: Path | None, legal: str) -> Any:
    """What `recipe.target`, an import path, names; None if its module has no such name.

    The current folder is searched too. The user's files are named before they run. Raises
    `UsageError` if its module cannot be imported (`legal` is what it can be), or one of its files
    lies in the folder whose code is not run.
    """
    module, _, name = target.rpartition(".")
    # `python -m` searches the current folder, an installed command does not; last, so that no file
    # there hides an installed package
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    what = f"recipe.target={target}"
    try:
        for part in accumulate(module.split("."), "{}.{}".format):  # a, a.b, a.b.c
            # the file that a name leads to is known once its package is imported
            spec = None if part in sys.modules else importlib.util.find_spec(part)
            if spec is not None and spec.has_location and spec.origin is not None:
                refuse_untrusted(what, Path(spec.origin), untrusted)
                if part.partition(".")[0] != "mprun":
                    note(f"{what} runs the code of {spec.origin}")
            importlib.import_module(part)
        return getattr(sys.modules[module], name, None)
    except MprunError:
        raise
    except Exception as error:  # the module is the user's: anything can be wrong with it
        raise UsageError(f"{what} cannot be loaded ({described(error)}); {legal}") from None


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path leads into a folder, links followed or not."""
    # a link may lead into the folder or out of it: either way the code is in the folder's hands
    starts = {os.path.abspath(folder), os.path.realpath(folder)}  # noqa: PTH100 (keeps links)
    paths = {os.path.abspath(path), os.path.realpath(path)}  # noqa: PTH100
    return any(Path(one).is_relative_to(start) for one in paths for start in starts)


def record_of(run: Path) -> Path:
    """The study that a run's folder is a part of, else that folder: both have one origin."""
    above = run.absolute().parent  # a study's runs are folders right below it
    return above if (above / FILE).exists() else run


# ---- a Python file -------------------------------------------------------------------------------


NEEDED = ("model", "data")
OPTIONAL = (
    *("loss", "forward", "metrics", "quantities", "optimizer", "schedule", "count", "correct"),
    "sample",
)


@dataclass(frozen=True)
class RecipeSource:
    """The file of a recipe, as it was when its code was run."""

    path: Path
    content: bytes

    @property
    def sha256(self) -> str:
        """Of the content."""
        return hashlib.sha256(self.content).hexdigest()


# The files that ran in this process. Each runs once, so the recorded SHA-256 is that of the code
# that trains, although the file may be edited during a long study.
_loaded: dict[Path, tuple[RecipeSource, ModuleType]] = {}


def file_source(path: Path) -> RecipeSource:
    """The file's content: what was run in this process, else what is there."""
    if path in _loaded:
        return _loaded[path][0]
    return RecipeSource(path, read_source(path))


def forget_changed() -> None:
    """Let files that were changed since they ran in this process run again when they are named."""
    for path, (source, module) in list(_loaded.items()):
        if not path.is_file() or read_source(path) != source.content:
            del _loaded[path], sys.modules[module.__name__]


def class_in(path: Path, name: str, untrusted: Path | None) -> type[Recipe]:
    """The recipe's class of a file: the one of a name, else its only recipe, else its functions."""
    module = module_in(path, untrusted)
    classes = _classes(module)
    if name and name not in classes:
        legal = f"; legal: {', '.join(classes)}" if classes else ""
        raise UsageError(
            f"recipe={path}:{name}: the file has no class {name} that extends mprun.Recipe"
            f"{hint(name, classes)}{legal}"
        )
    if len(classes) > 1 and not name:
        raise UsageError(
            f"recipe={path}: the file has several recipes; name one of them: "
            + ", ".join(f"recipe={path}:{one}" for one in classes)
        )
    if not classes:
        return of_functions(module, path)
    return _as_dataclass(classes[name or next(iter(classes))], path)


# ---- running the file ----------------------------------------------------------------------------


def module_in(path: Path, untrusted: Path | None, prefix: str = "recipe=") -> ModuleType:
    """The file as a module, run once per process; see `forget_changed`.

    A `UsageError` has `prefix` before its name: it cannot be read or run.
    """
    if path in _loaded:
        return _loaded[path][1]
    source = file_source(path)
    module = ModuleType(_module_name(path), None)
    module.__file__ = str(path)
    # as if `python my.py` ran, but last: modules of other folders win
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    linecache.checkcache(str(path))  # else a traceback shows the lines of an earlier version
    sys.modules[module.__name__] = module  # before it runs: dataclasses and pickle look it up there
    try:
        refuse_untrusted(f"{prefix}{path}", path, untrusted)
        note(f"{prefix}{path} runs the code of this file")
        # dont_inherit: this module's `annotations` import is not the user's
        exec(compile(source.content, str(path), "exec", dont_inherit=True), module.__dict__)
        _loaded[path] = (source, module)
    except MprunError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything, or call exit()
        raise UsageError(
            f"{prefix}{path} cannot be loaded: {described(error)}; correct the file"
        ) from None
    finally:
        if path not in _loaded:  # Ctrl-C too
            del sys.modules[module.__name__]
    return module


def _module_name(path: Path) -> str:
    """The file's stem, under which its classes can be pickled, unless it is another module's."""
    stem = path.stem
    if stem.isidentifier() and stem not in sys.modules:
        try:  # an installed package of that name keeps it
            spec = importlib.util.find_spec(stem)
        except (ImportError, ValueError, AttributeError):
            spec = None
        if spec is None or spec.origin == str(path):
            return stem
    # the path makes the name unique; it may hold bytes that are no UTF-8
    digest = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:8]
    return f"_recipe_{stem if stem.isidentifier() else ''}_{digest}"


# ---- a class in it -------------------------------------------------------------------------------


def _classes(module: ModuleType) -> dict[str, type[Recipe]]:
    """The recipes that the module defines itself and that lack nothing."""
    return {
        kind.__name__: kind
        for kind in vars(module).values()
        if extends(kind, Recipe)
        # a class that the file imports is a base of its recipes, not one of them
        and kind.__module__ == module.__name__
        and not inspect.isabstract(kind)
    }


def extends(x: Any, base: type) -> TypeGuard[type[Any]]:
    """Whether `x` is a class below `base`."""
    # `issubclass` raises for `list[int]`, which Python 3.10 has for a class as well
    return isinstance(x, type) and base in x.__mro__[1:]


def _as_dataclass(kind: type[Recipe], path: Path) -> type[Recipe]:
    """The class as a frozen dataclass; raises `UsageError` for a field that is no parameter."""
    # DEFAULTS are read from the file's text, before any of its code runs
    if "DEFAULTS" in vars(kind):
        raise UsageError(
            f"{path}: {kind.__name__}.DEFAULTS is not read; write DEFAULTS = {{...}} outside of "
            "the class"
        )
    for base in reversed(kind.__mro__):  # a class inherits the fields of its bases
        undecorated = "__dataclass_fields__" not in vars(base)
        if undecorated and base.__module__ == kind.__module__:
            try:
                dataclass(frozen=True)(base)  # changes the class itself
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"{path}: {base.__name__} cannot have these fields ({first_line(error)})"
                ) from None
    for name in (field.name for field in fields(kind)):  # type: ignore[arg-type]
        if hasattr(Recipe, name):
            raise UsageError(
                f"{path}: the parameter {kind.__name__}.{name} has the name of a part of "
                f"mprun.Recipe; give it another name, or set the part without a type: {name} = ..."
            )
    return kind


# ---- functions -----------------------------------------------------------------------------------


def of_functions(module: ModuleType, path: Path) -> type[Recipe]:
    """The class whose methods are the module's functions; raises `UsageError` without them."""
    own = vars(module)
    functions: dict[str, Any] = {n: own[n] for n in (*NEEDED, *OPTIONAL) if n in own}
    for name in NEEDED:
        if name not in functions:
            near = hint(name, [n for n in vars(module) if not n.startswith("_")])
            raise UsageError(
                f"recipe={path}: the file has no function {name}(){near}; a recipe is the "
                "functions model() and data(), and loss(output, batch) unless the output brings "
                "a loss, or a class that extends mprun.Recipe"
            )
    methods: dict[str, Any] = {}
    for name, value in functions.items():  # any object can have such a name
        if not callable(value) or isinstance(value, type):
            raise UsageError(
                f"recipe={path}: {name} is {str(value)[:40]}; legal is a function {name}"
            )
        methods[name] = _method(value)
    methods |= {
        "data": _data_method(functions["data"], path.stem),
        # data() has no parameter, so these fields and the seed cannot reach it
        "ignores": frozenset({"data.source", "data.root", "data.fallback"}),
        "draws_data": False,
        "__module__": module.__name__,
        "__doc__": module.__doc__,
    }
    if hasattr(module, "METRIC"):
        methods["METRIC"] = module.METRIC
    return dataclass(frozen=True)(type(path.stem, (Recipe,), methods))


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def method(self: Recipe, *args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return method


def _data_method(function: Callable[[], Any], name: str) -> Callable[[Recipe, DataRequest], Splits]:
    def data(self: Recipe, request: DataRequest) -> Splits:
        with seeded(0):  # runs of all seeds train on the same samples
            return as_splits(function(), name, request)

    return data


# ---- objects that are given in Python ------------------------------------------------------------


@contextmanager
def _content_of(copy: nn.Module, model: nn.Module) -> Iterator[None]:
    """Inside, `model` has the content of its copy: a loss may read the model that it was given."""
    copies = dict(copy.named_modules())
    own = [(m, vars(m), vars(copies[x])) for x, m in model.named_modules() if x in copies]
    try:
        for module, _, content in own:
            object.__setattr__(module, "__dict__", content)
        yield
    finally:
        for module, content, _ in own:
            object.__setattr__(module, "__dict__", content)


def given_recipe(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
) -> tuple[Recipe, list[str]]:
    """The recipe of a model, a batch and a loss, and overrides to which the user's are added.

    Args:
        model: any module, in any dtype and on any device.
        batch: a tensor, tuple, list or mapping of tensors, nested. With a loss, the last item of a
            tuple or list is the target; the other items, or the items of a mapping by their names,
            are the arguments of the model.
        loss: of the output and the target (of a batch without one: the batch) the mean loss, a
            scalar, or a dict of named ones. None: the output brings its own, as `output.loss` or
            `output["loss"]`.
        optimizer: makes one of a model. None: `train.optimizer`, AdamW at 1e-3.
    """

    called = model  # the copy whose forward pass was the last one

    def note(copy: nn.Module, _: Any) -> None:
        nonlocal called
        called = copy

    def copied() -> nn.Module:
        own = copied_model(model).cpu()  # each mode trains its own; the caller's stays as it is
        own.zero_grad(set_to_none=True)
        own.register_forward_pre_hook(note)
        return own

    if not isinstance(model, nn.Module):
        raise UsageError(f"check: model is a {type(model).__name__}; legal is a torch.nn.Module")
    if isinstance(loss, type):
        raise UsageError(f"check: loss is the class {loss.__name__}; write {loss.__name__}()")
    # a scalar of a batch has no samples; the others should agree on their number
    sizes = {len(x) if x.dim() else 0 for x in all_tensors(batch)}
    if sizes <= {0}:
        raise UsageError(
            f"check: batch is a {type(batch).__name__} without samples; legal is a tensor, or a "
            "tuple or mapping of tensors"
        )
    form = map_tensors(lambda x: x.detach().cpu(), batch)
    if not isinstance(form, Mapping):
        form = tuple(form) if isinstance(form, tuple | list) else (form,)
    whole: Any = [form]
    # Tensors of unequal lengths (time first, then samples) are a batch that cannot be cut:
    # batch_size=None makes the loader pass it on whole.
    train = form if len(sizes) == 1 else DataLoader(whole, batch_size=None)
    name = type(model).__name__
    module = ModuleType(name, f"{name}, given in Python")
    functions: dict[str, Any] = vars(module)
    functions["model"] = copied
    functions["data"] = lambda: {"train": train, "validation": None}
    if loss is not None:

        def loss_of(output: Any, b: Any) -> Any:
            with _content_of(called, model):
                return loss(output, b if isinstance(b, Mapping) else b[-1])

        functions["loss"] = loss_of
    else:  # every item is an argument
        functions["forward"] = lambda m, b: m(**b) if isinstance(b, Mapping) else m(*b)
    if optimizer is not None:
        functions["optimizer"] = optimizer
    return of_functions(module, Path(name))(), [
        "recipe=linear",  # whose other settings are the defaults of a run
        f"recipe.name={quoted(name)}",
        f"recipe.target={quoted(f'{type(model).__module__}.{type(model).__qualname__}')}",
        "train.optimizer.name=adamw",
        "train.lr=0.001",  # PyTorch's own for AdamW
        f"train.batch_size={max(sizes)}",  # the batch is all of the training data
    ]
