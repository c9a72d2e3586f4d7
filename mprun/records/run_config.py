"""Reading `config.yaml` of a run as plain data, whoever wrote it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mprun.errors import first_line, printable

LARGEST_BYTES = 256 * 1024


class UnreadableConfigError(Exception):
    """Why a configuration cannot be read, as `it is ...`."""


def read_config(run: Path) -> tuple[str, Any]:
    """The text of a run's configuration, and its content.

    Raises:
        UnreadableConfigError: it is missing, too large, or not YAML without tags.
    """
    path = run / "config.yaml"
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UnreadableConfigError(f"it is larger than {LARGEST_BYTES // 1024} KiB")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableConfigError(f"it cannot be read ({error.strerror})") from None
    except ValueError:
        raise UnreadableConfigError("it is not text") from None
    try:
        return text, yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = printable(first_line(error))[:80]
        raise UnreadableConfigError(f"it is not valid YAML ({reason})") from None
