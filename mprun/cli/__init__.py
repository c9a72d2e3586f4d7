"""The command line: parse the arguments, run the question, show the result.

Doors: `main.main` (the process `mprun`), and `functions` (`mprun.run`, `compare` and `check` of
Python, which take the same arguments). Commands that measure are the questions of `inspect`, which
`arguments.py` asks; each other one is a function and a `Command` with its help.
Arguments are parsed without torch, so that help and mistakes are answered at once; a command
imports what it needs when it runs.

How data goes through: arguments become overrides and settings (`config`), these a plan (`train`) or
a study (`study`), and what comes back is a `Result` (`records/result.py`), which is printed and
written.
"""
