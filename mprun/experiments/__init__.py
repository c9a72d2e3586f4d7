"""Many runs: sweep, advise, double; and the runs and plans that an answer needs."""
