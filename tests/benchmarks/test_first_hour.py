"""The first hour, at toy size on a CPU: it answers, survives failures, and names them first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.first_hour import PARTS, Hour, page

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.first_hour", "--device", "cpu", "--toy", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_the_parts_of_a_machine_write_json_and_markdown(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path), "--parts", "tests", "speed")
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "first_hour.json").read_text(encoding="utf-8"))
    assert found["mend_first"] == [], found
    outcomes = {row["outcome"] for row in found["parts"]["tests"].values()}
    assert outcomes == {"passed"}
    assert len(found["parts"]["tests"]) >= 9
    for row in found["parts"]["speed"].values():
        assert row["mprun_ms"] > 0
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["n"] == 4
    text = (tmp_path / "first_hour.md").read_text(encoding="utf-8")
    assert text.index("## Mend first") < text.index("## tests") < text.index("## speed")
    assert "Nothing failed." in text
    assert "toy sizes" in text


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_every_part_answers(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path), "--budget-s", "800")
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "first_hour.json").read_text(encoding="utf-8"))
    assert set(found["parts"]) == set(PARTS)
    assert found["mend_first"] == [], found["mend_first"]
    assert set(found["parts"]["commands"]) == {"memory", "trace"}
    assert found["parts"]["machine"]["modes"]["fp32"] == "native"
    assert found["parts"]["optimizers"]
    steps = found["parts"]["steps"]
    assert set(steps) == {"linear, fp32", "linear, bf16_sr"}
    for row in steps.values():
        assert 0 < row["host_ms"] <= row["ms"]
        assert row["synchronizations"] == 0
        assert row["first_step_s"] > 0
    assert set(found["parts"]["compile"]) == {"bf16_sr, empty cache", "bf16_sr, filled cache"}


def hour(tmp_path: Path, left_s: float) -> Hour:
    import time

    return Hour(tmp_path, "cpu", True, time.monotonic() + left_s, tmp_path)


def test_a_piece_that_fails_or_hangs_ends_no_other(tmp_path: Path) -> None:
    own = hour(tmp_path, 60)
    broken = own.rows("a fault", ["-c", "print(1); raise SystemExit('planted')"], 50)[-1]
    assert broken == {"failed": "failed: planted"}
    late = own.rows("a hang", ["-c", "import time; print('begun', flush=True); time.sleep(99)"], 5)[
        -1
    ]
    assert late["failed"].startswith("too long")
    fine = own.rows("fine", ["-c", "print('RESULT {\"x\": 1}')"], 50)[-1]
    assert fine == {"x": 1}
    assert own.mend == ["a fault failed: planted", f"a hang {late['failed']}"]
    text = page(own)
    assert "- a fault failed: planted" in text
    assert "planted" in (tmp_path / "logs.txt").read_text(encoding="utf-8")
