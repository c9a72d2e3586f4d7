"""What a wheel and an sdist hold."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    # tests/kernels/test_prebuilt.py compiles the library of a wheel; it takes ten seconds.
    env = {**os.environ, "CC": "false"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=out, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def expected_files() -> set[str]:
    code = {str(p.relative_to(ROOT)) for p in (ROOT / "mprun").rglob("*.py")}
    pages = {str(p.relative_to(ROOT)) for p in (ROOT / "mprun/report").glob("report.*")}
    pages |= {str(p.relative_to(ROOT)) for p in (ROOT / "mprun/report").glob("templates/*")}
    conf = {f"mprun/conf/{p.relative_to(ROOT / 'conf')}" for p in (ROOT / "conf").rglob("*.yaml")}
    return (
        code | pages | conf | {f"mprun/recipes/{p.name}" for p in (ROOT / "recipes").glob("*.py")}
    )


def test_a_wheel_holds_conf_and_recipes_and_runs_from_any_folder(
    built: Path, tmp_path: Path
) -> None:
    wheel = next(built.glob("*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected_files() <= names
    assert not {
        n for n in names if n.startswith(("tests/", "conf/", "recipes/", "benchmarks/", "docs/"))
    }

    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site)}
    # Where mprun is installed editable, its finder answers for a package the wheel lacks.
    script = (
        "import sys, mprun.cli.main, mprun.run, mprun.conf, mprun.recipes.mnist\n"
        "status = mprun.cli.main.main(['recipe=linear', 'train.max_steps=3', 'run.dir=run'])\n"
        "found = [m.__file__ for name, m in sys.modules.items() if name.startswith('mprun')]\n"
        "print('FILES', *found, sep='\\n')\n"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    files = done.stdout.rpartition("FILES")[2].split()
    assert len(files) > 30
    assert all(f.startswith(str(site)) for f in files), "not the wheel alone answered"


def test_an_sdist_holds_what_a_wheel_is_built_from(built: Path) -> None:
    sdist = next(built.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    for name in expected_files():
        at_the_top = name.startswith(("mprun/conf/", "mprun/recipes/"))
        assert (name.removeprefix("mprun/") if at_the_top else name) in names
    assert "pyproject.toml" in names
