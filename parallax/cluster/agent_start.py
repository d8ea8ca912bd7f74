"""Starts the launcher's programs by path: ``python .../agent_start.py --workers 2 -- COMMAND...``.

As ``python -m parallax.cluster.agent`` the launcher would find the current directory's files before
the standard library's, and would not find a parallax that only the user's script put on its path.
With ``--cluster FD`` it is the launcher of several hosts (``chief.py``), else that of one machine's
workers (``agent.py``); ``--parent PID`` before those ties its life to the parent's.
"""

from __future__ import annotations

import contextlib
import os
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
    arguments = sys.argv[1:]
    if arguments[:1] == ["--parent"]:
        from parallax.cluster.worker_exec import die_with_parent

        die_with_parent(int(arguments[1]))
        arguments = arguments[2:]
    if arguments[:1] == ["--cluster"]:
        from parallax.cluster.chief import main
    else:
        from parallax.cluster.agent import main

    status = main(arguments)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # To take torch apart lasts a second or more, and there is nothing left to do.
    os._exit(status)
