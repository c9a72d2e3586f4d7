"""What a wheel and an sdist hold, and that an installation of them trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BARE = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
# tests/precision/kernels/test_prebuilt.py compiles the library of a wheel; it takes ten seconds.
ENVIRONMENT = {**BARE, "CC": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def done(command: Sequence[str | Path], folder: Path) -> str:
    """What a command that must succeed prints."""
    ended = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=folder, env=ENVIRONMENT
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], out)
    return out


def expected_files() -> set[str]:
    code = {str(p.relative_to(ROOT)) for p in (ROOT / "mprun").rglob("*.py")}
    pages = {str(p.relative_to(ROOT)) for p in (ROOT / "mprun/study/report").glob("report.*")}
    pages |= {str(p.relative_to(ROOT)) for p in (ROOT / "mprun/study/report").glob("templates/*")}
    pages |= {str(p.relative_to(ROOT)) for p in (ROOT / "mprun/inspect/check").glob("*.yaml")}
    conf = {f"mprun/conf/{p.relative_to(ROOT / 'conf')}" for p in (ROOT / "conf").rglob("*.yaml")}
    return (
        code | pages | conf | {f"mprun/recipes/{p.name}" for p in (ROOT / "recipes").glob("*.py")}
    )


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of a new environment with all that is installed here, but not mprun.

    A package is a link, so nothing is downloaded; PyTorch takes several GB. What names a package is
    copied: uv does not follow links to it.
    """
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for key in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(key)).iterdir():
            here = site / entry.name
            if entry.name.startswith(("mprun", "__editable__")) or here.exists():
                continue
            if entry.suffix == ".dist-info":
                shutil.copytree(entry, here, ignore=shutil.ignore_patterns("licenses"))
            else:
                here.symlink_to(entry)
    return folder / "bin" / "python"


def assert_trains(python: Path, folder: Path) -> None:
    """The command is there and works from any folder, and the installation answers."""
    command = python.with_name("mprun")
    assert "recipe=" in done([command, "--help"], folder)
    done([command, "recipe=linear", "train.max_steps=3", "run.dir=run"], folder)
    assert (folder / "run" / "summary.json").is_file()
    where = done([python, "-c", "import mprun; print(mprun.__file__)"], folder)
    assert where.startswith(str(python.parents[1]))


def test_a_wheel_holds_conf_and_recipes_and_its_installation_trains(
    built: Path, python: Path, in_empty_folder: Path
) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected_files() <= names
    assert not {
        n for n in names if n.startswith(("tests/", "conf/", "recipes/", "benchmarks/", "docs/"))
    }
    pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    done([*pip, "--no-index", wheel], in_empty_folder)
    assert_trains(python, in_empty_folder)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_uv_installs_the_sources_and_they_train(
    built: Path, python: Path, tmp_path: Path, in_empty_folder: Path
) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    uv = ["uv", "pip", "install", "--offline", "--no-build-isolation", "--python", python]
    done([*uv, "."], tmp_path / sdist.name.removesuffix(".tar.gz"))
    assert_trains(python, in_empty_folder)


def test_an_sdist_holds_what_a_wheel_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    for name in expected_files():
        at_the_top = name.startswith(("mprun/conf/", "mprun/recipes/"))
        assert (name.removeprefix("mprun/") if at_the_top else name) in names
    assert {"pyproject.toml", "setup.py", "LICENSE"} <= names


def test_wheel_and_sdist_hold_the_licence(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    own = (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(name) == own
        metadata = archive.read(name.replace("licenses/LICENSE", "METADATA")).decode()
    with tarfile.open(sdist) as archive:
        held = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/LICENSE")
        assert held is not None
        assert held.read() == own
    fields = message_from_string(metadata)
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields.get_all("License-File") == ["LICENSE"]
