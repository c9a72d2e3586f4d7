"""Rewrite the examples of docs/reference/doctor.md with the output of `mprun doctor` here.

    python -m benchmarks.doctor

Each example is between two comments, `<!-- VARIABLE=value -->` and `<!-- end -->`; the variable
is set for the command, `<!-- as it is -->` sets none. Run it on a quiet machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "doctor.md"
EXAMPLE = re.compile(r"(<!-- (as it is|\w+=\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def example(variable: str) -> str:
    """The command and its tables as a block of text."""
    name, _, value = variable.partition("=")
    env = {**os.environ, "COLUMNS": "100", **({name: value} if value else {})}
    args = [sys.executable, "-m", "mprun", "doctor", "device=cpu"]
    done = subprocess.run(args, env=env, capture_output=True, text=True, check=True)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("precision modes"))
    command = f"$ {variable + ' ' if value else ''}mprun doctor device=cpu"
    return "\n".join(["```", command, "...", *lines[start:], "```", ""])


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    page = EXAMPLE.sub(lambda m: m[1] + example(m[2]) + m[3], page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
