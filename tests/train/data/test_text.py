"""Texts become windows of characters; where they come from, and what is said where they do not."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.errors import UsageError
from mprun.train.data import DataRequest, text
from mprun.train.data.text import encode, python_library, text_splits, windows
from tests.train.data.conftest import Server

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 40
OFFLINE = "http://127.0.0.1:9/input.txt"


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a stand-in for tiny-shakespeare; nothing can be downloaded."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "data"
    (root / text.TINY_SHAKESPEARE).mkdir(parents=True)
    (root / text.TINY_SHAKESPEARE / text.FILE).write_text(PLAY, encoding="utf-8")
    monkeypatch.setattr(text, "SHA256", hashlib.sha256(PLAY.encode()).hexdigest())
    monkeypatch.setattr(text, "URL", OFFLINE)
    return root


def decoded(ids: torch.Tensor, source: str) -> str:
    letters = sorted(set(source))
    return "".join(letters[i] for i in ids.tolist())


# ---- characters ----------------------------------------------------------------------------------


def test_the_rarest_characters_share_the_last_number() -> None:
    ids, replaced = encode("aaaabbbccd", 3)
    assert ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert replaced == 3


@given(st.text(min_size=1, max_size=200), st.integers(2, 256))
def test_any_text_fits_any_vocabulary(source: str, vocabulary: int) -> None:
    source = source.encode("utf-32-le", "ignore").decode("utf-32-le")
    ids, replaced = encode(source, vocabulary)
    assert len(ids) == len(source)
    assert not len(ids) or int(ids.max()) < vocabulary
    assert (replaced > 0) == (len(set(source)) > vocabulary)
    if not replaced:
        assert decoded(ids, source) == source


# ---- windows -------------------------------------------------------------------------------------


def test_a_window_starts_at_every_character_and_none_is_stored() -> None:
    ids = torch.arange(10, dtype=torch.uint8)
    samples = windows(ids, 4, 1, targets=True)
    assert len(samples) == 6
    assert samples.inputs[2].tolist() == [2, 3, 4, 5]
    assert samples.targets[2].tolist() == [3, 4, 5, 6]
    assert samples.inputs.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()


def test_held_out_windows_lie_side_by_side(play: Path) -> None:
    request = DataRequest(root=str(play), validation_fraction=0.25)
    splits = text_splits(None, 8, 65, request)
    held_out = round(len(PLAY) * 0.25)
    train, rest = PLAY[:-held_out], PLAY[-held_out:]
    assert len(splits.train) == len(train) - 8
    ids = splits.validation.inputs
    assert decoded(ids.flatten(), PLAY) == rest[: ids.numel()]
    assert held_out - ids.numel() <= 8, "less than a window and its last target is left out"
    assert decoded(splits.validation.targets.flatten(), PLAY) == rest[1 : ids.numel() + 1]
    assert decoded(splits.train.inputs[7], PLAY) == train[7:15]
    assert splits.test.is_empty


def test_windows_without_targets(play: Path) -> None:
    splits = text_splits(None, 8, 65, DataRequest(root=str(play)), targets=False)
    assert decoded(splits.train.content[3], PLAY) == PLAY[3:11]
    assert splits.validation.is_empty


# ---- where the text comes from -------------------------------------------------------------------


def test_another_file_in_its_place_is_refused(play: Path) -> None:
    file = play / text.TINY_SHAKESPEARE / text.FILE
    file.write_text(PLAY + "!", encoding="utf-8")
    with pytest.raises(UsageError, match=r"is not the published tiny-shakespeare.*delete it"):
        text_splits(None, 8, 65, DataRequest(root=str(play)))


def test_without_file_and_network_the_ways_on_are_named(play: Path) -> None:
    request = DataRequest(root=str(play / "other"))
    with pytest.raises(UsageError) as raised:
        text_splits(None, 8, 65, request)
    for way in ("data.root", "recipe.model.text=FILE", "data.source=generated"):
        assert way in str(raised.value)


def test_the_fallback_is_the_library_and_says_so(play: Path) -> None:
    request = DataRequest(root=str(play / "other"), fallback=True)
    splits = text_splits(None, 64, 256, request)
    assert splits.name == f"Python {platform.python_version()} standard library"
    assert splits.notice is not None
    assert "TinyShakespeare is not available" in splits.notice


@pytest.fixture
def address(play: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of the stand-in, which is downloaded from, and of another text."""
    with Server({text.FILE: PLAY.encode(), "other.txt": b"another text"}) as running:
        Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(text, "URL", running.url + text.FILE)
        yield running.url
        running.shutdown()


@pytest.mark.usefixtures("address")
def test_a_download_is_kept(play: Path) -> None:
    root = play / "other"
    request = DataRequest(root=str(root))
    assert text_splits(None, 8, 65, request).source == "download"
    assert (root / text.TINY_SHAKESPEARE / text.FILE).read_bytes() == PLAY.encode()
    assert text_splits(None, 8, 65, request).source == "local"


def test_a_download_of_another_file_is_refused(
    play: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "URL", address + "other.txt")
    with pytest.raises(UsageError, match="the server sent another file"):
        text_splits(None, 8, 65, DataRequest(root=str(play / "other")))
    assert not (play / "other" / text.TINY_SHAKESPEARE / text.FILE).exists()


def test_the_library_is_as_long_as_tiny_shakespeare_and_the_same_each_time() -> None:
    found = python_library()
    assert len(found) == text.SIZE_BYTES
    assert found.isascii()
    assert found == python_library.__wrapped__()


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("Grüße aus Köln, " * 20, encoding="utf-8")
    splits = text_splits(str(path), 8, 8, DataRequest(validation_fraction=0.1))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (splits.name, splits.source) == (f"own.txt {digest[:8]}", "local")
    assert splits.notice is not None
    assert "share one number" in splits.notice


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), (b"\xff\xfe", "is not UTF-8"), (b"short", "has 5 characters")],
)
def test_a_text_that_cannot_be_used(content: bytes | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        text_splits(str(path), 8, 65, DataRequest())
