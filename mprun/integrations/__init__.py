"""Adapters for programs that call mprun: Hugging Face's Trainer, Lightning, pytest.

Doors: `MprunCallback` of `transformers.py` and of `lightning.py`, which record a training of that
library as `mprun.observe` does; `pytest_plugin.py`, whose fixture `mprun_check` fails a test by the
findings of `mprun check`. Each adapter only translates: the work is done by `train/observe` and
`inspect/check`. Nothing in mprun imports this room; each library is imported by its own adapter.
"""
