"""Limit of open files and sockets (descriptors) of this process."""

import resource

RESERVED = 64
"""Descriptors for other uses than connections: listeners, logs, the event loop, the store."""
PER_CLIENT = 3
"""Descriptors per client: its own connection, and two to instances. Most requests have one upstream
connection at a time, and idle ones are kept open. A request with many items has more
(`encoding.AT_ONCE`) while they are encoded."""


def raise_limit() -> None:
    """Raise the limit of descriptors to the hard limit, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def client_connections() -> int:
    """Return how many clients may be connected so that each has `PER_CLIENT` descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - RESERVED) // PER_CLIENT)
