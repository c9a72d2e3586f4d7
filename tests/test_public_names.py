"""`import mprun`: what it gives, and that it costs nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import mprun
from mprun import OLDEST_PYTHON, OLDEST_TORCH, release
from mprun.config import compose
from mprun.config.reference import options
from mprun.records.mode_names import ALIASES, SHIPPED_MODES

ROOT = Path(__file__).resolve().parent.parent


def test_importing_it_does_not_import_torch() -> None:
    code = (
        "import sys, mprun\n"
        "assert {'Precision', 'Recipe', 'numerics', 'optim', 'policy'} <= set(dir(mprun))\n"
        "assert issubclass(mprun.UsageError, Exception) and mprun.Result(None).csv == ''\n"
        "assert issubclass(mprun.RunFailedError, Exception)\n"
        "assert 'torch' not in sys.modules and 'yaml' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_are_those_of_the_packages() -> None:
    from mprun import numerics, optim
    from mprun.precision import Precision
    from mprun.recipe import Recipe

    assert (mprun.Precision, mprun.Recipe) == (Precision, Recipe)
    assert (mprun.optim, mprun.numerics) == (optim, numerics)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'mprun' has no attribute 'Precison'"):
        mprun.Precison  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", options("precision"))
def test_a_policy_is_the_one_that_a_run_of_that_mode_has(name: str) -> None:
    section = compose([f"precision={name}"]).resolved["precision"]
    row = asdict(mprun.policy(name))
    assert row == {key: section[key] for key in row}


def test_an_unknown_policy_is_one_line_with_the_legal_names() -> None:
    with pytest.raises(
        ValueError, match=r"no precision mode is named 'bf16_st'; did you mean"
    ) as e:
        mprun.policy("bf16_st")
    assert all(name in str(e.value) for name in (*SHIPPED_MODES, *ALIASES))
    assert "\n" not in str(e.value)


def test_every_mode_is_a_file_and_other_names_stand_for_modes() -> None:
    assert {*SHIPPED_MODES} == {*options("precision")}
    assert {*ALIASES.values()} <= {*SHIPPED_MODES}
    assert not {*ALIASES} & {*SHIPPED_MODES}
    assert mprun.policy("mixed_bfloat16") == mprun.policy("bf16_mixed")
    with pytest.raises(ValueError, match="did you mean 'bf16_mixed'"):
        mprun.policy("bf16")


@pytest.mark.parametrize(
    ("name", "found", "oldest"),
    [("Python", "3.9.18", OLDEST_PYTHON), ("PyTorch", "2.9.1+cpu", OLDEST_TORCH)],
)
def test_an_older_python_or_pytorch_is_refused_in_one_line(
    name: str, found: str, oldest: tuple[int, int]
) -> None:
    """The command and the import; the version is the one that Python, or the installation, says."""
    says = {"Python": "sys.version =", "PyTorch": "importlib.metadata.version = lambda name:"}

    def ended(program: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys, importlib.metadata; sys.argv = [{program!r}]; "
        code += f"{says[name]} {found!r}; import mprun"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    line = f"mprun: {name} >= {'.'.join(map(str, oldest))} is needed, and this is {found}: "
    command, imported = ended("/usr/bin/mprun"), ended("other.py")
    assert command.returncode == 2
    assert command.stderr.startswith(line)
    assert command.stderr.count("\n") == 1
    assert imported.returncode == 1
    assert imported.stderr.splitlines()[-1].startswith(f"ImportError: {line}")


def test_the_oldest_versions_are_those_that_pip_is_told() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for start, oldest in (('requires-python = "', OLDEST_PYTHON), ('    "torch', OLDEST_TORCH)):
        (told,) = re.findall(rf"^{start}>=([\d.]+)", project, re.MULTILINE)
        assert release(told) == oldest
