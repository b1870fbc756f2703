"""How many files and sockets this process may have open."""

import resource

RESERVED = 64
"""Descriptors for what is no connection: the listeners, logs, the event loop, the store."""
PER_CLIENT = 3
"""A client's own, and two to instances: most requests have one there at a time, and idle ones are
kept. One with many items has more (`encoding.AT_ONCE`) for as long as they are encoded."""


def raise_limit() -> None:
    """Allow as many as the system lets this process have, and those that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def client_connections() -> int:
    """How many clients may be connected so that there is a descriptor for what they ask for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - RESERVED) // PER_CLIENT)
