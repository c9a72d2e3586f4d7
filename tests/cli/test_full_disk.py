"""Commands whose results cannot be written: one line, status 1, and the results on the screen."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mprun.cli.main import main

pytestmark = pytest.mark.usefixtures("native_is_fast")

LINEAR = ["recipe=linear", "precision=bf16_mixed", "run.dir=run"]
# One runner writes the files of all questions: one of a step, one of several modes, and the gate
COMMANDS = {
    "memory": ["memory", *LINEAR],
    "trace": ["trace", *LINEAR],
    "check": ["check", *LINEAR],
}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, a file that grows larger than `size` bytes is an error, as on a full disk.

    Python would cut its bytecode files too and fail at the next import, so it writes none.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = before


@pytest.mark.parametrize("command", COMMANDS)
def test_results_that_cannot_be_written(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most(100):
        assert main(COMMANDS[command]) == 1
    out, err = capsys.readouterr()
    assert err == (
        f"mprun: run/{command}.json cannot be written (File too large); make room, or name another "
        "folder with run.dir=FOLDER, and run the command again\n"
    )
    assert "linear" in out
    assert list(Path("run").iterdir()) == []


def test_pictures_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMANDS["memory"], "memory.picture=false", "run.dir=whole"]) == 0
    size = Path("whole/memory.json").stat().st_size
    with files_of_at_most(size):
        assert main(COMMANDS["memory"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("mprun: run/memory.png cannot be written (File too large); make room")
    assert err.count("\n") == 1
    assert [path.name for path in Path("run").iterdir()] == ["memory.json"]
