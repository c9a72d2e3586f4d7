"""What the Dockerfile says agrees with the project; a workflow builds and runs it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.precision.kernels.test_prebuilt import PARTS

ROOT = Path(__file__).resolve().parent.parent


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile and its text; lines that go on are joined."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line.strip() and not line.startswith("#"))
    return [(x.split()[0], x.partition(" ")[2]) for x in text.replace("\\\n", " ").splitlines()]


def last_stage() -> dict[str, str]:
    found = instructions()
    start = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    return dict(found[start:])


def test_it_copies_what_a_wheel_is_built_from_and_gets_no_more() -> None:
    copied = [x.split()[:-1] for word, x in instructions() if word == "COPY" and "--from" not in x]
    assert {name for names in copied for name in names} == set(PARTS)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {line[1:] for line in rules if line.startswith("!")} == set(PARTS)


def test_mprun_runs_as_a_user_and_its_folder_is_a_volume() -> None:
    found = last_stage()
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", found["USER"])
    assert found["ENTRYPOINT"] == '["mprun"]'
    assert found["VOLUME"] == found["WORKDIR"] == "/workspace"
    assert "gcc" not in " ".join(found.values())


@pytest.mark.parametrize(
    ("torch", "index"),
    [
        ("cpu", ["--index-url", "https://download.pytorch.org/whl/cpu"]),
        ("cu126", ["--index-url", "https://download.pytorch.org/whl/cu126"]),
        ("cuda", []),
    ],
)
def test_pytorch_comes_from_the_index_of_its_device(
    torch: str, index: list[str], in_empty_folder: Path
) -> None:
    pip = in_empty_folder / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    pip.chmod(0o755)
    (step,) = [text for word, text in instructions() if word == "RUN" and "torchvision" in text]
    environment = {**os.environ, "TORCH": torch, "PATH": f"{in_empty_folder}:{os.environ['PATH']}"}
    said = subprocess.run(
        ["sh", "-c", step], env=environment, capture_output=True, text=True, check=True
    )
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = re.findall(r'^    "(torch(?:vision)?>=[\d.]+)",$', project, re.MULTILINE)
    assert said.stdout.split() == ["install", *index, *bounds]
