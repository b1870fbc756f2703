"""Settings of the C library's allocator for bodies of megabytes."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's `malloc.h`."""
TRIM_BYTES = 32 * 1024**2
"""Free memory that the process keeps for the next bodies."""
MMAP_BYTES = 8 * 1024**2
"""Size from which each block has pages of its own, which its release returns at once."""
OPERATORS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which an operator sets the same."""


def keep_freed_memory() -> bool:
    """Keep freed memory for the next bodies; return whether the allocator has this setting.

    By default glibc returns a body's memory to the kernel after a few requests, and the next body
    has it mapped and zeroed again, page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None or any(name in os.environ for name in OPERATORS):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, TRIM_BYTES) and mallopt(M_MMAP_THRESHOLD, MMAP_BYTES))
