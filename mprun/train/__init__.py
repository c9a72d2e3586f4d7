"""One run: plan, parts, loop, record.

Doors: `run.run` (a plan is trained and leaves a record), `assemble.make_plan` (a checked
configuration becomes a plan), `observe/` (the same record, of a loop that mprun does not own).

How data goes through: `assemble/` loads recipe and data, chooses device, execution and speed, and
builds the parts; `data/` yields batches; `loop.py` turns a batch into a loss and a step, and
notifies its callbacks: recorder, checkpoints, loggers, progress. `parallel/` has what several
processes exchange, `machine/` what this machine does natively and how fast.
"""
