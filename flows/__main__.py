"""`python -m flows` is `distill`."""

import sys

from flows.cli import main

sys.exit(main())
