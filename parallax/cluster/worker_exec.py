"""First instructions of a worker: tie its life to the launcher's, then become the user's program.

Run by path, not as a module of the package, by the bare interpreter: it must start in milliseconds
and work before anything of the user's program is imported. What it sets up (a death signal)
survives ``execv``, so a worker cannot outlive its launcher even while it still imports torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent", "main"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None) -> bool:
    """Asks the kernel to kill this process when its parent dies, for whatever reason.

    Args:
        parent: the parent's process id, if known; when it is no longer the parent, it has died
            already and this process ends at once.

    Returns:
        Whether the kernel can do so (Linux).
    """
    if not sys.platform.startswith("linux"):
        return False
    # SIGKILL, since a worker that is blocked in a collective has no other way to hear of it.
    failed = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0
    # Asked only after the request, or a death in between would go unnoticed.
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    return not failed


def main(arguments: list[str]) -> None:
    """Becomes the command in ``arguments`` after the launcher's process id and its notice pipe."""
    launcher, notices, *command = arguments
    die_with_parent(int(launcher))
    pipe = os.open(notices, os.O_WRONLY)
    os.write(pipe, f"{os.environ['LOCAL_RANK']} {os.getpid()}\n".encode())
    os.close(pipe)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
