"""`python -m mprun` is `mprun`."""

import sys

from mprun.cli import main

sys.exit(main())
