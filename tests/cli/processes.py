"""Programs in processes of their own, forked from one that has imported PyTorch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.server import Server

FORKING = """
import json, os, sys, traceback
import torch, mprun.train.run
from mprun.cli.main import main

for line in sys.stdin:
    code, arguments, cwd, environment = json.loads(line)
    pid = os.fork()
    if pid == 0:
        status = 1
        os.chdir(cwd)
        os.environ.update(environment)
        for number, name in ((1, "out.txt"), (2, "err.txt")):
            os.dup2(os.open(f"{cwd}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["-c", *arguments]
        try:
            exec(code, {"__name__": "__main__"})
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forking:
    """Runs programs one after the other, each in the current folder and environment."""

    def __init__(self) -> None:
        self._server = Server(FORKING, OMP_NUM_THREADS="1")

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """As `python -c code arguments`, with its output."""
        cwd = str(Path.cwd())
        status = int(self._server.ask([code, arguments, cwd, dict(os.environ)]))
        out, err = (
            Path(f"{cwd}.{name}.txt").read_text(encoding="utf-8") for name in ("out", "err")
        )
        return subprocess.CompletedProcess([*arguments], status, out, err)

    def close(self) -> None:
        self._server.close()
