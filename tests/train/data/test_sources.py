"""Where the image sets come from, and what is said when they cannot be had."""

from __future__ import annotations

import errno
import os
import shlex
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from filelock import FileLock

from mprun.errors import UsageError
from mprun.train.data import DataRequest, TensorSet, image_splits, sources
from tests.train.data.conftest import TEST, TRAIN, Server, images, labels


@pytest.fixture
def tiny_generated(monkeypatch: pytest.MonkeyPatch) -> TensorSet:
    """Two samples in place of the generated set, which takes seconds to draw."""
    part = TensorSet(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))
    monkeypatch.setattr(sources, "draw", lambda: (part, part))
    return part


# Local files


@pytest.mark.usefixtures("no_network")
def test_local_files_are_read_as_stored(root: Path) -> None:
    splits = image_splits("MNIST", DataRequest(source="real", root=str(root)))
    assert (splits.name, splits.source, splits.notice) == ("MNIST", "local", None)
    assert splits.shuffle
    assert torch.equal(splits.train.inputs, images(TRAIN, 0).unsqueeze(1))
    assert torch.equal(splits.train.targets, labels(TRAIN).long())
    assert torch.equal(splits.test.inputs, images(TEST, 100).unsqueeze(1))
    assert torch.equal(splits.test.targets, labels(TEST).long())
    assert len(splits.validation) == 0


@pytest.mark.parametrize("file", list(sources.SHA256["MNIST"]))
@pytest.mark.usefixtures("tiny_generated")
def test_a_damaged_file_is_refused_with_the_command_that_mends_it(root: Path, file: str) -> None:
    """What is said of the damage: tests/train/data/test_published_files.py."""
    path = root / "MNIST" / "raw" / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError) as caught:
        image_splits("MNIST", DataRequest(root=str(root), fallback=True))
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged: ")
    assert message.endswith(f"; repair it with `mprun data fetch MNIST data.root={root}`")


# Parts and limits


@pytest.mark.parametrize(("fraction", "kept"), [(0.0, 20), (0.25, 15), (0.04, 19), (0.95, 1)])
def test_validation_is_the_last_part_of_the_training_set(
    root: Path, fraction: float, kept: int
) -> None:
    request = DataRequest(root=str(root), validation_fraction=fraction)
    splits = image_splits("MNIST", request)
    whole = images(TRAIN, 0).unsqueeze(1)
    assert torch.equal(splits.train.inputs, whole[:kept])
    assert torch.equal(splits.validation.inputs, whole[kept:])
    assert torch.equal(splits.validation.targets, labels(TRAIN).long()[kept:])
    assert len(splits.test) == TEST


