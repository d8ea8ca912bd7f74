"""``python -m parallax`` is the command ``parallax``."""

import sys

from parallax.cli import main

if __name__ == "__main__":
    sys.exit(main())
