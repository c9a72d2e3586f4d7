"""`python -m mprun` is `mprun`."""

import sys

from mprun.cli.main import main

sys.exit(main())
