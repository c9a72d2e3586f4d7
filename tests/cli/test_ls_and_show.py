"""`mprun ls`, `mprun show`, and `last` in place of a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mprun
from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.records.files import write_json
from tests.study.compare.folders import summary_of

pytestmark = pytest.mark.usefixtures("quick_runs", "native_is_fast")

LINEAR = ["recipe=linear", "train.max_steps=2"]
SWEEP = ["sweep", *LINEAR, "precision=fp32,bf16_mixed"]
MNIST = [
    *("recipe=mnist", "data.source=generated", "data.train_limit=256", "data.eval_limit=32"),
    *("train.batch_size=64", "train.epochs=1"),
]

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *words: str, status: int = 0) -> tuple[str, str]:
    """What a command prints on standard output and standard error."""
    capsys.readouterr()
    assert main(words) == status
    out, err = capsys.readouterr()
    return out, err


def listed(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    out, _ = run(capsys, "ls", *words, "ls.json=true")
    found: list[dict[str, Any]] = json.loads(out)["records"]
    return found


def without_paths(text: str) -> list[str]:
    """The lines that name no file, and no option for more."""
    begin = ("written", "page", "record", "all figures", "use it: ", "in your own loop")
    return [x for x in text.splitlines() if x and not x.startswith(begin)]


def record(folder: str, started_at: str, **fields: Any) -> Path:
    """A run's record without a run."""
    path = Path(folder)
    path.mkdir(parents=True)
    summary = {**vars(summary_of()), "started_at": started_at, **fields}
    write_json(path / "summary.json", json.loads(json.dumps(summary, default=vars)))
    return path


def test_a_study_is_one_row_and_its_folder_lists_its_runs(capsys: Capture) -> None:
    assert main([*LINEAR, "precision=bf16_true", "seed=3"]) == 0
    assert main([*SWEEP, "seeds=2", "run.dir=outputs/study"]) == 0
    assert main(["-m", *LINEAR, "precision=fp32,bf16_true", "run.dir=outputs/multi"]) == 0
    multi, study, single = listed(capsys)
    assert [multi["path"], study["path"]] == ["outputs/multi", "outputs/study"]
    assert [x["command"] for x in (multi, study, single)] == ["train -m", "sweep", "train"]
    assert (single["recipe"], single["mode"], single["seed"]) == ("linear", "bf16_true", 3)
    assert (study["planned"], len(study["runs"]), study["status"]) == (4, 4, "completed")
    out, _ = run(capsys, "ls")
    assert out.count("2 variants") == 2
    assert "sweep: 4 of 4 completed" in out
    assert f"loss {single['value']:.4f}" in out
    runs = listed(capsys, "outputs/study")
    assert {x["path"].rpartition("/")[2] for x in runs} == {
        f"{mode}-seed{seed}" for mode in ("fp32", "bf16_mixed") for seed in (0, 1)
    }
    assert listed(capsys, single["path"]) == [single]
    assert len(listed(capsys, "outputs/study", "outputs/multi")) == 6


def test_rows_are_sorted_limited_and_damage_is_named(capsys: Capture) -> None:
    assert "there is no run" in run(capsys, "ls")[0]
    for n, (recipe, accuracy) in enumerate([("b", 0.5), ("a", 0.7), ("a", 0.9), ("a", 0.8)]):
        scores = {"train": None, "validation": None, "test": accuracy}
        record(
            f"o/{n}",
            f"2026-01-0{n + 1}T00:00:00+00:00",
            recipe=recipe,
            metrics={"accuracy": scores},
        )
    assert [x["path"] for x in listed(capsys, "o")] == ["o/3", "o/2", "o/1", "o/0"]
    out, _ = run(capsys, "ls", "o", "ls.limit=1")
    assert "3 more; ls.limit=4 lists all" in out
    assert "o/2" not in out
    Path("o/1/summary.json").write_text("{", encoding="utf-8")
    Path("o/begun").mkdir()
    Path("o/begun/metrics.jsonl").touch()
    record("o/when", "yesterday")
    Path("o/study").mkdir()
    Path("o/study/sweep.json").write_text("[]", encoding="utf-8")
    Path("o/loop").symlink_to(Path("o").resolve())
    out, _ = run(capsys, "ls", "o")
    for text in (
        "damaged: o/1: summary.json is not valid JSON",
        "damaged: o/begun: ended before it had a summary.json",
        "damaged: o/when: Invalid isoformat string: 'yesterday'",
        "damaged: o/study: sweep.json is damaged",
    ):
        assert text in out
    assert out.count("accuracy 0.") == 3
    assert "there is no folder nope" in run(capsys, "ls", "nope", status=2)[1]


def test_a_run_is_shown_as_it_ended(capsys: Capture) -> None:
    first, _ = run(capsys, *LINEAR, "run.dir=r")
    again, _ = run(capsys, "show", "r")
    assert first.endswith(again)
    path = record("failed", "2026-01-01T00:00:00+00:00", status="failed", error="it broke")
    assert (
        f"failed: it broke\nfailed; resume with: mprun run.resume={path}\n"
        in (run(capsys, "show", "failed")[0])
    )


