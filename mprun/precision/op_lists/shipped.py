"""The op lists that ship with mprun, by name: `conf/op_lists/*.yaml` without a configuration."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml  # type: ignore[import-untyped]

from mprun.errors import hint
from mprun.precision.op_lists.lists import OpLists, op_lists
from mprun.records.op_list_files import KINDS, Entry

SHIPPED = ("hmp", "hmp_resnet50", "native", "native_uniform")


def shipped_lists(name: str, device_type: str) -> OpLists:
    """The shipped lists of a name, as `op_lists=NAME` has them.

    Args:
        name: one of `SHIPPED`.
        device_type: "cpu" or "cuda": PyTorch's own lists differ between them.

    Raises:
        ValueError: no lists have this name.
    """
    if name not in SHIPPED:
        legal = ", ".join(SHIPPED)
        raise ValueError(
            f"no op lists are named '{name}'{hint(name, SHIPPED)}; legal: {legal}, or the lists "
            "that mprun.precision.op_lists(...) gives"
        )
    path = files("mprun.conf") / "op_lists" / f"{name}.yaml"
    section: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["op_lists"]
    lower, fp32, promote = (
        [
            Entry(op, f"op_lists={name}")
            for op in section.get(f"{device_type}_{kind}", section[kind])
        ]
        for kind in KINDS
    )
    return op_lists(lower, fp32, promote, section.get("unlisted", "first_input") == "first_input")
