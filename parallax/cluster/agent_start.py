"""Starts ``agent.py`` by path: ``python .../agent_start.py --workers 2 -- COMMAND...``.

As ``python -m parallax.cluster.agent`` the launcher would find the current directory's files before
the standard library's, and would not find a parallax that only the user's script put on its path.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Importing torch takes seconds, in which Ctrl-C should end this process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if place and Path(place).resolve() != here]
    package_parent = str(here.parent.parent)
    if package_parent not in sys.path:
        sys.path.insert(0, package_parent)
    from parallax.cluster.agent import main

    sys.exit(main(sys.argv[1:]))
