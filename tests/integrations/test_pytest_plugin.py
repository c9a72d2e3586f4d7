"""The plugin of pytest: its fixture, its mark, and that it costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from mprun.cli import functions
from mprun.inspect.check.check_result import SCHEMA_VERSION, CheckRecord, Finding, ModeChecks
from mprun.records.result import Result

pytest_plugins = ["pytester"]

NAME = "mprun.integrations.pytest_plugin"
INSTALLED = any(x.value == NAME for x in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", NAME)
USE = """
import pytest, torch
from torch import nn

@pytest.mark.precision("bf16_mixed", "fp16_mixed")
def test_modes(mprun_check):
    model, batch = nn.Linear(4, 2), (torch.randn(8, 4), torch.tensor([0, 1] * 4))
    result = mprun_check(model, batch, nn.functional.cross_entropy, budget_s=20)
    print("mode", [mode.precision for mode in result.record.modes])

def test_default(mprun_check):
    print("mode", [x.precision for x in mprun_check("recipe=mine.py").record.modes])

@pytest.mark.precision("fp16_mixed")
def test_own(mprun_check):
    result = mprun_check("recipe=mine.py", precision="fp32")
    print("mode", [mode.precision for mode in result.record.modes])
"""


def answer(findings: list[Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    """`mprun.check` has these findings."""

    def check(*given: object, precision: str, **settings: object) -> Result:
        mode = ModeChecks(precision, precision, findings)
        return Result(CheckRecord(SCHEMA_VERSION, "mine", "cpu", {}, 1.0, 60.0, [mode]))

    monkeypatch.setattr(functions, "check", check)


@pytest.fixture
def run(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(USE)
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
    return pytester


def test_a_marked_test_runs_in_each_mode(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer([], monkeypatch)
    result = run.runpytest_inprocess(*PLUGIN, "-v", "-s")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        ["*test_modes?bf16_mixed?*", "*test_modes?fp16_mixed?*", "*test_default*", "*test_own*"]
    )
    modes = [x.rpartition("mode ")[2] for x in result.outlines if "mode [" in x]
    assert modes == ["['bf16_mixed']", "['fp16_mixed']", "['bf16_mixed']", "['fp32']"]


def test_a_finding_fails_the_test_by_its_line_and_a_warning_warns(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Finding("lost_update", "layer", "63 of 64 weights", line="my.py:3 (forward)")
    undone = Finding("cast_undone", "head", "3 casts")
    answer([undone, lost], monkeypatch)
    result = run.runpytest_inprocess(*PLUGIN, "-k", "default")
    result.assert_outcomes(failed=1, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "bf16_mixed: lost_update: layer at my.py:3 (forward): 63 of 64 weights",
            "  fix: keep float32 weights*",
            "*PytestWarning: bf16_mixed: cast_undone: head: 3 casts",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    answer([undone], monkeypatch)
    run.runpytest_inprocess(*PLUGIN, "-k", "default").assert_outcomes(passed=1, warnings=1)


def test_a_given_model_is_checked(run: pytest.Pytester) -> None:
    result = run.runpytest_inprocess(*PLUGIN, "-k", "modes", "-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*mode ?'bf16_mixed'?*", "*mode ?'fp16_mixed'?*"])


def test_a_mistake_is_one_line(run: pytest.Pytester) -> None:
    result = run.runpytest_inprocess(*PLUGIN, "-k", "default")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["recipe=*mine.py: there is no such file*"])


@pytest.mark.parametrize("arguments", ["", "('bf16', 3)"])
def test_a_mark_needs_names(pytester: pytest.Pytester, arguments: str) -> None:
    mark = f"@pytest.mark.precision{arguments or '()'}"
    pytester.makepyfile(f"import pytest\n{mark}\ndef test_it(mprun_check): ...")
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.stdout.fnmatch_lines(["*arguments of the mark precision are names of modes*"])
    assert result.ret != 0


def test_it_imports_neither_torch_nor_mprun_until_it_is_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        def test_other():
            loaded = {x for x in sys.modules if x.partition(".")[0] in ("mprun", "torch", "numpy")}
            names = {"mprun", "mprun.integrations", "mprun.integrations.pytest_plugin"}
            assert loaded == names
        """
    )
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:hypothesispytest", "-q"]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_installing_mprun_installs_it() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points.pytest11]\nmprun = "{NAME}"\n' in text
