"""A close look at a recipe, a run or this machine: a question each, whose answer is a `Result`.

Doors: `QUESTION` of each module that has one (`question.py` says what that is): memory, trace,
numerics, search-ops, diff, replay, doctor; and `check/`, the gate of a repository. `divergence/`
finds where two models part. `rounding_oracle.py` bounds what rounding alone can cause.

How data goes through: mostly, a plan (`train/assemble`) gives model and batch. A few steps run
under the recorders of `watch`, in the mode and in float32 or float64. What is measured becomes a
frozen record, and tables and sentences are made of the record alone, so JSON, terminal and notebook
show the same.
"""
