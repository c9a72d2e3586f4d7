"""Records of runs and of results: how they are read, written and shown. No torch.

Doors: `reader.py` (the one checked reader: files of others are data, never code), `run_record.py`
(summary.json and metrics.jsonl of a run), `files.py` (files are written whole or not at all),
`result.py` (a measurement's result, and the one way to show it), `console/` (tables that fit a
terminal, progress).

How data goes through: bytes are read with a limit on their size, decoded into dataclasses, and
checked field by field; an error names the file, the field and what is legal. Records of earlier
versions are read.
"""
