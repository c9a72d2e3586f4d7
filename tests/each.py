"""Many small cases in one test: pytest itself takes longer than most of them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

# A failed `pytest.raises` is no Exception.
_FAILURES = (Exception, pytest.fail.Exception)

Test = Callable[..., None]


def each(
    names: str | Sequence[str],
    values: Iterable[Any],
    ids: Sequence[str] | Callable[[Any], Any] | None = None,
) -> Callable[[Test], Test]:
    """What `pytest.mark.parametrize` does, with the same arguments, but within one test.

    All cases run; the error of the first that fails is raised, with the names of all that did.
    Every case has an empty current folder, a `monkeypatch` and a `tmp_path` of its own; the other
    fixtures are those of the one test. A case may skip itself.
    """
    several = not isinstance(names, str) or "," in names
    split = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
    axis = []
    for number, value in enumerate(values):
        parts = tuple(value) if several else (value,)
        if ids is None or callable(ids):
            title = "-".join(_title(part, ids) for part in parts)
        else:
            title = ids[number]
        axis.append((title, dict(zip(split, parts, strict=True))))
    assert axis, f"no values of {names}"

    def decorate(test: Test) -> Test:
        inner, axes = getattr(test, "of_each", (test, []))
        return _looped(inner, [*axes, axis], getattr(test, "pytestmark", []))

    return decorate


def _looped(test: Test, axes: list[list[tuple[str, dict[str, Any]]]], marks: list[Any]) -> Test:
    def run(*args: Any, **fixtures: Any) -> None:
        failed: dict[str, BaseException] = {}
        skipped: list[BaseException] = []
        cases = list(itertools.product(*axes))
        for number, case in enumerate(cases):
            values = {name: value for _, part in case for name, value in part.items()}
            try:
                _run(test, args, values, fixtures, number)
            except _FAILURES as error:
                failed["-".join(title for title, _ in case)] = error
            except pytest.skip.Exception as error:
                skipped.append(error)
        if failed:
            error = next(iter(failed.values()))
            note = f"{len(failed)} of {len(cases)} cases: {'; '.join(failed)}"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]  # Python 3.10: no add_note
            raise error
        if len(skipped) == len(cases):
            raise skipped[0]

    looped = {name for axis in axes for name in axis[0][1]}
    signature = inspect.signature(test)
    assert looped <= set(signature.parameters), f"{test.__name__} takes no {looped}"
    rest = [p for name, p in signature.parameters.items() if name not in looped]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(run, name, getattr(test, name))
    for name, value in {
        "of_each": (test, axes),
        "pytestmark": marks,
        "__signature__": signature.replace(parameters=rest),
    }.items():
        setattr(run, name, value)
    return run


def _run(
    test: Test, args: Any, values: dict[str, Any], fixtures: dict[str, Any], number: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        own: dict[str, Any] = {}
        here = Path(f"case-{number}").resolve()
        here.mkdir()
        patch.chdir(here)
        if "monkeypatch" in fixtures:
            own["monkeypatch"] = patch
        folder = fixtures.get("tmp_path")
        if isinstance(folder, Path):
            own["tmp_path"] = folder / str(number)
            own["tmp_path"].mkdir()
        test(*args, **{**fixtures, **values, **own})


def _title(value: Any, ids: Callable[[Any], Any] | None) -> str:
    if ids is not None and (given := ids(value)) is not None:
        return str(given)
    return str(getattr(value, "__name__", None) or value)
