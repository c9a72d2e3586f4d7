"""What happens in a step while it happens: events, ops, memory, non-finite numbers, casts.

Doors: `step_events` (the one source of events: calls of modules, gradients, the optimizer's step),
`OpWatcher` (each op, with its module and phase), `MemoryRecorder`, `fp_exceptions`, `CastCounts`,
`audit`.

How data goes through: a watcher is a context around a model and its optimizer. It hooks modules and
optimizer, or is a dispatch mode under which each op passes, and keeps small records of what it saw.
Only the action `skip` of `fp_exceptions` changes a number of the training. `train` uses watchers
while a run trains, `inspect` for a close look.
"""
