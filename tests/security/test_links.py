"""Nothing is written through a link in a folder that someone else prepared."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.config import compose
from mprun.config.settings import study_request
from mprun.errors import UsageError
from mprun.records.files import write_atomic
from mprun.records.run_folder import RunFolder
from mprun.study.study import new_study, resumed_study
from mprun.train.data import sources
from tests.security.records import write_config

FILES = (
    *("config.yaml", "metrics.jsonl", "summary.json", "fp_exceptions.json", "traceback.txt"),
    *("checkpoints/last.pt", "checkpoints/.lock", "logger.json"),
)
FOLDERS = ("checkpoints", "tensorboard")


def state_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def outside() -> Path:
    """A folder with files of the user."""
    folder = Path("outside")
    folder.mkdir()
    for name in ("file", "last.pt", "summary.json"):
        (folder / name).write_text("the user's own", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
@pytest.mark.parametrize("resume", [True, False])
def test_a_link_in_a_runs_folder_is_refused(name: str, resume: bool, outside: Path) -> None:
    before = state_of(outside)
    run = Path("run")
    if resume:
        write_config(run)
    link = run / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to((outside if name in FOLDERS else outside / "file").absolute())
    with pytest.raises(UsageError, match=f"^run/{name} is a link, and a record is not read or"):
        RunFolder(run, keep=(lambda line: True) if resume else None)
    if resume:
        with pytest.raises(UsageError, match=f"^run/{name} is a link"):
            compose(["run.resume=run"])
    assert state_of(outside) == before


def test_a_run_leaves_what_links_lead_to(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with the two links of an attack."""
    before = state_of(outside)
    write_config(Path("run"), train__lr=1.0)
    Path("run/checkpoints").symlink_to(outside.absolute())
    Path(f"run/.config.yaml.{os.getpid()}.tmp").symlink_to((outside / "file").absolute())
    assert main(["run.resume=run"]) == 2
    Path("run/checkpoints").unlink()
    assert main(["run.resume=run"]) == 0
    assert state_of(outside) == before


def test_a_temporary_file_is_made_by_this_process(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a name that was guessed does not lead out of the folder."""
    monkeypatch.setattr(secrets, "token_hex", lambda length: "known")
    planted = Path(f".summary.json.{os.getpid()}-known.tmp")
    planted.symlink_to(outside / "file")
    before = state_of(outside)
    with pytest.raises(FileExistsError):
        write_atomic(Path("summary.json"), b"text")
    assert state_of(outside) == before
    assert planted.is_symlink()


def test_temporary_names_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    whole = Path.replace

    def replace(self: Path, target: Path) -> Path:
        names.append(self.name)
        return whole(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    for _ in range(3):
        write_atomic(Path("file"), b"")
    assert len(set(names)) == 3


def test_a_traceback_replaces_a_link(outside: Path) -> None:
    """One that appeared while the run went on."""
    folder = RunFolder(Path("run"))
    Path("run/traceback.txt").symlink_to((outside / "file").absolute())
    before = state_of(outside)
    path = folder.write("traceback.txt", "Traceback: ...")
    folder.close()
    assert state_of(outside) == before
    assert path.read_text(encoding="utf-8") == "Traceback: ..."


@pytest.mark.parametrize("name", ["a-seed0", "preset", "sweep.json", ".lock", "report.html"])
def test_a_link_in_a_resumed_study_is_refused(name: str, outside: Path) -> None:
    new_study(study_request("sweep", ["run.dir=study", "seeds=1"], None), {"a": ("recipe=linear",)})
    link = Path("study", name)
    if link.exists():
        link.rename(outside / name)
    link.symlink_to((outside / name).absolute())
    before = state_of(outside)
    with pytest.raises(UsageError, match=f"^study/{name} is a link"):
        resumed_study("sweep", Path("study"))
    assert state_of(outside) == before


def test_the_lock_of_a_data_folder_is_no_link(outside: Path) -> None:
    Path("data").mkdir()
    Path("data/.MNIST.lock").symlink_to((outside / "file").absolute())
    before = state_of(outside)
    with pytest.raises(sources.DownloadError):
        sources.download("MNIST", Path("data"))
    assert state_of(outside) == before
