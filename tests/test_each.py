"""Cases within one test: all run, what fails is named, and none sees what another changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.each import each


@pytest.mark.filterwarnings("ignore")
@each("b", [10, 20], ids=["ten", "twenty"])
@pytest.mark.usefixtures("in_empty_folder")
@each(("a", "wrong"), [(1, False), (2, True), (3, True)])
def example(a: int, wrong: bool, b: int, seen: list[tuple[int, int]], **_: Any) -> None:
    """Fails in half of the cases for b = 20."""
    seen.append((a, b))
    if wrong and b == 20:
        with pytest.raises(ValueError, match="never"):
            pass


def test_every_case_runs_and_those_that_fail_are_named() -> None:
    seen: list[tuple[int, int]] = []
    with pytest.raises(pytest.fail.Exception) as caught:
        example(seen=seen)
    assert seen == [(a, b) for a in (1, 2, 3) for b in (10, 20)]
    assert caught.value.__notes__ == ["2 of 6 cases: 2-True-twenty; 3-True-twenty"]
    marks = {mark.name for mark in example.pytestmark}  # type: ignore[attr-defined]
    assert marks == {"filterwarnings", "usefixtures"}


folders: list[Path] = []


@each("n", range(3))
def test_a_case_finds_everything_as_the_first_did(
    n: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "EACH" not in os.environ
    monkeypatch.setenv("EACH", str(n))
    assert list(Path().iterdir()) == list(tmp_path.iterdir()) == []
    Path("file").touch()
    (tmp_path / "file").touch()
    folders.append(Path.cwd())
    assert len(set(folders)) == n + 1
