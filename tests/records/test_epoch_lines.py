"""Validation losses read from a run's metrics.jsonl."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mprun.errors import UsageError
from mprun.records.files import jsonable
from mprun.records.run_folder import epoch_lines, read_validation_losses
from mprun.records.run_record import Epoch, Scores


def write(run: Path, text: str) -> Path:
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    return run


def test_what_a_run_writes_is_read(tmp_path: Path) -> None:
    none = Scores(loss=None, accuracy=None)
    epochs = [
        Epoch(epoch=1, train=none, validation=Scores(loss=0.5, accuracy=0.8)),
        Epoch(epoch=2, train=none, validation=Scores(loss="nan", accuracy=None)),
        Epoch(epoch=3, train=none, validation=none),
        Epoch(epoch=4, train=none, validation=Scores(loss=0.4, accuracy=None, samples=7)),
    ]
    lines = [line for e in epochs for line in epoch_lines(e, 100 * e.epoch)]
    found = read_validation_losses(
        write(tmp_path, "".join(json.dumps(jsonable(line)) + "\n" for line in lines))
    )
    assert found[0] == (100, 0.5)
    assert (found[1].step, math.isnan(found[1].loss)) == (200, True)
    assert len(found) == 2  # the third epoch has no validation, the fourth one of a part


def test_steps_rise_and_a_later_line_replaces_an_earlier_one(tmp_path: Path) -> None:
    row = '{{"kind":"validation","step":{},"epoch":1,"loss":{},"accuracy":null}}\n'
    lines = [row.format(200, 0.4), row.format(100, 0.5), row.format(200, 0.3)]
    assert read_validation_losses(write(tmp_path, "".join(lines))) == [(100, 0.5), (200, 0.3)]


@pytest.mark.parametrize("step", ["0", "-1", '"x"', "1e300", "null"])
def test_a_damaged_line_is_named(tmp_path: Path, step: str) -> None:
    line = f'{{"kind":"validation","step":{step},"loss":1.0}}\n'
    with pytest.raises(UsageError, match="is damaged"):
        read_validation_losses(write(tmp_path, line))


def test_without_a_file_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_validation_losses(tmp_path)
