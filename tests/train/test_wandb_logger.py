"""Weights & Biases offline: its file holds what a run's record holds."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.logged import (
    LINEAR,
    MNIST,
    Curves,
    curves_of,
    parameters_of,
    record_of,
    resume,
    tags_of,
    train,
)
from tests.waiting import wait_for

wandb = pytest.importorskip("wandb")

BLOCK = 32768
HEAD = struct.Struct("<4sHB")  # of W&B's file: its name, a magic number, a version
CHUNK = struct.Struct("<IHB")  # checksum, length, kind
WHOLE, FIRST, LAST = 1, 2, 4


def chunks(file: Path) -> Iterator[bytes]:
    """The messages of a file of W&B: a log of LevelDB, in blocks, after a header."""
    data, place, message = file.read_bytes(), HEAD.size, b""
    assert HEAD.unpack_from(data)[0] == b":W&B"
    while place + CHUNK.size <= len(data):
        left = BLOCK - place % BLOCK
        if left < CHUNK.size:  # padding
            place += left
            continue
        _, length, kind = CHUNK.unpack_from(data, place)
        place += CHUNK.size
        if place + length > len(data):  # it is being written
            return
        message = (b"" if kind in (WHOLE, FIRST) else message) + data[place : place + length]
        place += length
        if kind in (WHOLE, LAST):
            yield message


def records(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(message) for message in chunks(file)]


def files_of(run: Path, outputs: Path) -> list[Path]:
    """The files of the run, one for each process, once W&B's process has written their ends."""
    files = sorted(outputs.glob(f"trackers/wandb/offline-run-*-{record_of(run).id}*/run-*.wandb"))
    wait_for(lambda: all(of_kind(file, "exit") for file in files))
    return files


def curves(file: Path) -> Curves:
    found: Curves = {}
    for record in records(file):
        if record.WhichOneof("record_type") != "history":
            continue
        items = {x.key or "/".join(x.nested_key): x.value_json for x in record.history.item}
        values = {key: json.loads(text) for key, text in items.items() if not key.startswith("_")}
        step = values.pop("step")
        for name, value in values.items():
            found.setdefault(name, []).append((step, float(value)))
    return found


def of_kind(file: Path, kind: str) -> list[Any]:
    return [getattr(r, kind) for r in records(file) if r.WhichOneof("record_type") == kind]


def test_configuration_tags_and_scalars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_empty_folder: Path
) -> None:
    outputs = tmp_path / "outputs"
    run = outputs / "day" / "run"
    words = [*MNIST, "train.max_steps=7", "logger=wandb", "logger.project=p", "logger.run_name=n"]
    assert train(run, *words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "note: to send the run to W&B: wandb sync" in out
    assert "wandb:" not in out
    (file,) = files_of(run, outputs)
    begun = of_kind(file, "run")[0]
    assert (begun.project, begun.display_name) == ("p", "n")
    tags = tags_of(run)
    status = tags.pop("status")
    assert set(begun.tags) == {f"{name}={value}"[:64] for name, value in tags.items()}
    config = {x.key: json.loads(x.value_json) for x in begun.config.update}
    assert {k: v for k, v in config.items() if k != "_wandb"} == {
        **parameters_of(run),
        **{f"tags.{name}": value for name, value in tags.items()},
    }
    assert curves(file) == curves_of(run)
    summary = {x.key: x.value_json for part in of_kind(file, "summary") for x in part.update}
    assert json.loads(summary["status"]) == status == "completed"
    assert of_kind(file, "exit")[0].exit_code == 0
    assert list(in_empty_folder.iterdir()) == []


def test_a_resumed_run_continues_and_a_failed_one_is_one(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    run = outputs / "run"
    words = [*LINEAR, "train.lr=1e30", "train.max_steps=20", "logger=wandb"]
    assert train(run, *words) == 1  # the loss becomes infinite
    (file,) = files_of(run, outputs)
    assert of_kind(file, "exit")[0].exit_code == 1
    other = outputs / "other"
    assert train(other, *LINEAR, "train.max_steps=4", "logger=wandb") == 0
    assert resume(other, "train.max_steps=6") == 0
    parts = [curves(path)["train/loss"] for path in files_of(other, outputs)]
    assert sorted(point for part in parts for point in part) == curves_of(other)["train/loss"]


def test_online_without_a_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train(tmp_path / "run", *LINEAR, "logger=wandb", "logger.mode=online") == 2
    err = capsys.readouterr().err
    assert err.startswith("mprun: logger.mode=online: W&B has no key here; run wandb login")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
