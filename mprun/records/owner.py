"""Only the process that began a command writes its records.

User code may call `os.fork()`, and its child then goes on in the middle of the command: it would
train the same run and write into the same files. Such a child leaves, without a word and without
Python's ending, which would flush what the parent still has to print.
"""

from __future__ import annotations

import os
from os import _exit

_owners: list[int] = []
"""The process that began the last command."""


def own_records() -> None:
    """A command begins in this process."""
    _owners[:] = [os.getpid()]


def leave_if_forked() -> None:
    """End this process if it was forked off the one that began the command."""
    if _owners and os.getpid() != _owners[0]:
        _exit(0)
