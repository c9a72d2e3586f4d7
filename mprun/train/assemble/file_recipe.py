"""Running the user's code: a recipe in a Python file, and classes at import paths.

A file's functions, or a class in it, become a class of recipes:

    def model(): return nn.Linear(4, 1)
    def data(): return {"train": (x, y)}
    def loss(output, batch): return F.mse_loss(output, batch[1])

Functions become the methods of a class made here, so the rest of mprun knows one kind of recipe.
The file is read once per process: the code that runs is the one whose SHA-256 is recorded, though
the file may be edited during a long study. Its folder is searched for modules that it imports, as
if it were run by `python my.py`; modules of other folders win.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from mprun.config.recipe_file import read_source
from mprun.errors import MprunError, UsageError, first_line, hint
from mprun.recipe import Recipe
from mprun.records.console import note
from mprun.records.run_folder import FILE
from mprun.train.data import DataRequest, Splits
from mprun.train.data.random_numbers import seeded
from mprun.train.data.recipe_parts import as_splits
from mprun.train.user_code import described


class UntrustedCodeError(UsageError):
    """A recipe's code lies in a folder that the user does not trust."""


@contextmanager
def announced(what: str, untrusted: Path | None, target: str = "") -> Iterator[None]:
    """Inside, importing the user's code names its files before they run.

    Args:
        what: the override that leads to the code, for example `recipe=my.py`.
        untrusted: a folder whose code is not run, or None.
        target: the import path of the class that is imported; empty for a file, which is named
            alone.

    Raises:
        UntrustedCodeError: a file lies in that folder.
    """
    finder = _AnnouncingFinder(what, untrusted, target)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _AnnouncingFinder(MetaPathFinder):
    """Finds what the other finders find, and looks at it.

    Which file a name leads to is decided while it is imported, package by package. So this stands
    before Python's own finders and sees each file after it is found and before it runs.
    """

    def __init__(self, what: str, untrusted: Path | None, target: str) -> None:
        self._what, self._untrusted, self._target = what, untrusted, target

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.has_location and spec.origin is not None:
            refuse_untrusted(self._what, Path(spec.origin), self._untrusted)
            if self._target.startswith(f"{name}.") and name.partition(".")[0] != "mprun":
                note(f"{self._what} runs the code of {spec.origin}")
        return spec


def refuse_untrusted(what: str, file: Path, untrusted: Path | None) -> None:
    """Raise `UntrustedCodeError` for a file in a folder whose code is not run."""
    if untrusted is not None and lies_in(file, untrusted):
        raise UntrustedCodeError(
            f"{what} would run {file}, which is a part of {untrusted} itself and may be anyone's "
            "code; read it, then add run.trust=true"
        )


def imported(key: str, target: str, untrusted: Path | None, legal: str) -> Any:
    """What an import path names, the value of a field; None if its module has no such name.

    The current folder is searched too.

    Args:
        key: the field.
        target: the import path.
        untrusted: a folder whose code is not run, or None.
        legal: what the field can be, for the error.

    Raises:
        UsageError: its module cannot be imported.
    """
    module, _, name = target.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    what = f"{key}={target}"
    try:
        with announced(what, untrusted, target):
            return getattr(importlib.import_module(module), name, None)
    except UntrustedCodeError:
        raise
    except Exception as error:  # the module is the user's: anything can be wrong with it
        raise UsageError(f"{what} cannot be loaded ({described(error)}); {legal}") from None


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path leads into a folder, links followed or not."""
    starts = {os.path.abspath(folder), os.path.realpath(folder)}  # noqa: PTH100 (keeps links)
    paths = {os.path.abspath(path), os.path.realpath(path)}  # noqa: PTH100
    return any(Path(one).is_relative_to(start) for one in paths for start in starts)


def record_of(run: Path) -> Path:
    """The study that a run's folder is a part of, else that folder: both have one origin."""
    above = run.absolute().parent
    return above if (above / FILE).exists() else run


