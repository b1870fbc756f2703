"""What requests are called: by an instance, a log or a trace.

An id tells requests apart and is no secret, so none costs the system call that a secret does.
"""

import random


def request_id(client_id: str | None) -> str:
    """An id of our own, which begins with the client's, so that a search for that finds it.

    A client may use one id twice at a time. An engine or a KV connector that goes by the id would
    take two such requests for one.
    """
    return _hex(16) if client_id is None else f"{client_id}-{_hex(4)}"


def child_id(parent: str, number: int) -> str:
    """An id for the request of this number that is made on behalf of another."""
    return f"{parent}:{number}:{_hex(3)}"


def _hex(size_bytes: int) -> str:
    # A process that is forked begins with a seed of its own, as Python sees to.
    return f"{random.getrandbits(8 * size_bytes):0{2 * size_bytes}x}"
