"""Values as texts for Hydra's overrides and for OmegaConf, which give some characters a meaning."""

from __future__ import annotations

import re
from typing import Any


def quoted(value: object) -> str:
    """Any text as a quoted value of an override."""
    text = str(value)
    inner = text.replace("'", "\\'")
    end = "\\" * (len(inner) - len(inner.rstrip("\\")))  # a backslash would hide the last quote
    return f"'{inner}{end}'"


def as_text(value: Any) -> Any:
    """Plain values for OmegaConf that it does not interpolate: `${` in a text stays what it is."""
    if isinstance(value, str):
        # A backslash escapes `${`, and the backslashes before it.
        return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", value)
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value


def override_text(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(override_text, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    return quoted(value)
