"""trackio reads what a run's record holds."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mprun.records.run_folder import RECORD_FILES
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

pytest.importorskip("trackio")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder `outputs`, for a trackio that is imported anew: it reads its folder once."""
    forget()
    yield tmp_path_factory.mktemp("trackio") / "outputs"
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        del sys.modules[name]


def storage() -> Any:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage


def curves(project: str, name: str) -> Curves:
    found: Curves = {}
    for row in storage().get_logs(project, name):
        step = row.pop("step")
        del row["timestamp"]
        for key, value in row.items():
            found.setdefault(key, []).append((step, float(value)))
    return found


def test_configuration_tags_scalars_and_files(
    outputs: Path, capsys: pytest.CaptureFixture[str], in_empty_folder: Path
) -> None:
    run = outputs / "day" / "run"
    words = [*MNIST, "train.max_steps=7", "logger=trackio", "logger.project=digits"]
    assert train(run, *words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"TRACKIO_DIR={outputs / 'trackers' / 'trackio'} trackio show --project digits" in out
    assert "* " not in out
    name = record_of(run).id
    assert re.fullmatch(r"fp32 seed 0 [0-9a-f]{6}", name)
    found = curves("digits", name)
    assert found.pop("summary/completed") == [(7, 1.0)]
    assert found == curves_of(run)
    config = storage().get_run_config("digits", name)
    assert {key: value for key, value in config.items() if not key.startswith("_")} == {
        **parameters_of(run),
        **{f"tags.{key}": value for key, value in tags_of(run).items()},
    }
    (made,) = storage().get_artifacts("digits")
    manifest = storage().get_artifact_manifest("digits", made["name"], "latest")
    files = [x for x in RECORD_FILES if (run / x).exists()]
    assert sorted(entry["path"] for entry in manifest["manifest"]) == sorted(files)
    assert list(in_empty_folder.iterdir()) == []


def test_a_resumed_run_repeats_no_step(outputs: Path) -> None:
    run = outputs / "resumed"
    assert train(run, *LINEAR, "train.max_steps=4", "logger=trackio") == 0
    name = record_of(run).id
    assert resume(run, "train.max_steps=6") == 0
    assert record_of(run).id == name
    assert curves("linear", name)["train/loss"] == curves_of(run)["train/loss"]
