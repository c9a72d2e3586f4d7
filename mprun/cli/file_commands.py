"""Commands that write or check files beside the runs: `data`, `export`, `new-recipe`."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_OK, MprunError, UsageError, hint
from mprun.records.console import print_line, stdout_console
from mprun.records.files import write_new
from mprun.records.listing import RUNS
from mprun.train.signals import StopSignals, interruptible

# ---- data ----------------------------------------------------------------------------------------

ACTIONS = ("fetch", "verify")
# The sets with published files; the keys of `sources.SHA256`, known without torch
NAMES = ("MNIST", "FashionMNIST")
# The word for a good file, by its state before
OK_WORDS = {"ok": "ok", "missing": "fetched", "damaged": "repaired"}


def data_command(args: Sequence[str]) -> int:
    """Run `mprun data`; the exit status."""
    action, names, root = _parsed(parse_arguments(DATA, args).overrides)

    def check_or_fetch(stop: StopSignals) -> int:
        from mprun.train.data.sources import find_root

        _check_files(names, find_root(root), action == "fetch")
        return EXIT_OK

    return interruptible(check_or_fetch, "; no file is half written")


def _parsed(args: Sequence[str]) -> tuple[str, Sequence[str], str | None]:
    """The action, the names of the sets, and the folder or None."""
    from mprun.config.validate import check_name

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
            root = None if value == "null" else value.strip("'\"")
            check_name(key, root, "a folder")
        elif text in NAMES:
            names.append(text)
        else:
            raise UsageError(
                f"mprun data {args[0]} does not take {text!r}; "
                f"legal: {', '.join(NAMES)}, data.root=FOLDER{hint(text, NAMES)}"
            )
    return args[0], tuple(dict.fromkeys(names)) or NAMES, root


def _check_files(names: Sequence[str], root: Path, fetches: bool) -> None:
    """Print the state of every file of the sets; with `fetches`, first download those not ok."""
    from mprun.train.data.sources import DownloadError, check, download, fetch_command

    states, broken, failures = [], [], []
    for name in names:
        before = files = check(name, root)
        if fetches and any(file.state != "ok" for file in files):
            print(f"{name}: fetching into {root} ...", flush=True)  # which may take minutes
            try:
                download(name, root)
            except DownloadError as error:
                failures.append(f"{name} ({error})")
            files = check(name, root)
        print(f"{name} in {files[0].path.parent}")
        for file, earlier in zip(files, before, strict=True):
            word = OK_WORDS[earlier.state] if file.state == "ok" else file.state
            print(f"  {word:8} {file.path.name}  {file.detail}".rstrip(), flush=True)
        states += [file.state for file in files]
        broken += [name] if any(file.state != "ok" for file in files) else []
    if failures:
        raise MprunError(
            f"could not fetch {', '.join(failures)}; the files are as they were: try again, or put "
            f"them there as torchvision does ({root}/NAME/raw/...)"
        )
    if broken:
        bad = len(states) - states.count("ok")
        raise MprunError(
            f"{bad} of {len(states)} files missing or damaged; "
            f"repair them with `{fetch_command(broken, root)}`"
        )
    print(f"all {len(states)} files are the published ones")


DATA = Command(
    "data",
    data_command,
    """`mprun data`: check the published files, and download those that are missing or damaged.

        mprun data verify [NAME ...] [data.root=FOLDER]    changes nothing
        mprun data fetch [NAME ...] [data.root=FOLDER]     downloads what is missing or damaged

    Both list every file of the data sets. The exit status is 0 if all are the published ones, else
    1.
    """,
    takes_run=False,
)


# ---- export --------------------------------------------------------------------------------------

USAGE = "write mprun export RUN FILE, such as mprun export outputs/DATE/TIME model.safetensors"


def export_command(args: Sequence[str]) -> int:
    """Run `mprun export`; the exit status."""
    paths = parse_arguments(EXPORT, args).overrides
    if len(paths) != 2:
        raise UsageError(f"mprun export takes a run and a file, not {len(paths)} names; {USAGE}")
    run, target = map(Path, paths)
    if not run.is_dir():
        raise UsageError(f"{run} is not a run's folder; {USAGE}")

    from mprun.records.run_record import read_summary
    from mprun.train.init_from import weights_of, write_file

    summary, state = read_summary(run), weights_of(run)
    facts = {
        "mprun_version": summary.mprun_version,
        "recipe": summary.recipe,
        "precision": summary.precision,
        "seed": str(summary.seed),
        "steps": str(summary.steps),
    }
    try:
        write_file(state, target, facts)
    except OSError as error:
        raise UsageError(f"{target} cannot be written ({error.strerror})") from None
    numbers = sum(x.numel() for x in state.values())
    dtypes = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in state.values()}))
    print_line(
        stdout_console(),
        f"{target}: {len(state)} tensors, {numbers:,} numbers ({dtypes}), {summary.recipe} in "
        f"{summary.precision} after {summary.steps} steps",
    )
    return EXIT_OK


EXPORT = Command(
    "export",
    export_command,
    """`mprun export`: a run's weights for other programs.

        mprun export outputs/DATE/TIME model.safetensors
        mprun export outputs/DATE/TIME model.pt          a state_dict of PyTorch

    The weights are those of the run's last checkpoint, in the dtype that they were stored in, under
    the model's own names. `mprun.load(RUN).model` has a model's own ways to save itself.
    """,
    takes_run=False,
    folders_of=RUNS,
)


# ---- new-recipe ----------------------------------------------------------------------------------


def new_recipe_command(args: Sequence[str]) -> int:
    """Run `mprun new-recipe`; the exit status."""
    name = _module_name(parse_arguments(NEW_RECIPE, args).overrides)
    written = {"recipe": Path(f"{name}.py"), "test": Path(f"test_{name}.py")}
    for path in written.values():
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} already exists; choose another name, or remove it")
    for kind, path in written.items():
        text = (files("mprun.cli") / f"{kind}_template.txt").read_text(encoding="utf-8")
        try:
            write_new(path, text.replace("@NAME@", name).encode())
        except OSError as error:  # also: made since the check above
            raise UsageError(f"{path} cannot be written ({error.strerror})") from None
    console = stdout_console()
    print_line(console, f"written: {', '.join(map(str, written.values()))}")
    print_line(console, f"train it: mprun recipe={name}.py precision=bf16_mixed")
    print_line(console, f"test it: pytest test_{name}.py")
    return EXIT_OK


def _module_name(args: Sequence[str]) -> str:
    """The recipe's name: that of a Python module."""
    if len(args) != 1:
        received = f"{len(args)} names" if args else "no name"
        raise UsageError(f"mprun new-recipe takes one name, not {received}: mprun new-recipe NAME")
    name = args[0].removesuffix(".py")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(
            f"new-recipe {args[0]}: legal is the name of a Python module, letters, digits and _ "
            "that begin with a letter; it is written into the current folder"
        )
    # Python looks for modules in the script's folder first
    if name in sys.stdlib_module_names or name in ("torch", "mprun", "pytest"):
        raise UsageError(
            f"new-recipe {name}: this is the name of a module of Python or PyTorch, which the file "
            f"would hide; choose another one: my_{name}"
        )
    return name


NEW_RECIPE = Command(
    "new-recipe",
    new_recipe_command,
    """`mprun new-recipe`: a small recipe of your own that works, and a test of it.

        mprun new-recipe my_model        writes my_model.py and test_my_model.py

    Change the functions of my_model.py one by one to your model, data and loss; `mprun
    recipe=my_model.py` trains it, every other command takes it too, and `pytest test_my_model.py`
    says whether it still learns. Existing files are never overwritten.
    """,
    takes_run=False,
)