@pytest.mark.parametrize(
    "words",
    [
        [*SWEEP, "seeds=2", "compare.baseline=bf16_mixed", "compare.relative_margin=0.5"],
        ["advise", *SWEEP[1:], "seeds=2"],
        ["double", *MNIST, "seeds=1", "precision=fp32"],
    ],
    ids=["sweep", "advise", "double"],
)
def test_a_study_is_shown_as_it_was_compared(words: list[str], capsys: Capture) -> None:
    compared = [x for x in words if x.startswith("compare.")]
    resumed = [words[0], "run.resume=s", *compared]  # all runs have ended: they are compared again
    for command, shown in (([*words, "run.dir=s"], ["--verbose"]), (resumed, [])):
        first, _ = run(capsys, *command, *shown)
        written = {path: path.stat().st_mtime_ns for path in Path("s").rglob("*")}
        again, _ = run(capsys, "show", "s", *shown)
        lines = without_paths(first)
        assert without_paths(again) == lines[-len(without_paths(again)) :]
        assert "page: s/report.html\n" in again
        assert written == {path: path.stat().st_mtime_ns for path in Path("s").rglob("*")}
    if words[0] == "sweep":
        Path("s/comparison.json").unlink()  # as of a sweep that was stopped
        assert "linear: 2 variants" in run(capsys, "show", "s")[0]


def test_a_sweep_of_m_and_measurements_are_shown(capsys: Capture) -> None:
    first, _ = run(capsys, "-m", *LINEAR, "seed=0,1", "run.dir=m")
    assert first.endswith(run(capsys, "show", "m")[0])
    for command, options in (
        ("memory", ["precision=fp32,bf16_mixed", "memory.picture=false"]),
        ("trace", []),
        ("numerics", ["numerics.steps=1", "numerics.plots=false", "numerics.warmup=0"]),
    ):
        first, _ = run(capsys, command, "recipe=linear", *options, f"run.dir={command}")
        again, _ = run(capsys, "show", command)
        assert again.strip()
        if command == "numerics":  # the tables come on demand, without a second measurement
            assert first.splitlines()[-2].endswith("all figures by mprun show numerics --verbose")
            again = again.replace("all figures with --verbose\n", "")
            full, _ = run(capsys, "show", command, "--verbose")
            assert full.startswith(again)
            assert ("loss scales, in float16" in full) > ("loss scales, in float16" in again)
        shown = [line for line in without_paths(first) if not line.startswith("inspected ")]
        assert without_paths(again) == shown[-len(without_paths(again)) :], command
    file = Path("memory/memory.json")
    file.write_text(file.read_text(encoding="utf-8").replace('"modes"', '"mods"'), encoding="utf-8")
    assert (
        "the result is in memory/memory.json, and cannot be shown"
        in (run(capsys, "show", "memory")[0])
    )


def test_last_is_the_newest_and_named(capsys: Capture) -> None:
    assert main([*SWEEP, "seeds=1", "run.dir=outputs/study"]) == 0
    assert main([*LINEAR, "run.dir='outputs/a run'"]) == 0
    assert main([*LINEAR, "run.dir=elsewhere"]) == 0
    out, err = run(capsys, "show", "last")
    assert err == "note: last is outputs/a run\n"
    assert "linear in fp32" in out
    _, err = run(capsys, "run.resume=last", "train.max_steps=3")
    assert "note: run.resume=last is outputs/a run\n" in err
    assert listed(capsys)[0]["path"] == "outputs/a run"
    out, err = run(capsys, "compare", "last", "compare.report=false")
    assert "note: last is outputs/study\n" in err
    assert "linear: 2 variants" in out
    assert "outputs/study" in run(capsys, "sweep", "run.resume=last")[1]
    assert "linear in fp32 after 3 steps" in run(capsys, "export", "last", "x.pt")[0]
    out, _ = run(capsys, "diff", "outputs/study/fp32-seed0", "last")
    assert "b: outputs/a run (fp32, step 3)" in out
    assert main([*LINEAR, "train.init_from=last", "run.dir=next"]) == 0
    assert mprun.load("last").config.train.max_steps == 3


def test_a_folder_called_last_is_itself_and_without_any_the_fix_is_named(capsys: Capture) -> None:
    for words, of in (
        (["show", "last"], "train or observe or sweep"),
        (["compare", "last"], "sweep or advise or double or train -m"),
        (["run.resume=last"], "train"),
        (["double", "run.resume=last"], "double"),
    ):
        _, err = run(capsys, *words, status=2)
        assert f"'last': there is no folder of mprun {of}" in err
        assert err.count("\n") == 1
    with pytest.raises(UsageError, match="'last': there is no folder of mprun train below"):
        mprun.load("last")
    assert main([*LINEAR, "run.dir=outputs/newest"]) == 0
    assert main([*LINEAR, "precision=bf16_true", "run.dir=last"]) == 0
    out, err = run(capsys, "show", "last")
    assert "linear in bf16_true" in out
    assert err == ""
    assert mprun.load("last").config.precision.name == "bf16_true"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["show"], "takes one folder, not 0; write mprun show RUN"),
        (["show", "nope"], "there is no folder nope"),
        (["show", "empty"], "empty has no run, no study and no result"),
    ],
)
def test_a_mistake_of_show_is_one_line(words: list[str], text: str, capsys: Capture) -> None:
    Path("empty").mkdir()
    _, err = run(capsys, *words, status=2)
    assert text in err
    assert err.count("\n") == 1


def test_neither_imports_torch() -> None:
    assert main([*SWEEP, "seeds=1", "run.dir=outputs/study"]) == 0
    assert main([*LINEAR, "run.dir=outputs/run"]) == 0
    code = (
        "import sys\nfrom mprun.cli.main import main\n"
        "assert main(['ls']) == main(['show', 'last']) == 0\n"
        "assert 'scipy' not in sys.modules\n"  # which help and mistakes need not wait for either
        "words = (['ls'], ['show', 'last'], ['show', 'outputs/study'], ['compare', 'last'])\n"
        "assert [main(x) for x in words] == [0, 0, 0, 0]\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "COLUMNS": "80"})
