"""What requests are called: by an instance, a log or a trace.

An id tells requests apart and is no secret, so none costs the system call that a secret does.
"""

import os
import random

# Not the module's own numbers: whoever shares the process may give those a seed, and then proxies
# would call different requests the same.
_NUMBERS = random.Random()  # noqa: S311 - no secret
os.register_at_fork(after_in_child=_NUMBERS.seed)


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
    return f"{_NUMBERS.getrandbits(8 * size_bytes):0{2 * size_bytes}x}"
