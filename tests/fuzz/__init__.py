"""Bad input of every kind, drawn from fixed seeds: each is refused in one line that names it."""
