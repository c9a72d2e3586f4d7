"""The machine: what it computes natively, how fast, and what that means for each mode."""