NEEDED = ("model", "data")
# The functions of a file that are a recipe's
FUNCTIONS = (
    *NEEDED,
    *("loss", "forward", "metrics", "optimizer", "schedule", "count", "correct", "sample"),
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


@dataclass(frozen=True)
class _Loaded:
    source: RecipeSource
    module: ModuleType


_loaded: dict[Path, _Loaded] = {}


def file_source(path: Path) -> RecipeSource:
    """The file's content: what was run in this process, else what is there.

    Raises:
        UsageError: there is no such file.
    """
    if path in _loaded:
        return _loaded[path].source
    return RecipeSource(path, read_source(path))


def forget_changed() -> None:
    """Let files that were changed since they ran in this process run again when they are named."""
    for path, loaded in list(_loaded.items()):
        if not path.is_file() or read_source(path) != loaded.source.content:
            del _loaded[path], sys.modules[loaded.module.__name__]


def class_in(path: Path, name: str, untrusted: Path | None) -> type[Recipe]:
    """The recipe's class of a file; its code is run unless it was.

    Args:
        path: the file.
        name: a class in it; empty: its only recipe, else its functions.
        untrusted: a folder whose code is not run, or None.

    Raises:
        UsageError: it cannot be run, or contains no such recipe.
    """
    module = module_in(path, untrusted)
    classes = _classes(module)
    if name:
        if name not in classes:
            legal = f"; legal: {', '.join(classes)}" if classes else ""
            raise UsageError(
                f"recipe={path}:{name}: the file has no class {name} that extends mprun.Recipe"
                f"{hint(name, classes)}{legal}"
            )
        return _as_dataclass(classes[name], path)
    if len(classes) > 1:
        raise UsageError(
            f"recipe={path}: the file has several recipes; name one of them: "
            + ", ".join(f"recipe={path}:{one}" for one in classes)
        )
    if classes:
        return _as_dataclass(next(iter(classes.values())), path)
    return of_functions(module, path)


# ---- running the file ----------------------------------------------------------------------------


def module_in(path: Path, untrusted: Path | None, prefix: str = "recipe=") -> ModuleType:
    """The file as a module, run once per process; see `forget_changed`.

    Args:
        path: the file.
        untrusted: a folder whose code is not run, or None.
        prefix: of the file's name in messages.

    Raises:
        UsageError: it cannot be read or run.
    """
    if path in _loaded:
        return _loaded[path].module
    source = file_source(path)
    module = ModuleType(_module_name(path), None)
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    linecache.checkcache(str(path))
    sys.modules[module.__name__] = module
    try:
        refuse_untrusted(f"{prefix}{path}", path, untrusted)
        note(f"{prefix}{path} runs the code of this file")
        with announced(f"{prefix}{path}", untrusted):
            exec(compile(source.content, str(path), "exec", dont_inherit=True), module.__dict__)
    except MprunError:
        del sys.modules[module.__name__]
        raise
    except (Exception, SystemExit) as error:  # it is the user's code: anything can be wrong
        del sys.modules[module.__name__]
        raise UsageError(
            f"{prefix}{path} cannot be loaded: {described(error)}; correct the file"
        ) from None
    except BaseException:  # Ctrl-C
        del sys.modules[module.__name__]
        raise
    _loaded[path] = _Loaded(source, module)
    return module


def _module_name(path: Path) -> str:
    """The file's stem, under which its classes can be pickled, unless it is another module's."""
    stem = path.stem
    if stem.isidentifier() and stem not in sys.modules:
        try:
            spec = importlib.util.find_spec(stem)
        except (ImportError, ValueError, AttributeError):
            spec = None
        if spec is None or spec.origin == str(path):
            return stem
    digest = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:8]
    return f"_recipe_{stem if stem.isidentifier() else ''}_{digest}"


# ---- a class in it -------------------------------------------------------------------------------


def _classes(module: ModuleType) -> dict[str, type[Recipe]]:
    """The recipes that the module defines itself and that lack nothing."""
    return {
        kind.__name__: kind
        for kind in vars(module).values()
        if extends(kind, Recipe)
        and kind.__module__ == module.__name__
        and not inspect.isabstract(kind)
    }


def extends(x: Any, base: type) -> TypeGuard[type[Any]]:
    """Whether `x` is a class below `base`; Python 3.10 has `list[int]` for a class as well."""
    return isinstance(x, type) and base in x.__mro__[1:]


def _as_dataclass(kind: type[Recipe], path: Path) -> type[Recipe]:
    """The class as a frozen dataclass: its annotated fields are its parameters.

    Raises:
        UsageError: a field cannot be a parameter.
    """
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
    for field in fields(kind):  # type: ignore[arg-type]
        name = field.name
        if hasattr(Recipe, name):
            is_value = not callable(getattr(Recipe, name))
            fix = f"write it without a type: {name} = ..." if is_value else "give it another name"
            raise UsageError(
                f"{path}: the parameter {kind.__name__}.{name} has the name of a part of "
                f"mprun.Recipe; {fix}"
            )
    return kind


# ---- functions -----------------------------------------------------------------------------------


def of_functions(module: ModuleType, path: Path) -> type[Recipe]:
    """The class whose methods are the module's functions.

    Raises:
        UsageError: one is missing, or is no function.
    """
    functions: dict[str, Any] = {
        name: vars(module)[name] for name in FUNCTIONS if name in vars(module)
    }
    for name in NEEDED:
        if name not in functions:
            near = hint(name, [n for n in vars(module) if not n.startswith("_")])
            raise UsageError(
                f"recipe={path}: the file has no function {name}(){near}; a recipe is the "
                "functions model() and data(), and loss(output, batch) unless the output brings "
                "a loss, or a class that extends mprun.Recipe"
            )
    for name, value in functions.items():  # any object can have such a name
        if not callable(value) or isinstance(value, type):
            raise UsageError(
                f"recipe={path}: {name} is {str(value)[:40]}; legal is a function {name}"
            )
    methods: dict[str, Any] = {name: _method(function) for name, function in functions.items()}
    methods["data"] = _data_method(functions["data"], path.stem)
    if hasattr(module, "METRIC"):
        methods["METRIC"] = module.METRIC
    # The data know nothing of the run.
    methods |= {"ignores": frozenset({"data.source", "data.root", "data.fallback"})}
    methods |= {"draws_data": False}
    methods |= {"__module__": module.__name__, "__doc__": module.__doc__}
    return dataclass(frozen=True)(type(path.stem, (Recipe,), methods))


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def method(self: Recipe, *args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return method


def _data_method(function: Callable[[], Any], name: str) -> Callable[[Recipe, DataRequest], Splits]:
    def data(self: Recipe, request: DataRequest) -> Splits:
        with seeded(0):  # data are no part of a seed's chance
            return as_splits(function(), name, request)

    return data
