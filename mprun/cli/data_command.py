"""`mprun data`: check the published files, and download those that are missing or damaged.

    mprun data verify [NAME ...] [data.root=FOLDER]    changes nothing
    mprun data fetch [NAME ...] [data.root=FOLDER]     downloads what is missing or damaged

Both list every file of the data sets. The exit status is 0 if all are the published ones, else 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_OK, MprunError, UsageError, hint, nearest
from mprun.train.signals import StopSignals, interruptible

if TYPE_CHECKING:
    from mprun.train.data.sources import FileState

ACTIONS = ("fetch", "verify")
# The sets with published files; the keys of `sources.SHA256`, known without torch
NAMES = ("MNIST", "FashionMNIST")
COMMAND = Command("data", instead=(*ACTIONS, *NAMES, "data.root="))

# The word for a good file, by its state before
OK_WORDS = {"ok": "ok", "missing": "fetched", "damaged": "repaired"}


def data_command(args: Sequence[str]) -> int:
    """Run `mprun data`; the exit status.

    Raises:
        UsageError: an argument has no meaning here.
        MprunError: a file is missing or damaged, or cannot be downloaded (status 1).
    """
    action, names, root = parse(parse_arguments(COMMAND, args).overrides)

    def check_or_fetch(stop: StopSignals) -> int:
        from mprun.train.data.sources import find_root

        (fetch if action == "fetch" else verify)(names, find_root(root))
        return EXIT_OK

    return interruptible(check_or_fetch, "; no file is half written")


def parse(args: Sequence[str]) -> tuple[str, Sequence[str], str | None]:
    """The action, the names of the sets, and the folder or None.

    Raises:
        UsageError: an argument that has no meaning here.
    """
    if not args or args[0] not in ACTIONS:
        received = f"'{args[0]}' is not an action" if args else "an action is missing"
        near = hint(args[0], ACTIONS) if args else ""
        raise UsageError(
            f"{received}; legal: {', '.join(ACTIONS)}{near}; "
            "write mprun data verify [NAME ...] [data.root=FOLDER]"
        )
    names, root = [], None
    for text in args[1:]:
        key, has_value, value = text.partition("=")
        if key == "data.root" and has_value:
            root = _folder(value)
        elif text in NAMES:
            names.append(text)
        else:
            legal = {"data.root": "data.root=...", **{name.lower(): name for name in NAMES}}
            near_key = nearest(key.lower(), legal)
            meant = f"; did you mean '{legal[near_key]}'?" if near_key else ""
            raise UsageError(
                f"mprun data {args[0]} does not take '{text}'; "
                f"legal: {', '.join(NAMES)}, data.root=FOLDER{meant}"
            )
    return args[0], tuple(dict.fromkeys(names)) or NAMES, root


def _folder(value: str) -> str | None:
    """The folder in a value of data.root, which may have quotes, as Hydra wants it."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    name = value[1:-1] if quoted else value
    if not name.strip() or "\0" in name:
        raise UsageError(f"data.root={name!r}: legal is the name of a folder, or null")
    return name if quoted or name != "null" else None  # 'null' in quotes is a folder's name


def verify(names: Sequence[str], root: Path) -> None:
    """Print the state of every file of the sets.

    Raises:
        MprunError: one is missing or damaged.
    """
    from mprun.train.data.sources import check

    files = {name: check(name, root) for name in names}
    for name in names:
        _print_files(name, files[name])
    _conclude(files, root)


def fetch(names: Sequence[str], root: Path) -> None:
    """Download what is missing or damaged of the sets, and print every file.

    Raises:
        MprunError: a set cannot be downloaded; its files are as they were.
    """
    from mprun.train.data.sources import DownloadError, check, download

    files, failures = {}, []
    for name in names:
        before = [f.state for f in check(name, root)]
        try:
            if any(state != "ok" for state in before):
                _print(f"{name}: fetching into {root} ...")
                download(name, root)
        except DownloadError as error:
            failures.append(f"{name} ({error})")
        files[name] = check(name, root)
        _print_files(name, files[name], before)
    if failures:
        raise MprunError(
            f"could not fetch {', '.join(failures)}; the files are as they were: try again, or put "
            f"them there as torchvision does ({root}/NAME/raw/...)"
        )
    _conclude(files, root)


def _print_files(
    name: str, files: Sequence[FileState], before: Sequence[str] | None = None
) -> None:
    """A line per file; one that is ok and was not `before` is called fetched or repaired."""
    _print(f"{name} in {files[0].path.parent}")
    for file, state in zip(files, before or ["ok"] * len(files), strict=True):
        word = OK_WORDS[state] if file.state == "ok" else file.state
        _print(f"  {word:8} {file.path.name}  {file.detail}".rstrip())


def _conclude(files: Mapping[str, Sequence[FileState]], root: Path) -> None:
    """The last line: all files are ok, or the command that repairs the others."""
    from mprun.train.data.sources import fetch_command

    states = [f.state for of_set in files.values() for f in of_set]
    if bad := len(states) - states.count("ok"):
        broken = [name for name, of_set in files.items() if any(f.state != "ok" for f in of_set)]
        raise MprunError(
            f"{bad} of {len(states)} files missing or damaged; "
            f"repair them with `{fetch_command(broken, root)}`"
        )
    _print(f"all {len(states)} files are the published ones")


def _print(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # a download of minutes follows the line that announces it
