"""`mprun data`: are the published files whole, and bring those that are not.

    mprun data verify [NAME ...] [data.root=FOLDER]    changes nothing
    mprun data fetch [NAME ...] [data.root=FOLDER]     downloads what is missing or damaged

Both list every file of the sets and end with status 0 where all are the published ones, else 1.
torch is imported once the words are understood, so that a mistake is answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import EXIT_OK, MprunError, UsageError, hint, nearest
from mprun.train.signals import SignalReceivedError, StopSignals

if TYPE_CHECKING:
    from mprun.data.files import FileState

NAMES = ("MNIST", "FashionMNIST")
"""The sets with published files; the keys of `mprun.data.files.SHA256`, known without torch."""

BROUGHT = {"ok": "ok", "missing": "fetched", "damaged": "mended"}
"""What a good file is called, by what it was before."""


@dataclass(frozen=True)
class Words:
    """The command's words, taken apart."""

    action: str
    names: tuple[str, ...]
    root: str | None


def data_command(words: Sequence[str]) -> int:
    """Run `mprun data` with what follows these two words; the exit status.

    Raises:
        UsageError: a word that has no meaning here.
        MprunError: a file is missing or damaged, or could not be had (status 1).
    """
    parsed = parse(words)
    with StopSignals() as stop:
        try:
            from mprun.data.files import find_root

            ACTIONS[parsed.action](parsed.names, find_root(parsed.root))
        except SignalReceivedError:
            print(f"mprun: stopped by {stop.name}; no file is half written", file=sys.stderr)
            return stop.exit_status
    return EXIT_OK


def parse(words: Sequence[str]) -> Words:
    """Separate the action, the names of sets and the folder.

    Raises:
        UsageError: a word that has no meaning here.
    """
    if not words or words[0] not in ACTIONS:
        received = f"'{words[0]}' is no action" if words else "an action is missing"
        near = hint(words[0], ACTIONS) if words else ""
        raise UsageError(
            f"{received}; legal: {', '.join(ACTIONS)}{near}; "
            "write mprun data verify [NAME ...] [data.root=FOLDER]"
        )
    names, root = [], None
    for word in words[1:]:
        key, has_value, value = word.partition("=")
        if key == "data.root" and has_value:
            root = _folder(value)
        elif word in NAMES:
            names.append(word)
        else:
            raise UsageError(
                f"'{word}' means nothing to mprun data {words[0]}; "
                f"legal: {', '.join(NAMES)}, data.root=FOLDER{_near(word)}"
            )
    return Words(words[0], tuple(dict.fromkeys(names)) or NAMES, root)


def _folder(value: str) -> str | None:
    """The folder a value of data.root names, which may stand in quotes, as Hydra wants it."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    name = value[1:-1] if quoted else value
    if not name.strip() or "\0" in name:
        raise UsageError(f"data.root={name!r}: the name of a folder, or null for the default")
    return name if quoted or name != "null" else None


def _near(word: str) -> str:
    """The hint at the nearest legal word, in whatever case it was written."""
    legal = {"data.root": "data.root=...", **{name.lower(): name for name in NAMES}}
    found = nearest(word.partition("=")[0].lower(), legal)
    return f"; did you mean '{legal[found]}'?" if found else ""


def verify(names: Sequence[str], root: Path) -> None:
    """Show the state of every file of the sets.

    Raises:
        MprunError: one is missing or damaged.
    """
    from mprun.data.files import check

    found = {name: check(name, root) for name in names}
    for name, files in found.items():
        _show(name, files)
    _conclude(found, root)


def fetch(names: Sequence[str], root: Path) -> None:
    """Bring what is missing or damaged of the sets, and show every file.

    Raises:
        MprunError: a set could not be had; its files are as they were.
    """
    from mprun.data.files import check
    from mprun.data.sources import DownloadError, download

    found, failures = {}, []
    for name in names:
        before = [f.state for f in check(name, root)]
        try:
            if any(state != "ok" for state in before):
                _say(f"{name}: fetching into {root} ...")
                download(name, root)
        except DownloadError as error:
            failures.append(f"{name} ({error})")
        found[name] = check(name, root)
        _show(name, found[name], before)
    if failures:
        raise MprunError(
            f"could not fetch {', '.join(failures)}; the files are as they were: try again, or put "
            f"them there as torchvision does ({root}/NAME/raw/...)"
        )
    _conclude(found, root)


ACTIONS: dict[str, Callable[[Sequence[str], Path], None]] = {"fetch": fetch, "verify": verify}


def _show(name: str, files: Sequence[FileState], before: Sequence[str] | None = None) -> None:
    """A line per file; one that is good and was not `before` is called fetched or mended."""
    _say(f"{name} in {files[0].path.parent}")
    for file, was in zip(files, before or ["ok"] * len(files), strict=True):
        word = BROUGHT[was] if file.state == "ok" else file.state
        _say(f"  {word:8} {file.path.name}  {file.detail}".rstrip())


def _conclude(found: Mapping[str, Sequence[FileState]], root: Path) -> None:
    """The last line: all is good, or what mends the rest."""
    from mprun.data.files import fetch_command

    states = [f.state for files in found.values() for f in files]
    if bad := len(states) - states.count("ok"):
        broken = [name for name, files in found.items() if any(f.state != "ok" for f in files)]
        raise MprunError(
            f"{bad} of {len(states)} files missing or damaged; "
            f"mend them by `{fetch_command(broken, root)}`"
        )
    _say(f"all {len(states)} files are the published ones")


def _say(text: str) -> None:
    """A line to standard output, at once; what its encoding lacks is written as an escape."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
