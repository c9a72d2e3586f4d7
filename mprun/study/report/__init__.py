"""Tables, plots and pages of results: they take the dataclasses of `mprun.records`. No torch."""
