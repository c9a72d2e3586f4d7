"""Where a recipe's code lies. Importing a module runs it, so the user learns of it beforehand.

A run is resumed with its own configuration, which names the recipe's class. In a folder from
someone else that name can lead to a module in the same folder, which would run as soon as the run
is resumed. Such a module is refused unless the user trusts the folder. A module anywhere else is
the user's own choice; outside of mprun its file is named before it runs.

Which file a name leads to is decided while it is imported, package by package. So a finder in front
of Python's own ones looks at each file between the moment it is found and the moment it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from mprun.console import note
from mprun.errors import UsageError
from mprun.records.study_record import FILE


class UntrustedCodeError(UsageError):
    """A recipe's code lies in a folder that the user does not trust."""


@contextmanager
def announced(target: str, untrusted: Path | None) -> Iterator[None]:
    """Inside, importing a recipe names its files before they run.

    Args:
        target: the import path of the recipe's class.
        untrusted: a folder whose code is not run, or None.

    Raises:
        UntrustedCodeError: a file lies in that folder.
    """
    finder = _AnnouncingFinder(target, untrusted)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def announced_file(path: Path, untrusted: Path | None, prefix: str = "recipe=") -> Iterator[None]:
    """The same for a recipe that is a file, and the modules that it imports.

    Args:
        path: the file.
        untrusted: a folder whose code is not run, or None.
        prefix: of the file's name in messages.

    Raises:
        UntrustedCodeError: the file or such a module lies in that folder.
    """
    finder = _AnnouncingFinder(str(path), untrusted, "recipe")
    finder.look(path)
    note(f"{prefix}{path} runs the code of this file")
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _AnnouncingFinder(MetaPathFinder):
    """Finds what the other finders find, and looks at it."""

    def __init__(self, target: str, untrusted: Path | None, key: str = "recipe.target") -> None:
        self._target, self._untrusted, self._key = target, untrusted, key

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.has_location and spec.origin is not None:
            file = Path(spec.origin)
            self.look(file)
            self._announce(name, file)
        return spec

    def look(self, file: Path) -> None:
        """Raise `UntrustedCodeError` for a file whose code is not run."""
        if self._untrusted is not None and lies_in(file, self._untrusted):
            raise UntrustedCodeError(
                f"{self._key}={self._target} would run {file}, which is a part of "
                f"{self._untrusted} itself and may be anyone's code; read it, then add "
                "run.trust=true"
            )

    def _announce(self, name: str, file: Path) -> None:
        is_of_target = self._target.startswith(f"{name}.")
        if is_of_target and name.partition(".")[0] != "mprun":
            note(f"recipe.target={self._target} runs the code of {file}")


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path leads into a folder, links followed or not."""
    starts = {os.path.abspath(folder), os.path.realpath(folder)}  # noqa: PTH100 (keeps links)
    paths = {os.path.abspath(path), os.path.realpath(path)}  # noqa: PTH100
    return any(Path(one).is_relative_to(start) for one in paths for start in starts)


def record_of(run: Path) -> Path:
    """The study that a run's folder is a part of, else that folder: both have one origin."""
    above = run.absolute().parent
    return above if (above / FILE).exists() else run
