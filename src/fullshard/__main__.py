"""``python -m fullshard``."""

import sys

from fullshard.cli import main

sys.exit(main())
