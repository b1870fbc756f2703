"""Datagrams from an engine's workers to its scheduler, beside vLLM's own channel.

vLLM passes the report of a connector's worker to the scheduler after the scheduler has asked the
connector about a request's reply. Its V1 model runner passes no report from a pure producer (the
branch for an instance that is not a consumer in `GPUModelRunner.execute_model`). So workers send
datagrams to a socket of the scheduler. A datagram that a worker sends before it returns a step's
output arrives before that output.

The socket has an abstract name (unix(7)): it leaves no file, and the kernel removes it with its
process. The receiver drops messages of other users.

An abstract name is valid in one network namespace. Messages of a worker on another host or in
another container do not arrive (docs/configuration/store.md).
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
"""Upper bound of the messages that one `drain` reads: senders may be faster than the reader."""

logger = logging.getLogger("vllm.ec_store")

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""


def _address(engine: str) -> bytes:
    # Hashed: an engine's name may be longer than a socket's name.
    return b"\0ec-store/" + hashlib.sha256(engine.encode()).hexdigest().encode()


class Sender:
    """Sending end, in the workers. Thread-safe."""

    def __init__(self, engine: str) -> None:
        """Open a socket without connecting it: workers start before their scheduler.

        All processes of an engine pass the same name, and every other engine another one.
        """
        self._address = _address(engine)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message without waiting; False if it is too large or no receiver takes it."""
        encoded = orjson.dumps(message)
        if len(encoded) <= MAX_MESSAGE_BYTES:
            with suppress(OSError):
                self._socket.sendto(encoded, self._address)
                return True
        return False

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """Receiving end, in the scheduler."""

    def __init__(self, engine: str) -> None:
        """Bind the socket. If another process has bound the name, log it and receive nothing."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self._socket.bind(_address(engine))
        except OSError as error:
            logger.warning(
                "the workers of engine %s cannot reach its scheduler; another engine may have this "
                "name: %s",
                engine,
                error,
            )

    def drain(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived, without waiting for more."""
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
        self._socket.close()


def _sent_by_this_user(ancillary: list[tuple[int, int, bytes]]) -> bool:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return bool(_CREDENTIALS.unpack(data)[1] == os.getuid())
    return False
