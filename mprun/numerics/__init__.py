"""Looking at the numerics of a step: what is alive, what is computed, in which dtype."""
