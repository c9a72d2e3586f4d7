"""`mprun --help`: everything a user may choose is on it, in any terminal."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from mprun.cli.main import COMMANDS, COMMON, main
from mprun.config.reference import GROUPS, leaves

CONF = Path(str(files("mprun.conf")))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def opening_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line[2:] for line in lines if "@package" not in line)


@pytest.mark.parametrize("words", [["-h"], ["help"], ["train", "--help"], ["recipe=no", "--help"]])
def test_it_may_be_asked_for_anywhere(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, *words) == shown(capsys, "--help")


@pytest.mark.parametrize("columns", [20, 80, 300])
def test_it_names_every_command_option_and_common_field(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(capsys, "--help")
    unwrapped = " ".join(text.split())
    for command in COMMANDS:
        assert f" {command.name} {command.summary}" in unwrapped
    for group in GROUPS:
        assert f"\n{group}=\n" in text
        for path in (CONF / group).glob("*.yaml"):
            assert f" {path.stem} {opening_comment(path)}" in unwrapped
    for key in COMMON:
        field = leaves()[key]
        assert f" {key} = {field.default_text} {field.doc}" in unwrapped
    for option in ("--help", "--version", "--config-dir", "--show-config", "MPRUN_DATA"):
        assert option in text


def test_it_prints_in_any_encoding(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--help").isascii()
