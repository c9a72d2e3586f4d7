"""The recipes of examples/."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
NEEDS = {"llama_lora": ("transformers", "peft")}
"""The packages of an example that mprun does not need."""


def recipe(name: str) -> str:
    """The override of an example; skips the test where a package of it is missing."""
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    return f"recipe={EXAMPLES[name]}"