def test_a_fraction_that_leaves_no_training_sample_is_refused(root: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.validation_fraction=0\.99 leaves no training"):
        image_splits("MNIST", DataRequest(root=str(root), validation_fraction=0.99))


def test_limits_take_the_first_samples_of_each_part(root: Path) -> None:
    request = DataRequest(
        root=str(root), validation_fraction=0.25, train_limit=4, eval_limit=3, source="real"
    )
    splits = image_splits("MNIST", request)
    whole = images(TRAIN, 0).unsqueeze(1)
    assert torch.equal(splits.train.inputs, whole[:4])
    assert torch.equal(splits.validation.inputs, whole[15:18])
    assert torch.equal(splits.test.inputs, images(TEST, 100).unsqueeze(1)[:3])


# Download


def test_a_download_is_made_once_and_leaves_the_files_alone(
    server: Server, tmp_path: Path, published: dict[str, bytes]
) -> None:
    request = DataRequest(root=str(tmp_path / "new" / "folder"))
    first = image_splits("MNIST", request)
    asked = len(server.asked)
    second = image_splits("MNIST", request)
    assert (first.source, second.source) == ("download", "local")
    assert len(server.asked) == asked
    assert torch.equal(first.train.inputs, images(TRAIN, 0).unsqueeze(1))
    raw = tmp_path / "new" / "folder" / "MNIST" / "raw"
    assert {p.name: p.read_bytes() for p in raw.iterdir()} == published


def test_of_two_downloads_at_once_one_is_made(server: Server, tmp_path: Path) -> None:
    alone = sources.download("MNIST", tmp_path / "alone")
    requests_of_one = Counter(server.asked)
    server.asked.clear()
    begin = Barrier(2)

    def fetch(_: int) -> str:
        begin.wait()
        return sources.download("MNIST", tmp_path / "shared")

    with ThreadPoolExecutor(2) as pool:
        made = sorted(pool.map(fetch, range(2)))
    assert alone == "download"
    assert made == ["download", "local"]
    assert Counter(server.asked) == requests_of_one


def test_a_wait_for_another_process_ends(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOCK_TIMEOUT_S", 0.1)
    with (
        FileLock(tmp_path / ".MNIST.lock"),
        pytest.raises(sources.DownloadError, match="another process has held the lock"),
    ):
        sources.download("MNIST", tmp_path)
    assert not server.asked


def test_a_download_that_breaks_off_leaves_no_file(
    tmp_path: Path, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the last file."""

    def break_off(url: str, packed_root: Path, root: Path, packed: str, md5: str) -> None:
        (packed_root / packed).write_bytes(b"half")
        if packed == f"{last}.gz":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (root / packed[:-3]).write_bytes(published[packed[:-3]])
        assert not sources.is_complete("MNIST", tmp_path)

    last = list(published)[-1]
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", break_off)
    with pytest.raises(sources.DownloadError, match=r"^No space left on device$"):
        sources.download("MNIST", tmp_path)
    assert not list((tmp_path / "MNIST" / "raw").iterdir())


def test_a_server_without_a_published_file(server: Server, tmp_path: Path) -> None:
    server.files.pop("t10k-labels-idx1-ubyte.gz")
    with pytest.raises(sources.DownloadError, match="HTTP Error 404"):
        sources.download("MNIST", tmp_path)
    assert not sources.is_complete("MNIST", tmp_path)


def written(path: Path) -> tuple[int, int]:
    """Which file it is and when it was written; reading it changes other fields of its status."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def test_what_is_missing_or_damaged_is_downloaded_and_the_rest_left_alone(
    server: Server, root: Path, published: dict[str, bytes]
) -> None:
    raw = root / "MNIST" / "raw"
    missing, damaged, *good = published
    (raw / missing).unlink()
    (raw / damaged).write_bytes(published[damaged][:-1])
    before = {name: written(raw / name) for name in good}
    (raw / ".download-1").mkdir()  # by a process that was killed
    (raw / ".download-1" / missing).write_bytes(b"half")
    assert sources.download("MNIST", root) == "download"
    assert set(server.asked) == {f"{missing}.gz", f"{damaged}.gz"}
    assert {p.name: p.read_bytes() for p in raw.iterdir()} == published
    assert {name: written(raw / name) for name in good} == before


def test_the_next_mirror_is_asked_where_one_fails(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources.MIRRORS, "MNIST", (f"{server.url}nothing/", server.url))
    assert sources.download("MNIST", tmp_path) == "download"


def test_a_server_of_other_files_than_the_published_ones(
    server: Server, root: Path, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchvision takes for the file is not what mprun knows it to be."""
    name = "train-images-idx3-ubyte"
    path = root / "MNIST" / "raw" / name
    path.write_bytes(b"damaged")
    monkeypatch.setitem(sources.SHA256["MNIST"], name, "0" * 64)
    with pytest.raises(
        sources.DownloadError, match=rf"^{name}\.gz does not hold the published file$"
    ):
        sources.download("MNIST", root)
    assert path.read_bytes() == b"damaged"


def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, silent_server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "DOWNLOAD_TIMEOUT_S", 0.2)
    before = socket.getdefaulttimeout()
    with pytest.raises(sources.DownloadError, match=r"^no answer in 0\.2 s$"):
        sources.download("MNIST", tmp_path)
    assert socket.getdefaulttimeout() == before
    silent_server.setblocking(False)
    silent_server.accept()[0].close()
    with pytest.raises(BlockingIOError):  # it was asked once: a second time is one more wait
        silent_server.accept()


# What the user is told


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("request_", [DataRequest(), DataRequest(source="real", fallback=True)])
def test_without_network_the_ways_on_are_named(
    request_: DataRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPRUN_DATA", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        image_splits("MNIST", request_)
    assert str(caught.value) == (
        f"MNIST is not in {tmp_path} and its download failed (Connection refused); try again with "
        f"`mprun data fetch MNIST data.root={tmp_path}`, put the files there as torchvision does "
        "(MNIST/raw/...), set data.root or MPRUN_DATA, or take data.source=generated"
    )


@pytest.mark.usefixtures("no_network")
def test_auto_with_fallback_ends_with_the_generated_set_and_says_so(
    tmp_path: Path, tiny_generated: TensorSet
) -> None:
    splits = image_splits("MNIST", DataRequest(root=str(tmp_path), fallback=True))
    assert (splits.name, splits.source) == ("generated glyphs", "generated")
    assert splits.notice == (
        "MNIST is not available (Connection refused); training on the GENERATED set instead"
    )
    assert torch.equal(splits.train.inputs, tiny_generated.inputs)


def test_generated_needs_neither_files_nor_network(
    server: Server, tmp_path: Path, tiny_generated: TensorSet
) -> None:
    request = DataRequest(source="generated", root=str(tmp_path / "none"), validation_fraction=0.5)
    splits = image_splits("MNIST", request)
    assert (splits.name, splits.source, splits.notice) == ("generated glyphs", "generated", None)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (1, 1, 2)
    assert not server.asked
    assert not (tmp_path / "none").exists()


# The real files


@pytest.mark.real_data
@pytest.mark.parametrize(("name", "first_classes"), [("MNIST", (5, 7)), ("FashionMNIST", (9, 9))])
def test_the_real_sets(real_root: Path, name: str, first_classes: tuple[int, int]) -> None:
    splits = image_splits(name, DataRequest(source="real", root=str(real_root)))
    assert (splits.name, splits.source) == (name, "local")
    assert splits.train.inputs.shape == (60_000, 1, 28, 28)
    assert splits.test.inputs.shape == (10_000, 1, 28, 28)
    assert splits.train.inputs.dtype == torch.uint8
    assert splits.train.targets.dtype == torch.int64
    assert (splits.train.targets[0], splits.test.targets[0]) == first_classes
    assert splits.train.targets.unique().tolist() == list(range(10))


# ---- the published files: where they are looked for, and how their state is told -----------------


IMAGES = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("argument", "environment", "found"),
    [
        ("given", {"MPRUN_DATA": "set", "XDG_CACHE_HOME": "cache"}, "given"),
        (None, {"MPRUN_DATA": "set", "XDG_CACHE_HOME": "cache"}, "set"),
        (None, {"XDG_CACHE_HOME": "cache"}, "cache/mprun"),
        (None, {"HOME": "home"}, "home/.cache/mprun"),
        ("~/sets", {"HOME": "home"}, "home/sets"),
    ],
)
def test_the_root_is_the_argument_else_the_environments_else_the_cache(
    argument: str | None,
    environment: dict[str, str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MPRUN_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sources.find_root(argument) == Path(found)


def test_the_command_that_mends_can_be_pasted_into_a_shell() -> None:
    root = Path("my sets") / "it's"
    command = sources.fetch_command(["MNIST", "FashionMNIST"], root)
    assert shlex.split(command) == [
        *("mprun", "data", "fetch", "MNIST", "FashionMNIST"),
        f"data.root=my sets{os.sep}it's",
    ]
