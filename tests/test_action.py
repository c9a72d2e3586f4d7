"""action.yml, run step by step in a shell as GitHub does; the hook for pre-commit; ci.yml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
import yaml

from mprun.cli.main import BY_NAME
from mprun.inspect.check.check_result import CHECKS

ROOT = Path(__file__).resolve().parent.parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
INPUTS = {
    *("recipe", "precision", "args", "version", "requirements", "pip-index"),
    *("python-version", "working-directory", "artifact"),
}
EXPRESSION = re.compile(r"\$\{\{ ([\w.-]+) \}\}")


class Runner:
    """The part of GitHub's runner that composite actions need.

    `folder` is the checkout; programs in its folder `bin` are found first.
    """

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder, temp = folder, folder.parent / "temp"
        temp.mkdir()
        defaults = {key: x.get("default", "") for key, x in ACTION["inputs"].items()}
        self.values = {f"inputs.{key}": x for key, x in (defaults | inputs).items()}
        self.values |= {"runner.temp": str(temp), "runner.os": "Linux", "runner.arch": "X64"}
        self.files = {name: temp / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        self.environment = {
            **{name: str(path) for name, path in self.files.items()},
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_WORKSPACE": str(folder),
            "RUNNER_TEMP": str(temp),
            "CI": "true",
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }
        (folder / "bin").mkdir()

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def evaluated(self, text: str) -> str:
        return EXPRESSION.sub(lambda match: self.values[match[1]], text)

    def run(self, step: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        """A step with a script; what it says of its outputs is known to later ones."""
        for path in self.files.values():
            path.touch()
        own = {key: self.evaluated(value) for key, value in step.get("env", {}).items()}
        script = self.folder.parent / "step.sh"
        script.write_text(step["run"], encoding="utf-8")
        done = subprocess.run(
            [
                "bash",
                "--noprofile",
                "--norc",
                "-eo",
                "pipefail",
                str(self.folder.parent / "step.sh"),
            ],
            cwd=self.folder / self.evaluated(step["working-directory"]),
            env={**os.environ, **self.environment, **own},
            capture_output=True,
            text=True,
        )
        for line in self.files["GITHUB_OUTPUT"].read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            self.values[f"steps.{step.get('id')}.outputs.{key}"] = value
        return done


def step_of(name: str) -> dict[str, Any]:
    (step,) = [step for step in STEPS if step.get("name") == name]
    return step


def test_every_input_is_described_and_used_and_none_is_read_as_a_command() -> None:
    assert {*ACTION["inputs"]} == INPUTS
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    for name, fields in ACTION["inputs"].items():
        assert fields["description"]
        assert fields.get("required", False) is ("default" not in fields)
        assert f"inputs.{name}" in text
    for step in STEPS:
        assert "${{" not in step.get("run", "")
        assert ("run" in step) == (step.get("shell") == "bash")
        ends = [match[1] for match in EXPRESSION.finditer(json.dumps(step))]
        known = {f"inputs.{name}" for name in INPUTS} | {"runner.temp", "runner.os", "runner.arch"}
        assert {*ends} <= known | {"steps.check.outputs.folder"}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, [str(ROOT)]),
        ({"version": "0.2.0"}, ["mprun==0.2.0"]),
        ({"version": "."}, ["."]),
        (
            {"version": "./a b", "requirements": "-r my.txt\n--no-deps\n'x;y'"},
            ["./a b", "-r", "my.txt", "--no-deps", "'x;y'"],
        ),
    ],
)
def test_it_installs_what_is_asked_for(
    inputs: dict[str, str], expected: list[str], in_empty_folder: Path
) -> None:
    runner = Runner(in_empty_folder, recipe="linear", **inputs)
    runner.program("python", 'printf "%s\\n" "$@" "$PIP_EXTRA_INDEX_URL" "$PIP_CACHE_DIR"')
    said = runner.run(step_of("Install mprun"))
    index, cache = "https://download.pytorch.org/whl/cpu", runner.values["runner.temp"]
    assert said.stdout.splitlines() == [
        *("-m", "pip", "install", *expected),
        *(index, f"{cache}/mprun-pip"),
    ]
    (step,) = [step for step in STEPS if "cache@" in step.get("uses", "")]
    assert runner.evaluated(step["with"]["path"]) == f"{cache}/mprun-pip"


@pytest.mark.representative("0.00001-*")
@pytest.mark.parametrize(
    ("gib", "status", "answer"), [("1", 0, "passed: linear"), ("0.00001", 1, "failed: linear")]
)
def test_it_checks_and_keeps_what_is_uploaded(
    gib: str, status: int, answer: str, in_empty_folder: Path
) -> None:
    args = f"check.memory_gib={gib}\n\ncheck.samples=8\ncheck.steps=6\nrecipe.model.in_features=8\n"
    runner = Runner(in_empty_folder, recipe="linear", precision="bf16_mixed", args=args)
    runner.program("mprun", f'PYTHONPATH={ROOT} exec {sys.executable} -m mprun "$@"')
    done = runner.run(step_of("Check"))
    assert done.returncode == status, done.stderr + done.stdout
    assert done.stdout.startswith(answer)
    assert ("::error title=mprun check" in done.stdout) == (status == 1)
    assert answer in runner.files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8")
    folder = Path(runner.evaluated(STEPS[-1]["with"]["path"]))
    assert folder == Path(runner.evaluated(ACTION["outputs"]["folder"]["value"]))
    record = json.loads((folder / "check.json").read_text(encoding="utf-8"))
    assert [mode["label"] for mode in record["modes"]] == ["bf16_mixed"]
    cases = {case.get("name") for case in Xml.parse(folder / "junit.xml").iter("testcase")}
    assert cases == {*CHECKS}
    assert [*in_empty_folder.iterdir()] == [in_empty_folder / "bin"]


def test_arguments_come_as_they_are(in_empty_folder: Path) -> None:
    (in_empty_folder / "sub").mkdir()
    args = "recipe.model.name='a b'\n--update\n$(touch x)"
    inputs = {"recipe": "my models/`a`.py", "args": args, "working-directory": "sub"}
    runner = Runner(in_empty_folder, **inputs)
    runner.program("mprun", 'printf "%s\\n" "$@"; pwd')
    said = runner.run(step_of("Check")).stdout.splitlines()
    folder = runner.values["steps.check.outputs.folder"]
    assert said == [
        *("check", "recipe=my models/`a`.py", "precision=fp32,bf16_mixed,fp16_mixed"),
        *(f"run.dir={folder}", f"check.junit={folder}/junit.xml"),
        *("recipe.model.name='a b'", "--update", "$(touch x)"),
        str(in_empty_folder / "sub"),
    ]
    assert [*(in_empty_folder / "sub").iterdir()] == []


def test_the_hook_for_other_repositories_is_one_that_pre_commit_reads() -> None:
    client = pytest.importorskip("pre_commit.clientlib")
    (hook,) = client.load_manifest(str(ROOT / ".pre-commit-hooks.yaml"))
    program, command = hook["entry"].split()
    assert (program, hook["pass_filenames"]) == ("mprun", False)
    assert command in BY_NAME
