"""Processes that compile kernels, each of its own: one imports torch and forks the others."""

from __future__ import annotations

from pathlib import Path

from tests.server import Server

FORKING = """
import atexit, json, os, sys, tempfile
import mprun.precision.kernels

for line in sys.stdin:
    kind, *rest = json.loads(line)
    if kind == "wait":
        print(os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1]), flush=True)
        continue
    code, environment, out = rest
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    log = os.open(out, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.pop("MPRUN_NO_COMPILER", None)
    os.environ.update(environment)
    tempfile.tempdir = None
    exec(code, {})
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # without taking torch down, which takes longer than all else
"""


class Programs:
    """Runs Python code in processes that have imported the kernels and used nothing of them."""

    def __init__(self) -> None:
        self._server = Server(FORKING)

    def start(self, code: str, environment: dict[str, str], out: Path) -> int:
        """Begin a process with these further variables; all it prints goes to `out`. Its id."""
        return int(self._server.ask(["start", code, environment, str(out)]))

    def wait(self, process: int) -> int:
        """Once it has ended: its status, or the negative number of the signal that killed it."""
        return int(self._server.ask(["wait", process]))

    def close(self) -> None:
        """End the process that forks the others."""
        self._server.close()
