"""What `help` shows of each public name: arguments, result, errors and an example."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest

import mprun
from mprun.config.reference import docs_of

PACKAGES = ("metrics", "numerics", "optim")
NOUNS = ("The", "A", "An", "All", "Those", "What", "Whether", "How", "Each", "Every", "Which")
"""A docstring that begins with one of these says in its first sentence what is returned."""
MADE_BY = {
    "FpException": "fp_exceptions",
    "MemoryRecorder": "record_memory",
    "NonfiniteReport": "fp_exceptions",
    "Result": "run",
    "Sensitivity": "sensitivity",
    "Statistics": "statistics",
    "StepMemory": "memory",
}
"""Class to the function that makes its objects: no user writes their arguments."""


def public() -> dict[str, Any]:
    """Each public function and class by the name that users write."""
    names = {f"mprun.{x}": getattr(mprun, x) for x in mprun.__all__ if x not in PACKAGES}
    for package in PACKAGES:
        module = import_module(f"mprun.{package}")
        names |= {f"mprun.{package}.{x}": getattr(module, x) for x in module.__all__}
    return {name: value for name, value in names.items() if callable(value)}


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that are written in mprun."""
    for name in dir(kind):
        static = inspect.getattr_static(kind, name)
        code = getattr(static, "fget", None) or getattr(static, "__func__", static)
        is_own = (getattr(code, "__module__", None) or "").startswith("mprun.")
        if not name.startswith("_") and is_own and callable(code) and not inspect.isclass(code):
            yield name, static


def gives_nothing(function: Any) -> bool:
    return inspect.signature(function).return_annotation in ("None", None)


def says_what_it_gives(doc: str) -> bool:
    is_noun = doc.startswith(("`", "Inside, ", *(f"{x} " for x in NOUNS)))  # a context: Inside
    return is_noun or re.search(r"\b(Returns:|Yields:|[Rr]eturn)", doc) is not None


def raised(function: Any) -> set[str]:
    """The exceptions that a function raises itself, which a user may want to catch."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    calls = [x.exc for x in ast.walk(tree) if isinstance(x, ast.Raise)]
    return {x.func.id for x in calls if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)}


def has_example(doc: str, name: str) -> bool:
    """Whether code in a docstring has the name: an indented line, or words in backticks."""
    heads = re.split(r"^(?:Args|Returns|Yields|Raises):$", doc, flags=re.MULTILINE)
    blocks = re.findall(r"^    .*$", heads[0], re.MULTILINE)
    code = [*blocks, *re.findall(r"`[^`]*`", doc)]
    return any(re.search(rf"\b{name}\b", x) and re.search(r"[(.: ]", x.strip("` ")) for x in code)


def words_of_arguments(doc: str) -> set[str]:
    """The arguments that a docstring describes, below `Args:` or in backticks."""
    entries = re.findall(r"^    ([\w, ]+):", doc, re.MULTILINE)
    return set(re.findall(r"\w+", " ".join([*entries, *re.findall(r"`[^`]*`", doc)])))


def lacks(name: str, value: Any) -> Iterator[str]:
    """What the docstring of a public function or class lacks."""
    is_class, short = inspect.isclass(value), name.rpartition(".")[2]
    doc = inspect.cleandoc((vars(value).get("__doc__") if is_class else value.__doc__) or "")
    if not has_example(doc, MADE_BY.get(short, short)):
        yield f"{name}: an example"
    if short not in MADE_BY and not (is_class and issubclass(value, Exception)):
        known = words_of_arguments(doc) | {*(docs_of(value) if is_class else ())}
        yield from (
            f"{name}: argument {x}" for x in inspect.signature(value).parameters if x not in known
        )
    if is_class and (is_dataclass(value) or "__init__" not in vars(value)):
        return
    if not is_class and not gives_nothing(value) and not says_what_it_gives(doc):
        yield f"{name}: what it returns"
    errors = raised(value.__init__ if is_class else value)
    yield from (f"{name}: raises {x}" for x in errors if x not in doc)


def lacks_of_method(name: str, value: Any) -> Iterator[str]:
    """What the docstring of a public method or property lacks."""
    doc, code = inspect.getdoc(value) or "", getattr(value, "__func__", value)
    if not doc:
        yield f"{name}: a docstring"
    if isinstance(value, property):
        return
    words, (_, *given) = set(re.findall(r"\w+", doc)), inspect.signature(code).parameters
    yield from (f"{name}: argument {x}" for x in given if x not in words)
    if not gives_nothing(code) and not says_what_it_gives(doc):
        yield f"{name}: what it returns"
    errors = raised(code) - {"NotImplementedError"}
    yield from (f"{name}: raises {x}" for x in errors if x not in doc)


def test_each_public_name_has_arguments_result_errors_and_an_example() -> None:
    assert [x for name, value in public().items() for x in lacks(name, value)] == []


def test_each_public_method_has_arguments_result_and_errors() -> None:
    missing = {
        line: None
        for kind in public().values()
        if inspect.isclass(kind)
        for name, value in methods(kind)
        for line in lacks_of_method(f"{kind.__name__}.{name}", value)
    }
    assert list(missing) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("run", ['mprun.run("recipe=my.py"', "UsageError", "RunFailedError", "seed=0"]),
        ("compare", ['mprun.compare("outputs/a"', "UsageError", "margin=0.01"]),
        ("check", ['mprun.check("recipe=my.py"', "mprun.check(model,", "UsageError", "budget_s"]),
    ],
)
def test_help_is_written_for_a_user(name: str, says: list[str]) -> None:
    """`help` shows the function's own text, without what a maintainer needs."""
    text = pydoc.plain(pydoc.render_doc(getattr(mprun, name)))
    assert text.startswith(f"Python Library Documentation: function {name} in module")
    assert [x for x in (*says, "Args:", "Returns:", "Raises:") if x not in text] == []
    assert "mprun.inspect" not in text


def test_a_class_that_lacks_them_is_found() -> None:
    """The test is not blind."""

    class Bare:
        """Something."""

        def __init__(self, width: int) -> None:
            if not width:
                raise ValueError("width")

        def area(self, height: int) -> int:
            """Compute."""
            return height

    assert list(lacks("Bare", Bare)) == [
        "Bare: an example",
        "Bare: argument width",
        "Bare: raises ValueError",
    ]
    assert list(lacks_of_method("Bare.area", Bare.area)) == [
        "Bare.area: argument height",
        "Bare.area: what it returns",
    ]
