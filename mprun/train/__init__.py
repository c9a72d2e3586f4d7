"""Training: the loop, its callbacks and clock, metrics, schedules, signals, starting weights."""
