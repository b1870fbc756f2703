"""A way from an engine's workers to its scheduler beside vLLM's own.

vLLM passes what a connector's worker reports on to the scheduler after it has asked for a request's
reply, and its V1 model runner passes nothing on from a pure producer (the branch for an instance
that is no consumer in `GPUModelRunner.execute_model`). So workers send datagrams to a socket of the
scheduler: what a worker sent before it returned a step's output is there when the output is.

The socket's name is abstract (unix(7)): it leaves nothing behind, and is gone with its process.
Messages of other users are dropped.

Abstract names belong to a network namespace: a worker on another host or in another container is
not heard (docs/configuration.md).
"""

import hashlib
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson

MAX_MESSAGE_BYTES = 128 * 1024
MAX_MESSAGES = 10_000
"""How many are heard at once: others may send faster than they are read."""

logger = logging.getLogger("vllm.ec_store")

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""


def _address(engine: str) -> bytes:
    # Hashed: an engine's name may be longer than a socket's.
    return b"\0ec-store/" + hashlib.sha256(engine.encode()).hexdigest().encode()


class Sender:
    """The workers' end. Safe to use from many threads."""

    def __init__(self, engine: str) -> None:
        """Connect to nobody yet: workers start before their scheduler.

        Args:
            engine: name of the engine, the same in all of its processes and in no other engine's.
        """
        self._address = _address(engine)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def send(self, message: dict[str, Any]) -> bool:
        """Send without waiting; False where it did not go: nobody is there, or nobody reads."""
        encoded = orjson.dumps(message)
        if len(encoded) > MAX_MESSAGE_BYTES:
            return False
        try:
            self._socket.sendto(encoded, self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Receiver:
    """The scheduler's end."""

    def __init__(self, engine: str) -> None:
        """Listen; hear nothing where another process listens under this name.

        Args:
            engine: as the senders have it.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self._socket.bind(_address(engine))
        except OSError as error:
            logger.warning(
                "the workers of engine %s are not heard, is there another one of this name: %s",
                engine,
                error,
            )

    def drain(self) -> Iterator[dict[str, Any]]:
        """What has come, without waiting."""
        for _ in range(MAX_MESSAGES):
            try:
                encoded, credentials, _, _ = self._socket.recvmsg(
                    MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            if _sent_by_this_user(credentials):
                with suppress(orjson.JSONDecodeError):
                    message = orjson.loads(encoded)
                    if isinstance(message, dict):
                        yield message

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _sent_by_this_user(ancillary: list[tuple[int, int, bytes]]) -> bool:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return bool(_CREDENTIALS.unpack(data)[1] == os.getuid())
    return False
