"""Small models for `mprun check`: six with planted faults of low precision, and healthy ones."""
