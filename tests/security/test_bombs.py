"""Small files that would become huge are refused before they do."""

from __future__ import annotations

import csv
import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mprun.config import compose
from mprun.errors import UsageError
from mprun.records.run_config import UnreadableConfigError, read_config
from mprun.study.report import exports
from mprun.train import checkpoint
from mprun.train.assemble.recipe_loading import load_recipe
from mprun.train.data import sources
from mprun.train.init_from import load_weights
from tests.security.records import write_config
from tests.study.report.compared import comparison

ALIASES = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 6)
)
"""Half a million numbers in 300 bytes; each further line makes nine times as many."""


# ---- weights -------------------------------------------------------------------------------------


def archive(path: Path, pickled: bytes, method: int = zipfile.ZIP_STORED) -> None:
    """An archive of `torch.save` with this pickle and 4 MiB of zeros."""
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data/0", bytes(2**22))


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


BYTEARRAY = pickled(b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R")
"""A call that makes two gigabytes of zeros."""


def packed(path: Path) -> None:
    archive(path, pickled(b"}"), zipfile.ZIP_DEFLATED)


def many_objects(path: Path) -> None:
    archive(path, pickled(b"}" * 2_000))


def one_large_object(path: Path) -> None:
    archive(path, BYTEARRAY)


def a_second_pickle(path: Path) -> None:
    """Readers may differ in which of two entries of one name they take."""
    archive(path, pickled(b"}"))
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("archive/data.pkl", pickled(b"}"))


@pytest.mark.parametrize(
    "write",
    [packed, many_objects, one_large_object, a_second_pickle],
)
def test_a_file_that_grows_is_refused_unread(
    write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, unread = checkpoint.path_in(Path()), []
    path.parent.mkdir()
    write(path)
    monkeypatch.setattr(checkpoint, "MAX_PICKLE_BYTES", 1_000)
    monkeypatch.setattr(torch, "load", lambda *_, **__: unread.append(path))
    with pytest.raises(UsageError, match="is not a checkpoint of mprun"):
        checkpoint.load(Path())
    config = compose(["recipe=linear"]).config.recipe
    with pytest.raises(UsageError, match="is damaged"):
        load_weights(str(path), load_recipe(config.target, config.model), "linear")
    assert not unread


def test_values_that_are_repeated_without_end_are_refused() -> None:
    Path("checkpoints").mkdir()
    tensor = torch.zeros(1).expand(2**27)
    data = checkpoint.serialized({"choices": {}, "trainer": {"x": [tensor]}, "journal": {}})
    checkpoint.path_in(Path()).write_bytes(data)
    with pytest.raises(UsageError, match="tensors in it repeat few values many times"):
        checkpoint.load(Path())


def test_tensors_and_plain_values_are_read() -> None:
    content = OrderedDict(
        half=torch.ones(2, dtype=torch.bfloat16),
        mask=torch.zeros(1).expand(3, 4).t(),
        parameter=nn.Parameter(torch.ones(2)),
        plain=[1, 2.5, "text", None, True, b"bytes", (1,), {1, 2}, 3 + 4j],
        kinds=[torch.float32, torch.Size([2]), torch.device("cpu")],
    )
    torch.save(content, "file.pt")
    read: Any = checkpoint.load_torch_file(Path("file.pt"))
    assert read["plain"] == content["plain"]
    assert read["kinds"] == content["kinds"]
    for name in ("half", "mask", "parameter"):
        assert torch.equal(read[name], content[name])


# ---- data ----------------------------------------------------------------------------------------


def test_every_server_is_asked_over_tls() -> None:
    assert set(sources.MIRRORS) == set(sources.SHA256)
    for servers in sources.MIRRORS.values():
        assert servers
        assert all(server.startswith("https://") for server in servers)


# ---- YAML ----------------------------------------------------------------------------------------


def test_nested_aliases_are_counted_as_often_as_they_are_used() -> None:
    write_config(Path("run"))
    with Path("run/config.yaml").open("a", encoding="utf-8") as file:
        file.write(ALIASES)
    with pytest.raises(UnreadableConfigError, match="values"):
        read_config(Path("run"))
    with pytest.raises(UsageError, match="values"):
        compose(["run.resume=run"])


# ---- spreadsheets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+cmd|x", "'+1+cmd|x"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1+1", "'=1+1"),
        (" =1+1", "'=1+1"),
        ("a\x1b[31m\x9b\u202eb", r"a\x1b[31m\x9b\u202eb"),
        ("-1.5", "-1.5"),
        ("bf16_mixed x2", "bf16_mixed x2"),
    ],
)
def test_a_cell_is_text_to_a_spreadsheet(label: str, cell: str) -> None:
    plain = comparison(2)
    variants = (plain.variants[0], replace(plain.variants[1], label=label))
    text = exports.csv_text(replace(plain, variants=variants))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[1]["label"] == cell
    original = list(csv.DictReader(io.StringIO(exports.csv_text(plain))))[1]
    assert {**rows[1], "label": ""} == {**original, "label": ""}  # negative numbers stay numbers
    assert float(rows[1]["difference"]) < 0
