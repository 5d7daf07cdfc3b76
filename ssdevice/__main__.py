"""``python -m ssdevice``."""

import sys

from ssdevice.cli import main

sys.exit(main())
