"""Processes that run Mooncake's library, replaced when they end."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from ec_store.mooncake.url import MooncakeOptions

logger = logging.getLogger("vllm.ec_store")

START_S = 60.0
"""Time in seconds that a process has to import the library and to reach the master."""

CLOSE_S = 4.0
"""Time in seconds that a process has to end by itself, in which it removes its segment."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Pause in seconds before a process is replaced; it doubles while new ones end within it."""


@dataclass(frozen=True, slots=True)
class Running:
    """Process that is ready, and this side of the sockets to it."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket
    lanes: Sequence[socket.socket]

    def close(self) -> None:
        """Let the process end, kill it if it takes too long, and close the sockets."""
        self.control.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for lane in self.lanes:
            lane.close()


class Program:
    """Program `ec_store.mooncake.child` in a process of its own, replaced when that ends.

    Attributes:
        starts: number of processes that became ready.
    """

    def __init__(
        self, name: str, options: MooncakeOptions, *, segment_bytes: int, memories: Sequence[int]
    ) -> None:
        """Start the program in the background.

        Args:
            name: name for the log.
            options: options of the tier.
            segment_bytes: memory that the process contributes to Mooncake.
            memories: file descriptors of the memories of its lanes.
        """
        self._name = name
        self._options = options
        self._segment_bytes = segment_bytes
        self._memories = memories
        self._running: Running | None = None
        self._replaced: Running | None = None
        self._closed = threading.Event()
        self.starts = 0
        self._thread = threading.Thread(target=self._supervise, name=f"ec-{name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> Running | None:
        """Return the process that is ready; None while a new one starts."""
        running = self._running
        return None if running is self._replaced else running

    def replace(self, running: Running) -> None:
        """Kill a process, which no call uses from now on. Another one is started."""
        self._replaced = running  # the supervisor alone sets `_running`: its next one may be ready
        running.process.kill()

    def close(self) -> None:
        """End the process, which removes its segment from Mooncake."""
        self._closed.set()
        running = self._running
        if running is not None:
            running.close()

    def _supervise(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            since_s = time.monotonic()
            try:
                running = self._start()
            except OSError as error:  # no route to the master, or a limit of processes or files
                logger.warning("%s cannot start: %s", self._name, error)
                running = None
            if running is not None:
                self.starts += 1
                self._running = running
                if self._closed.is_set():
                    running.close()
                status = running.process.wait()
                self._running = None
                running.close()
                if not self._closed.is_set():
                    logger.warning(
                        "%s ended with status %d and is started again", self._name, status
                    )
            lived_s = time.monotonic() - since_s
            short = running is None or lived_s < LONGEST_PAUSE_S
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if short else FIRST_PAUSE_S
            self._closed.wait(pause_s)

    def _start(self) -> Running | None:
        """Start a process and wait until it is ready; None if it cannot start."""
        options = self._options
        host = options.own_host()
        control, its_control = _pair()
        pairs = [_pair() for _ in self._memories]
        theirs = [its_control, *(pair[1] for pair in pairs)]
        sockets, memories = [each.fileno() for each in theirs], self._memories
        config = {
            "control": sockets[0],
            "lanes": list(zip(sockets[1:], memories, strict=True)),
            "replicas": options.replicas,
            "setup": [
                host,
                options.metadata,
                self._segment_bytes,
                0,  # values go to the memories of the lanes
                options.protocol,
                options.devices,
                options.master,
            ],
        }
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "ec_store.mooncake.child", orjson.dumps(config)],
                stdin=subprocess.DEVNULL,
                pass_fds=(*sockets, *memories),
                env=_environment(options.protocol),
            )
        except OSError:
            for each in (control, *(pair[0] for pair in pairs)):
                each.close()
            raise
        finally:
            for each in theirs:
                each.close()
        running = Running(process, control, [pair[0] for pair in pairs])
        control.settimeout(START_S)
        try:
            ready = control.recv(16)
        except TimeoutError:
            ready = b""
        if ready:
            return running
        process.kill()
        running.close()
        logger.warning("%s cannot start; its message is above", self._name)
        return None


def _environment(protocol: str) -> dict[str, str]:
    """Return the environment of a process; that of the server overrides its settings."""
    settings = {"MC_LOG_LEVEL": "ERROR"}  # the library logs each connection
    if protocol == "tcp":
        # Otherwise the engine of transfers takes the RDMA devices that it finds, and each transfer
        # has a connection of its own: 64 of them for a look-up of 64 entries.
        settings |= {"MC_FORCE_TCP": "1", "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
    return settings | os.environ


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
