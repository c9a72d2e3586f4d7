"""Runs compared: found, grouped into variants, paired by seed, judged. No torch."""
