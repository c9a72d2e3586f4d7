"""Many runs, or a close look at one: sweep, advise, double, search-ops; trace, numerics, memory."""
