"""Settings of a serving process: its allocator, garbage collection, and limit of descriptors."""

import ctypes
import gc
import os
import resource

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's `malloc.h`."""
TRIM_BYTES = 32 * 1024**2
"""Free memory that the process keeps for the next bodies."""
MMAP_BYTES = 8 * 1024**2
"""Size from which each block has pages of its own, which its release returns at once."""
OPERATORS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which an operator sets the same."""
YOUNG_OBJECTS = 5000
"""New objects after which Python collects garbage among them. Its default of 700, which a few
requests have, takes 2 to 3.4 % of the CPU time (docs/decisions/016-request-path.md)."""


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the hard limit, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory() -> bool:
    """Keep freed memory for the next bodies; return whether the allocator has this setting.

    By default glibc returns a body's memory to the kernel after a few requests, and the next body
    has it mapped and zeroed again, page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None or any(name in os.environ for name in OPERATORS):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, TRIM_BYTES) and mallopt(M_MMAP_THRESHOLD, MMAP_BYTES))


def collect_rarely() -> None:
    """Keep the present objects, and collect garbage among new ones less often."""
    gc.freeze()  # these objects live on: each full collection would spend 50 ms on them
    gc.set_threshold(YOUNG_OBJECTS)
