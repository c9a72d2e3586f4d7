"""Every example of docs/your_loop.md runs, as the page says: one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.records.run_record import read_summary

pytestmark = pytest.mark.usefixtures("native_is_fast")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "your_loop.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(BLOCKS) > 8
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    summary = read_summary(tmp_path / "runs" / "fp32")
    assert (summary.status, summary.steps, summary.precision) == ("completed", 40, "fp32")
    loaded, state = names["again"][0].state_dict(), names["saved"][0]
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_the_modules_that_the_page_names_have_the_callback() -> None:
    for name in ("transformers", "lightning"):
        assert f"mprun.integrations.{name}" in PAGE.read_text(encoding="utf-8")
        module = pytest.importorskip(f"mprun.integrations.{name}")
        assert module.MprunCallback
