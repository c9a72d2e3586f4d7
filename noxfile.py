"""The tests on each PyTorch and Python that mprun is tried with: `nox -s tests-2.11`.

`nox -l` lists all. A session makes an environment, runs `make test` and one of eight parts of the
exhaustive tests in it, and records in docs/reference/versions/ what the page of versions is made
from (docs/versions.py). SHARD=3/8 chooses the part; by default the day does. Needs nox and uv.
"""

from __future__ import annotations

import os
import re
from datetime import date
from pathlib import Path
from typing import NamedTuple

import nox

nox.options.default_venv_backend = "uv"  # which brings the Pythons, too
PROJECT = nox.project.load_toml("pyproject.toml")["project"]


class Tried(NamedTuple):
    """An environment to try mprun in."""

    python: str
    torch: str = ""
    """Its versions, as pip writes them; empty for the newest."""
    without: tuple[str, ...] = ()
    """Development requirements that have no wheel for this Python."""
    resolution: str = "highest"
    """Of the other requirements: highest, or lowest-direct for the bounds in pyproject.toml."""


ENVIRONMENTS = {
    "2.11": Tried("3.10", "==2.11.*"),
    "2.12": Tried("3.12", "==2.12.*"),
    "2.13": Tried("3.12", "==2.13.*"),
    "2.14": Tried("3.11", "==2.14.*"),
    "newest": Tried("3.15", without=("mlflow",)),  # the newest Python that PyTorch has wheels for
    "lowest": Tried("3.10", resolution="lowest-direct"),
}


def tests(session: nox.Session, name: str, tried: Tried) -> None:
    """Install, run the tests by the Makefile's commands, and record how they ended."""
    needed = [text for text in PROJECT["optional-dependencies"]["dev"] if text != "mprun[docs]"]
    needed = [text for text in needed if re.split(r"[^\w-]", text)[0] not in tried.without]
    if tried.without:
        session.warn(f"without {', '.join(tried.without)}: no wheel for Python {tried.python}")
    session.install(
        *(f"--resolution={tried.resolution}", "-e", ".[docs]", *needed, f"torch{tried.torch}")
    )
    venv = Path(session.virtualenv.location)
    for stamp in (".installed", ".installed-dev"):  # `make` installs nothing
        (venv / stamp).touch()
    shard = os.environ.get("SHARD") or f"{date.today().toordinal() % 8 + 1}/8"
    reports = []
    for target in (["test"], ["test-exhaustive", f"SHARD={shard}"]):
        reports.append(str(venv / f"{target[0]}.xml"))
        options = (f"VENV={venv}", f"JUNIT={reports[-1]}")
        session.run("make", *target, *options, external=True, success_codes=[0, 2])
    session.run("python", "-m", "docs.versions", name, *reports)  # status 1 if a test failed


for name, tried in ENVIRONMENTS.items():

    @nox.session(name=f"tests-{name}", python=tried.python, venv_params=["--seed"])  # with pip
    def _(session: nox.Session, name: str = name, tried: Tried = tried) -> None:
        tests(session, name, tried)
