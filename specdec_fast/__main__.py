"""``python -m specdec_fast``: the same as ``specdec-fast``."""

import sys

from specdec_fast.cli import main

sys.exit(main())
