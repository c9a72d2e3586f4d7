"""A process that imports what takes long, once, and is then asked over its standard streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


class Server:
    """Runs code that answers each line of JSON on its standard input with lines of its own."""

    def __init__(self, program: str, **environment: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    def ask(self, question: object) -> str:
        """Send a question; the first line of the answer."""
        self.send(question)
        return self.next_line()

    def send(self, question: object) -> None:
        """Send a question, whose answer is read later."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(question)}\n")
        self._process.stdin.flush()

    def next_line(self) -> str:
        """A further line of the answer."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process, which ends at the end of its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
