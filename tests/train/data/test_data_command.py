"""`mprun data` verifies and fetches; through the command line, against a server of tiny files."""

from __future__ import annotations

import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from mprun.cli.file_commands import NAMES
from mprun.cli.main import main
from mprun.train.data import sources
from tests.train.data.conftest import Server
from tests.waiting import PATIENCE_S

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = sources.SIZE_BYTES


def contents(root: Path) -> dict[str, bytes]:
    """Every file of the data folder, the locks left out."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and p.suffix != ".lock"
    }


def both(published: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}/raw/{file}": data for name in NAMES for file, data in published.items()}


def expected(published: dict[str, bytes], file: str) -> str:
    data = published[file]
    return f"expected {len(data)} bytes with SHA-256 {sha256(data).hexdigest()}"


def test_the_names_are_those_of_the_table() -> None:
    assert tuple(sources.SHA256) == NAMES


# verify


def test_what_is_missing_or_damaged_is_told_with_what_mends_it(
    root: Path, published: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    raw = root / "MNIST" / "raw"
    (raw / TRAIN_LABELS).unlink()
    (raw / TEST_IMAGES).write_bytes(b"short")
    before = contents(root)
    assert main(["data", "verify", f"data.root={root}"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[1:5] == [
        f"  ok       {TRAIN_IMAGES}",
        f"  missing  {TRAIN_LABELS}  {expected(published, TRAIN_LABELS)}",
        f"  damaged  {TEST_IMAGES}  5 bytes with SHA-256 {sha256(b'short').hexdigest()},"
        f" {expected(published, TEST_IMAGES)}",
        f"  ok       {TEST_LABELS}",
    ]
    assert lines[5] == f"FashionMNIST in {root}/FashionMNIST/raw"
    assert [x.split()[0] for x in lines[6:]] == ["missing"] * 4
    assert err == (
        "mprun: 6 of 8 files missing or damaged; repair them with "
        f"`mprun data fetch MNIST FashionMNIST data.root={root}`\n"
    )
    assert contents(root) == before


# fetch


def test_fetch_brings_both_sets_once(
    server: Server, tmp_path: Path, published: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "new"
    assert main(["data", "fetch", f"data.root={root}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"MNIST: fetching into {root} ...",
        f"MNIST in {root}/MNIST/raw",
        f"  fetched  {TRAIN_IMAGES}",
    ]
    assert sum(x.startswith("  fetched  ") for x in lines) == 8
    assert lines[-1] == "all 8 files are the published ones"
    assert contents(root) == both(published)
    server.asked.clear()
    assert main(["data", "fetch", f"data.root={root}"]) == 0
    out, err = capsys.readouterr()
    assert [x.split()[0] for x in out.splitlines()].count("ok") == 8
    assert (err, server.asked) == ("", [])


@pytest.mark.usefixtures("no_network")
def test_without_network_fetch_says_so_and_leaves_the_files_alone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "MNIST" / "raw" / TEST_IMAGES).write_bytes(b"short")
    before = contents(root)
    assert main(["data", "fetch", f"data.root={root}"]) == 1
    out, err = capsys.readouterr()
    assert f"  damaged  {TEST_IMAGES}  5 bytes" in out
    assert err == (
        "mprun: could not fetch MNIST (Connection refused), FashionMNIST (Connection refused); the "
        "files are as they were: try again, or put them there as torchvision does "
        f"({root}/NAME/raw/...)\n"
    )
    assert contents(root) == before


def test_one_set_comes_though_the_other_does_not(
    server: Server, tmp_path: Path, published: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "MNIST").touch()
    assert main(["data", "fetch", f"data.root={tmp_path}"]) == 1
    assert "could not fetch MNIST (Not a directory" in capsys.readouterr().err
    assert sources.is_complete("FashionMNIST", tmp_path)


@pytest.mark.usefixtures("server")
def test_a_fetch_that_is_stopped_leaves_nothing_half_done(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "MNIST" / "raw" / TRAIN_IMAGES).write_bytes(b"short")
    before = contents(root)

    def stop(url: str, packed_root: Path, root: Path, packed: str, md5: str) -> None:
        (packed_root / packed).write_bytes(b"half")
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", stop)
    assert main(["data", "fetch", "MNIST", f"data.root={root}"]) == 143
    assert capsys.readouterr().err == "mprun: stopped by SIGTERM; no file is half written\n"
    assert contents(root) == before


# Words


MISTAKES = [
    ([], ["an action is missing; ", "legal: fetch, verify", "write mprun data verify"]),
    (["fecth"], ["'fecth' is not an action", "legal: fetch, verify", "did you mean 'fetch'?"]),
    (["verify", "FashionMnist"], ["did you mean 'FashionMNIST'?"]),
    (["fetch", "root=x"], ["'root=x'", "legal: MNIST, FashionMNIST, data.root=FOLDER"]),
    (["fetch", "--force"], ["mprun data has no option '--force'"]),
    (["fetch", "\x1b[31m"], [r"does not take '\x1b[31m'"]),
    (["fetch", "data.root="], ["data.root='': legal is the name of a folder"]),
    (["fetch", "data.root=a\0b"], ["data.root='a", "legal is the name of a folder"]),
    (["verify", "data.root=~nobody-here"], ["~nobody-here: there is no such home folder"]),
]


@pytest.mark.parametrize(("words", "fragments"), MISTAKES, ids=[ascii(w) for w, _ in MISTAKES])
def test_a_mistake_is_answered_in_one_line(
    words: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mprun: ")
    assert err[:-1].isprintable()
    assert [f for f in fragments if f not in err] == [], err
    assert list(Path.cwd().iterdir()) == []


def test_a_mistake_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from mprun.cli.main import main; status = main(['data', 'verify', 'mnist']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "AssertionError" not in done.stderr
    assert done.returncode == 2
