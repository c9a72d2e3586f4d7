"""The ten minutes, at toy size with what is installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ten_minutes import StepFailedError, timed

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.ten_minutes", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_new_model_gets_a_verdict_and_every_step_its_minutes(tmp_path: Path) -> None:
    ended = run("--toy", "--out", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    timed = [line.split()[3:] for line in lines if line[7:10] == "min"]
    words = [next(word for word in line if word not in ("-m", "mprun")) for line in timed]
    assert words == ["new-recipe", "recipe=my_model.py", "sweep", "compare"]
    assert lines[-2].startswith("bf16_mixed: ")
    assert "toy size" in lines[-1]
    assert (tmp_path / "out" / "study" / "report.html").is_file()


def test_a_folder_in_use_and_a_step_that_fails_are_answered(tmp_path: Path) -> None:
    used = run("--toy", "--out", str(Path(__file__).parent))
    assert used.returncode == 2
    assert "is not empty: name a new folder" in used.stderr
    with pytest.raises(StepFailedError, match=r"-c .* ended with status 3:\nwhy$"):
        timed([sys.executable, "-c", "print('why'); raise SystemExit(3)"], tmp_path)


def test_it_needs_the_standard_library_alone() -> None:
    program = [sys.executable, "-S", "-m", "benchmarks.ten_minutes", "--help"]
    assert subprocess.run(program, cwd=ROOT, capture_output=True).returncode == 0
