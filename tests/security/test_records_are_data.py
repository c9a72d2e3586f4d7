"""What a stranger's file says is data: it runs nothing, draws nothing, and takes no folder."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from mprun.cli.main import main
from mprun.config import compose
from mprun.config.reference import quoted
from mprun.errors import UsageError
from mprun.records.run_config import UnreadableConfigError, read_config
from mprun.records.run_folder import RunFolder
from mprun.train import checkpoint
from mprun.train.assemble.recipe_loading import load_recipe
from mprun.train.init_from import load_weights
from tests.security.records import MARK, has_run, write_config
from tests.study.compare.folders import write_run

# ---- pickles -------------------------------------------------------------------------------------


class Attack:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (Path(MARK),)


def as_archive(path: Path) -> None:
    torch.save({"weight": Attack()}, path)


def as_legacy_file(path: Path) -> None:
    torch.save({"weight": Attack()}, path, _use_new_zipfile_serialization=False)


def as_plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Attack()))


def as_torchscript(path: Path) -> None:
    """An archive that PyTorch takes for TorchScript, by its constants."""
    as_archive(path)
    with zipfile.ZipFile(path, "a") as file:
        folder = file.namelist()[0].partition("/")[0]
        file.writestr(f"{folder}/constants.pkl", pickle.dumps(Attack(), protocol=2))


@pytest.mark.parametrize("write", [as_archive, as_legacy_file, as_plain_pickle, as_torchscript])
def test_a_pickle_never_runs(write: Callable[[Path], None]) -> None:
    path = checkpoint.path_in(Path("run"))
    path.parent.mkdir(parents=True)
    write(path)
    config = compose(["recipe=linear"]).config.recipe
    with pytest.raises(UsageError, match="is not a checkpoint of mprun"):
        checkpoint.load(Path("run"))
    with pytest.raises(UsageError, match=r"is damaged(:|, or contains more than tensors)"):
        load_weights(str(path), load_recipe(config.target, config.model), "linear")
    assert not has_run()
    if write is not as_torchscript:  # the file of this test does run code
        with pytest.raises((KeyError, TypeError, RuntimeError, pickle.UnpicklingError)):
            torch.load(path, weights_only=False)["nothing"]
        assert has_run()


# ---- YAML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{MARK}]]",
        f"!!python/object/apply:os.mkdir [{MARK}]",
        f"!!python/object/new:os.mkdir [{MARK}]",
        "!!python/name:os.system",
    ],
)
def test_tags_of_python_in_yaml_make_nothing(value: str) -> None:
    write_config(Path("run"))
    with Path("run/config.yaml").open("a", encoding="utf-8") as file:
        file.write(f"more: {value}\n")
    Path("file.yaml").write_text(f"first: {value}\n", encoding="utf-8")
    with pytest.raises(UnreadableConfigError):
        read_config(Path("run"))
    for overrides in (
        ["run.resume=run"],
        ["recipe=mnist", "op_lists=hmp", "op_lists.lower_file=file.yaml"],
    ):
        with pytest.raises(UsageError):
            compose(overrides)
    assert main(["recipe=linear", "precision.layers_file=file.yaml", "train.max_steps=1"]) == 2
    assert not has_run()


# ---- text ----------------------------------------------------------------------------------------

HOSTILE = "\x1b]0;title\x07\x1b[2J[red]<script>alert(1)</script>[x](http://a)|`'\u202e"


def test_names_in_a_record_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(2):
        for variant in ("fp32", HOSTILE):
            folder = Path(f"runs/{variant == 'fp32'}-{seed}")
            write_run(folder, variant, seed=seed, recipe=HOSTILE, error=HOSTILE)
    assert main(["compare", "runs"]) == 0
    terminal = "".join(capsys.readouterr())
    page = Path("runs/report.html").read_text(encoding="utf-8")
    markdown = Path("runs/comparison.md").read_text(encoding="utf-8")
    table = Path("runs/comparison.csv").read_text(encoding="utf-8")
    for text in (terminal, page, markdown, table):
        assert not {"\x1b", "\x07", "\u202e"} & {*text}
    assert "<script>alert" not in page
    assert "<script>alert" not in markdown
    assert "[x](http" not in markdown
    assert "[red]" in terminal


@pytest.mark.parametrize("field", ["recipe__name", "precision__name"])
def test_names_in_a_resumed_run_are_text(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(Path("run"), **{field: HOSTILE})
    assert main(["run.resume=run"]) == 2
    assert not {"\x1b", "\x07", "\u202e"} & {*"".join(capsys.readouterr())}


# ---- folders -------------------------------------------------------------------------------------


def test_of_two_runs_with_one_folder_at_once_one_runs() -> None:
    for attempt in range(5):
        folder, barrier = Path(f"run{attempt}"), Barrier(4)

        def begin(_: int, folder: Path = folder, barrier: Barrier = barrier) -> RunFolder | None:
            barrier.wait()
            try:
                return RunFolder(folder)
            except UsageError as error:
                assert "choose another folder" in str(error)  # noqa: PT017
                return None

        with ThreadPoolExecutor(4) as pool:
            opened = [folder for folder in pool.map(begin, range(4)) if folder is not None]
        assert len(opened) == 1
        opened[0].close()


ODD = (
    *("with blank", " leading", "trailing ", "it's", 'a "quote"', "back\\slash", "ends\\"),
    *("a=b", "a,b", "[a]", "{a: b}", "#a", "%41", "-x", "ünï-日本", "$HOME", "${oc.env:HOME}"),
)
"""17 names of folders that shells, YAML, Hydra, OmegaConf or URLs give a meaning."""


@pytest.mark.parametrize("name", ODD)
def test_an_odd_path_is_a_path(name: str) -> None:
    path = Path("some", name)
    write_config(Path("some"))
    override = f"run.dir={quoted(path)}"
    if "${" not in name:  # which on the command line means a value to insert
        assert compose(["recipe=linear", override]).config.run.dir == str(path)
    folder = RunFolder(path)
    folder.lines([{"kind": "event", "step": 0}])
    folder.close()
    shutil.copy("some/config.yaml", path)
    resumed = compose([f"run.resume={quoted(path)}"])
    assert resumed.config.run.dir == resumed.resolved["run"]["resume"] == str(path)
    RunFolder(Path(resumed.config.run.dir), keep=lambda line: True).close()
    assert {p.name for p in path.iterdir()} >= {"metrics.jsonl", "checkpoints"}
