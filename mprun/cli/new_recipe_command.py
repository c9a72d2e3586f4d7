"""`mprun new-recipe`: a small recipe of your own that works, and a test of it.

    mprun new-recipe my_model        writes my_model.py and test_my_model.py

Change the functions of my_model.py one by one to your model, data and loss; `mprun
recipe=my_model.py` trains it, every other command takes it too, and `pytest test_my_model.py` says
whether it still learns. Existing files are never overwritten.
"""

from __future__ import annotations

import keyword
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_OK, UsageError
from mprun.records.console import print_line, stdout_console
from mprun.records.files import write_new

COMMAND = Command("new-recipe", instead=())


def new_recipe_command(args: Sequence[str]) -> int:
    """Run `mprun new-recipe`; the exit status.

    Raises:
        UsageError: the name cannot be one of a module, or a file exists.
    """
    name = _name(parse_arguments(COMMAND, args).overrides)
    texts = {
        Path(f"{name}.py"): _template("recipe", name),
        Path(f"test_{name}.py"): _template("test", name),
    }
    for path in texts:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} already exists; choose another name, or remove it")
    for path, text in texts.items():
        try:
            write_new(path, text.encode())
        except FileExistsError:  # made since the check above
            raise UsageError(f"{path} already exists; choose another name, or remove it") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror})") from None
    console = stdout_console()
    print_line(console, f"written: {', '.join(map(str, texts))}")
    print_line(console, f"train it: mprun recipe={name}.py precision=bf16_mixed")
    print_line(console, f"test it: pytest test_{name}.py")
    return EXIT_OK


def _name(args: Sequence[str]) -> str:
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


def _template(kind: str, name: str) -> str:
    text = (files("mprun.cli") / f"{kind}_template.txt").read_text(encoding="utf-8")
    return text.replace("@NAME@", name)
