"""An address that leads to a server, and later to another one, as a virtual IP does."""

import socket
import threading
import time
from contextlib import suppress
from typing import Self

from tests.store.redis_server import RedisServer


class Forwarder:
    """Connects whoever connects to it with `target`; who is connected stays where he is.

    Attributes:
        target: where new connections lead.
        pause_s: how long it waits after each byte of an answer; None: it does not.
        delay_s: how much later each piece comes.
    """

    def __init__(self, target: RedisServer) -> None:
        self.target = target
        self.pause_s: float | None = None
        self.delay_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()

    def url(self, query: str = "", scheme: str = "redis") -> str:
        """Its address."""
        return f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}/?{query}"

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target.port))
            except OSError:
                client.close()
                continue
            for pair in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while (piece := source.recv(65536)) and not self._closed.is_set():
                time.sleep(self.delay_s)
                if self.pause_s is None or not answers:
                    sink.sendall(piece)
                    continue
                for byte in piece:
                    sink.sendall(bytes([byte]))
                    time.sleep(self.pause_s or 0)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.pause_s = None
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
