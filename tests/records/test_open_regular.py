"""What is no regular file is never waited for, and what is too large is never read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.records.reader import open_regular, read_bytes
from tests.study.compare.folders import write_run

NOT_REGULAR = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
}
TRAIN = ["recipe=linear", "precision=bf16_mixed"]
FILES = {
    "summary.json": ("runs/a/summary.json", ["compare", "runs", "compare.report=false"]),
    "config.yaml": ("run/config.yaml", ["run.resume=run"]),
    "sweep.json": ("study/sweep.json", ["sweep", "run.resume=study"]),
    "layers": ("own.yaml", [*TRAIN, "precision.layers_file=own.yaml"]),
    "ops": ("own.txt", [*TRAIN, "op_lists=hmp", "op_lists.lower_file=own.txt"]),
    "weights": ("own.pt", [*TRAIN, "train.init_from=own.pt"]),
    "option": ("own/recipe/mine.yaml", ["--config-dir", "own", "recipe=mine"]),
    "data": ("sets/MNIST/raw/t10k-labels-idx1-ubyte", ["data", "verify", "data.root=sets"]),
}


@pytest.mark.parametrize("kind", NOT_REGULAR)
@pytest.mark.parametrize("file", FILES)
def test_a_command_that_reads_something_else(
    file: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, words = Path(FILES[file][0]), FILES[file][1]
    path.parent.mkdir(parents=True, exist_ok=True)
    make: Callable[[Path], object] = NOT_REGULAR[kind]
    make(path)
    assert main(words) in (1, 2)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert path.name in out + err
    assert err.count("\n") == 1


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="it is larger than 0 KiB") as caught:
        open_regular(tmp_path / "link", 4)
    assert caught.value.strerror == "it is larger than 0 KiB"


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(IsADirectoryError):
            open_regular(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_one_bad_run_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs/a"))
    Path("runs/b").mkdir()
    os.mkfifo("runs/b/summary.json")
    assert main(["compare", "runs", "compare.report=false"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "skipped runs/b: summary.json cannot be read: it is not a regular file" in text
