"""Comparison of runs: loaded, grouped into variants, paired by seed, judged. No torch."""
