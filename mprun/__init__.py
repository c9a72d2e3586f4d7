"""mprun: train a model in several numerical precisions and learn which one to use.

Importing this package is cheap: torch is imported by the modules that compute, never here, so
that `mprun --help` and shell completion stay fast.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mprun")
except PackageNotFoundError:  # a bare source tree on sys.path, never installed
    __version__ = "0+unknown"
