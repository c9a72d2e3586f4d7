"""`mprun --completion`: what the printed scripts complete, in the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mprun.cli.completion import SHELLS, completion_script
from mprun.cli.main import COMMANDS, main
from mprun.config.reference import leaves, options

NAMES = [command.name for command in COMMANDS]
MODES = set(options("precision"))
CASES: dict[str, set[str]] = {
    "mprun adv": {"advise"},
    "mprun s": {"sweep", "search-ops", "show", "seed=", "speed=", "speed."},
    "mprun prec": {"precision=", "precision."},
    "mprun train.optimizer.m": {"train.optimizer.momentum="},
    "mprun recipe=mnist prec": {"precision=", "precision."},
    "mprun -m recipe=mnist recipe=fas": {"fashion_mnist"},
    "mprun precision=bf16_": {"bf16_mixed", "bf16_true", "bf16_sr"},
    "mprun sweep precision=fp32,tf": {"fp32,tf32"},
    "mprun device=c": {"cpu", "cuda"},
    "mprun data.test=": {"true", "false"},
    "mprun advise advise.objective=": {"time", "memory"},
    "mprun advise advise.b": {"advise.budget_min="},
    "mprun compare compare.fail_if=n": {"none", "not_equivalent"},
    "mprun compare rec": set(),
    "mprun compare compare.mar": {"compare.margin="},
    "mprun memory memory.against=tf": {"tf32"},
    "mprun data ver": {"verify"},
    "mprun doctor de": {"debug.", "device="},
    "mprun --show": {"--show-config"},
    "mprun run.resume=x": set(),
}
"""What is typed, to what bash offers; behind a `=` it offers what follows."""


def written(shell: str) -> Path:
    path = Path(f"mprun.{shell}")
    path.write_text(completion_script(shell, COMMANDS), encoding="utf-8")
    return path


def test_bash_completes_commands_groups_options_fields_and_values() -> None:
    lines = [f"source {written('bash')}"]
    for line in CASES:
        lines.append(f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _mprun")
        lines.append('echo "${COMPREPLY[*]}"')
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    offered = dict(zip(CASES, map(str.split, done.stdout.split("\n")), strict=False))
    assert {line: set(words) for line, words in offered.items()} == CASES


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_name_and_is_valid(shell: str) -> None:
    path = written(shell)
    text = path.read_text(encoding="utf-8")
    assert "@" not in text.replace("$@", "").replace("[@]", "")  # every place is filled
    for name in (*NAMES, *(f"{key}=" for key in leaves() if key != "precision.name"), *MODES):
        if not name.endswith(".name="):
            assert name in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(path)], check=True)


def test_the_command_prints_it_or_names_the_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "fish"]) == 0
    assert capsys.readouterr().out == completion_script("fish", COMMANDS)
    assert main(["--completion", "bsh"]) == 2
    assert "'bsh' is not a supported shell; legal: bash, zsh, fish; did you mean 'bash'?" in (
        capsys.readouterr().err
    )
    assert main(["--completion"]) == 2
    assert "a shell is missing; legal: bash, zsh, fish" in capsys.readouterr().err
