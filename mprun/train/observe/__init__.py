"""Records trainings by loops that are not mprun's: `mprun.observe`."""
