"""What is recorded of the machine, the versions and the code's commit."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import mprun
from mprun.records.run_record import Hardware
from mprun.train.machine import machine
from tests.schema import conforms

CPU = torch.device("cpu")


# Versions


def test_versions_name_python_and_the_packages() -> None:
    found = machine.versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == version("torch")
    assert set(machine.PACKAGES) <= set(found)


# The commit


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree that mprun seems to run from."""
    for name in [n for n in os.environ if n.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "mprun").mkdir()
    module = tmp_path / "mprun" / "__init__.py"
    module.write_text("# code\n")
    monkeypatch.setattr(mprun, "__file__", str(module))
    return tmp_path


def commit(tree: Path) -> None:
    """Make the tree a repository of one commit, with a tag that must not show."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    for arguments in (
        ["init", "--quiet"],
        ["add", "mprun"],
        [*who, "commit", "--quiet", "--no-gpg-sign", "--no-verify", "-m", "One"],
        ["tag", "v1"],
    ):
        subprocess.run(["git", *arguments], cwd=tree, check=True)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """The commit is asked for once in a process."""
    machine.git_commit.cache_clear()
    yield
    machine.git_commit.cache_clear()


def test_the_commit_is_that_of_the_code_a_process_runs(tree: Path) -> None:
    commit(tree)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    )
    assert machine.git_commit() == head.stdout.strip() != ""
    (tree / "mprun" / "__init__.py").write_text("# changed while it runs\n")
    assert machine.git_commit() == head.stdout.strip()


def test_a_changed_repository_is_dirty(tree: Path) -> None:
    commit(tree)
    (tree / "mprun" / "__init__.py").write_text("# other code\n")
    assert re.fullmatch("[0-9a-f]{40}-dirty", machine.git_commit() or "")


@pytest.mark.usefixtures("tree")
def test_an_installed_package_has_no_commit() -> None:
    assert machine.git_commit() is None


def test_a_package_below_a_strangers_repository_has_no_commit(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment inside somebody's project: that commit says nothing about mprun."""
    commit(tree)
    module = tree / "venv" / "mprun" / "__init__.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(mprun, "__file__", str(module))
    assert machine.git_commit() is None


# The machine


def test_the_hardware_is_described() -> None:
    found = machine.hardware(CPU, ["float32", "bfloat16"])
    assert conforms(found, Hardware)
    assert found.device == "cpu"
    assert found.accelerated["float32"] is True
    assert set(found.accelerated) == {"float32", "bfloat16"}
    assert torch.backends.cpu.get_cpu_capability() in found.name
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.memory_bytes is None or found.memory_bytes > 2**20
