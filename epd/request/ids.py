"""Request ids for instances, logs and traces.

An id distinguishes requests and is no secret, so it needs no system call for secure randomness.
"""

import os
import random

# A generator of its own: other code in the process may seed the module's one, and then two proxies
# would generate equal ids.
_NUMBERS = random.Random()  # noqa: S311 - no secret
os.register_at_fork(after_in_child=_NUMBERS.seed)


def request_id(client_id: str | None) -> str:
    """Return a unique id that begins with the client's id, so that a search for that id finds it.

    A client may use one id twice at the same time. An engine or a KV connector that identifies
    requests by the id would confuse two such requests.
    """
    return _hex(16) if client_id is None else f"{client_id}-{_hex(4)}"


def child_id(parent: str, number: int) -> str:
    """Return the id of a numbered request on behalf of another."""
    return f"{parent}:{number}:{_hex(3)}"


def _hex(size_bytes: int) -> str:
    return f"{_NUMBERS.getrandbits(8 * size_bytes):0{2 * size_bytes}x}"
