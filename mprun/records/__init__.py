"""The files that mprun writes and reads, as dataclasses. No torch."""
