"""Names that mprun chooses itself: runs and studies that begin at once get folders of their own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mprun.config.settings import study_request
from mprun.records import files
from mprun.records.run_folder import RunFolder
from mprun.study.study import new_study

BEGINNERS = 16


def run_folder() -> Path:
    folder = RunFolder(files.dated_folder())
    folder.close()
    return folder.path


def test_names_taken_at_once_are_distinct() -> None:
    """A name is taken where its folder is made, by the system: threads collide as processes do."""
    request = study_request("sweep", ["seeds=1"], None)
    ways: list[Callable[[], Path]] = [
        run_folder,
        lambda: files.new_folder(None),
        lambda: new_study(request, {"a": ("x=1",)}).folder,
    ]
    barrier = threading.Barrier(BEGINNERS)
    begin_at = math.ceil(time.time() + 0.3)  # the start of a second: all names begin alike

    def begin(number: int) -> list[Path]:
        barrier.wait()
        time.sleep(max(0.0, begin_at - time.time()))
        return [ways[(number + n) % len(ways)]() for n in range(2 * len(ways))]

    with ThreadPoolExecutor(BEGINNERS) as pool:
        found = [path for paths in pool.map(begin, range(BEGINNERS)) for path in paths]
    assert len({*found}) == len(found) == BEGINNERS * 6
    assert all(path.is_dir() for path in found)


def test_a_folder_that_was_not_used_is_removed() -> None:
    with files.dated_folder_if_used() as folder:
        assert folder.is_dir()
    assert not Path("outputs").exists()
    with files.dated_folder_if_used() as folder:
        (folder / "x").touch()
    assert (folder / "x").exists()
