"""Keep the memory that one step frees for the next, instead of giving it back in between.

The C library gives memory at the end of the heap back to the system once some tens of megabytes of
it are free, and every step then touches thousands of pages for the first time again: 10 to 40
milliseconds of a processor in steps of 100 to 200. A step needs what the step before needed, so
that nothing is saved by it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

_TRIM, _MAP = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of ``mallopt(3)``."""
_MOST_FREE = (1 << 31) - 1
MAPPED_BYTES = 1 << 25
"""What is larger is given back when it is freed, as the library's own upper bound has it: tables,
that are not needed in every step."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell the C library of this process to keep it.

    Args:
        environment: a process that was started with settings of its own for this keeps them.

    Returns:
        Whether it was told: where the library is glibc.
    """
    own = any(name.startswith("MALLOC_") for name in environment)
    if own or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MAP, MAPPED_BYTES)) and bool(mallopt(_TRIM, _MOST_FREE))
