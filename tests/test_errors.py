"""The place of an error in the user's code."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mprun.errors import Place, definition, is_users, place_of

CODE = """import json
import functools

def outer(value):
    return inner(value)

def inner(value):
    return json.loads(value)

class Thing:
    def method(self):
        raise ValueError

def rethrown():
    try:
        inner("{")
    except ValueError as error:
        raise KeyError("x") from error

def through_library():
    return functools.reduce(lambda a, b: a / b, [1, 0])
"""


@pytest.fixture
def user() -> dict[str, Any]:
    """What the user's file defines."""
    path = Path("own/code.py").absolute()
    names: dict[str, Any] = {}
    exec(compile(CODE, str(path), "exec"), names)
    return names


def place(call: Callable[[], Any]) -> Place | None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    # As where mprun handles it, without the frame of this test.
    trace = caught.value.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return place_of(caught.value.with_traceback(trace))


def test_the_innermost_line_of_the_users(user: dict[str, Any]) -> None:
    assert str(place(lambda: user["outer"]("{"))) == "own/code.py:8, in inner"
    line = str(place(user["Thing"]().method))
    assert line == f"own/code.py:12, in {'Thing.' * (sys.version_info >= (3, 11))}method"
    assert str(place(user["rethrown"])) == "own/code.py:18, in rethrown"
    assert str(place(user["through_library"])) == "own/code.py:21, in <lambda>"


def test_a_file_elsewhere_has_its_whole_path(
    user: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(Path("own/code.py").absolute())
    Path("other").mkdir()
    monkeypatch.chdir("other")
    assert str(place(lambda: user["outer"]("{"))) == f"{file}:8, in inner"


def test_errors_of_libraries_alone_have_no_place() -> None:
    assert place(functools.partial(json.loads, "{")) is None
    assert place(functools.partial(nn.Linear(2, 2), torch.ones(3, 3))) is None


def test_a_file_that_python_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    text = (tmp_path / "broken.py").read_text(encoding="utf-8")
    found = place(lambda: compile(text, str(tmp_path / "broken.py"), "exec"))
    assert found == Place(str(tmp_path / "broken.py"), 2)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (torch.__file__, False),
        (json.__file__, False),
        (str(Path(sys.modules["mprun.errors"].__file__ or "").parent / "train/loop.py"), False),
        ("/home/me/env/lib/python3.12/site-packages/lightning/trainer.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
        ("/home/me/mprun_recipes/mine.py", True),
        ("/home/me/torch/mine.py", True),
    ],
)
def test_whose_file_it_is(file: str, expected: bool) -> None:
    assert is_users(file) is expected


def test_where_a_function_is_defined(user: dict[str, Any]) -> None:
    assert str(definition(user["inner"])) == "own/code.py:7, in inner"

    @functools.wraps(user["inner"])
    def wrapper(*args: Any) -> None: ...

    assert str(definition(wrapper)) == "own/code.py:7, in inner"
    assert definition(json.loads) is None
    assert definition(len) is None
    assert definition(functools.partial(user["inner"], 1)) is None
