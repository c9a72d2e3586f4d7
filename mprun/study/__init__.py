"""Many runs: sweep, advise, double; a run that is planned and not trained."""
