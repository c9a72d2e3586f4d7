"""`mprun compare`: what it takes, prints, leaves, refuses, and ends with."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.study.report.plots import draw
from tests.cli.small import LINEAR
from tests.study.compare.folders import write_run

pytestmark = pytest.mark.usefixtures("quick_runs")

ACCURACIES = {"fp32": (0.95, 0.96, 0.955), "bf16_mixed": (0.9501, 0.9601, 0.9552)}
WORSE = (0.85, 0.86, 0.856)


def write_sweep(folder: str = "sweep", **variants: tuple[float, ...]) -> None:
    """A sweep's folder; by default fp32 and an equivalent bf16_mixed, three seeds each."""
    number = 0
    for variant, accuracies in (variants or ACCURACIES).items():
        for seed, accuracy in enumerate(accuracies):
            write_run(Path(folder, str(number)), variant, seed, accuracy=accuracy)
            number += 1


def left() -> set[Path]:
    return set(Path().rglob("*"))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command ends with status 2, having written nothing."""
    before = left()
    assert main(["compare", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mprun: ")
    assert err.count("\n") == 1
    assert left() == before
    return err


# ---- what it shows and leaves --------------------------------------------------------------------


def test_real_runs_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = functools.partial(draw, names=["difference"])
    monkeypatch.setattr("mprun.study.report.exports.draw", one)
    assert main(["-m", *LINEAR, "train.max_steps=5", "precision=fp32,bf16_mixed"]) == 0
    (sweep,) = Path("outputs").glob("*/*")
    capsys.readouterr()
    assert main(["compare", str(sweep)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in ("fp32", "bf16_mixed", "baseline", "linear", "loss"):
        assert text in out
    assert f"written to {sweep}: " in out
    found = json.loads((sweep / "comparison.json").read_text(encoding="utf-8"))
    assert [v["label"] for v in found["variants"]] == ["fp32", "bf16_mixed"]
    assert (sweep / "comparison-difference.png").exists()


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["sweep*"], "sweep"),
        (["sweep/0", "sweep/3"], "comparison"),
        (["sweep/0/summary.json"], "comparison"),
        (["sweep", "compare.dir='odd, name'"], "odd, name"),
    ],
    ids=str,
)
def test_where_the_report_goes(
    words: list[str], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep()
    before = left()
    assert main(["compare", *words]) == 0
    assert f"written to {folder}: " in capsys.readouterr().out
    new = left() - before
    assert Path(folder, "comparison.json") in new
    assert {path.parent for path in new if path.is_file()} == {Path(folder)}


# ---- fail_if -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracies", "condition", "status"),
    [
        (ACCURACIES["bf16_mixed"], "not_equivalent", 0),
        (WORSE, "worse", 3),
        ((0.9, 0.99, 0.95), "not_equivalent", 3),
    ],
    ids=str,
)
def test_the_exit_status_says_whether_the_condition_is_met(
    accuracies: tuple[float, ...],
    condition: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_sweep(fp32=ACCURACIES["fp32"], bf16_mixed=accuracies)
    assert main(["compare", "sweep", f"compare.fail_if={condition}"]) == status
    out, err = capsys.readouterr()
    assert "bf16_mixed" in out
    assert Path("sweep/comparison.json").exists()  # the report of a failure is what is looked at
    assert err.count("\n") == (status == 3)
    if status == 3:
        assert err.startswith(f"mprun: compare.fail_if={condition}: bf16_mixed is ")


def test_a_condition_on_one_variant_alone_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """It would pass whatever the runs were."""
    write_sweep(fp32=ACCURACIES["fp32"])
    assert main(["compare", "sweep", "compare.fail_if=worse"]) == 2
    assert "all runs are of one variant, fp32; name runs of another one" in capsys.readouterr().err


# ---- artefacts -----------------------------------------------------------------------------------


# ---- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "mprun compare needs folders of runs: mprun compare outputs/DATE/TIME"),
        (["swep"], "there is no folder 'swep', and no folder matches it"),
        (["sweep", "--all"], "mprun compare has no option '--all'"),
        (["sweep", "compare.margin=0.5"], "compare.margin=0.5: legal is above 0 and at most 0.1"),
        (["sweep", "compare.baseline=bf16"], "legal: 'fp32', 'bf16_mixed'"),
        (["empty"], "no completed run to compare: empty: contains no run (no summary.json)"),
    ],
    ids=str,
)
def test_mistakes_end_with_status_2_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep()
    Path("empty").mkdir()
    assert said in refused(capsys, *words)


def test_mixed_hardware_is_refused_and_can_be_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep()
    write_run(Path("sweep/9"), "tf32", backend__threads=1)
    said = refused(capsys, "sweep")
    assert "differ in hardware (threads=2 in 6 runs; threads=1 in 1 run)" in said
    assert "compare.mix=[hardware]" in said
    assert main(["compare", "sweep", "compare.mix=[hardware]"]) == 0
    assert "mixed hardware: threads=2 in 6 runs; threads=1 in 1 run" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep()
    Path("file").write_text("", encoding="utf-8")
    assert main(["compare", "sweep", "compare.dir=file"]) == 2
    out, err = capsys.readouterr()
    assert "equivalent" in out
    assert "compare.dir=file cannot be written (" in err
    assert "compare.report=false" in err


def test_text_of_a_record_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep()
    changes = {"status": "failed", "error": "\x1b[2Jgone\nsecond line"}
    Path("sweep/\x1b[2J\nfolder").mkdir()
    write_run(Path("sweep/9"), "evil\x1b[2J [red]x[/red]", 0, **changes)
    assert main(["compare", "sweep", "compare.report=false"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "\nsecond line" not in out  # nor begin a line of its own


# ---- what it costs -------------------------------------------------------------------------------

WATCHED = """
import sys
from pathlib import Path
opened, scanned = [], []
def watch(event, details):
    if event == "open" and isinstance(details[0], str) and details[0].startswith("sweep"):
        opened.append(details[0])
    if event == "os.scandir" and str(details[0]).startswith("sweep"):
        scanned.append(str(details[0]))
sys.addaudithook(watch)
from mprun.cli.main import main
assert main(["compare", "sweep", "compare.report=false"]) == 0
assert sorted(opened) == sorted(f"sweep/{i}/summary.json" for i in range(6)), opened
assert sorted(scanned) == ["sweep", *(f"sweep/{i}" for i in range(6))], scanned
heavy = {"torch", "scipy.stats", "matplotlib", "jinja2"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_table_needs_no_torch_and_one_file_of_each_run() -> None:
    """metrics.jsonl has a line for every step, and importing torch takes seconds."""
    write_sweep()
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
