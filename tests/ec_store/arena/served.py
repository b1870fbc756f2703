"""Servers of an arena, on a thread of the test process or as processes, and their clients."""

import asyncio
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import msgspec
import uvloop

from ec_store import EntryKey
from ec_store.arena.connection import ArenaConnection, MappedArena
from ec_store.arena.extents import ExtentAllocator
from ec_store.arena.index import ArenaIndex
from ec_store.arena.memory import create_memory
from ec_store.arena.protocol import GetStats, Pin, Read, Stats
from ec_store.arena.server import ArenaServer
from ec_store.arena.sockets import bind
from ec_store.arena.store import ArenaStore
from ec_store.arena.tier import Tier, TierLimits
from ec_store.arena.url import ArenaOptions
from ec_store.errors import StoreUnavailable

MIB = 2**20


@contextmanager
def serving(  # noqa: PLR0913 - all but two by name
    path: Path,
    size_bytes: int = 64 * MIB,
    *,
    segment_bytes: int = 2**30,
    client_bytes: int | None = None,
    tiers: Mapping[str, Tier] | None = None,
    tier_limits: TierLimits | None = None,
    **options: Any,
) -> Iterator[ArenaServer]:
    memory = create_memory(size_bytes, segment_bytes)
    extents = ExtentAllocator(size_bytes, segment_bytes)
    index = ArenaIndex(extents, client_bytes=client_bytes)
    started: list[ArenaServer] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        server = ArenaServer(memory, index, **options)
        await server.start(bind(path, 0o600), tiers, tier_limits)
        started.append(server)
        ready.set()
        await asyncio.to_thread(done.wait)
        await server.close()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert ready.wait(10), "the server has not started"
        yield started[0]
    finally:
        done.set()
        thread.join()


def hashed_pin(connection: ArenaConnection, key: EntryKey) -> tuple[Pin, MappedArena]:
    """Pin an entry when it has a checksum."""
    deadline_s = time.monotonic() + 10
    while True:
        reply, arena = connection.call(Read([bytes.fromhex(key.digest)]))
        [pin] = reply.pins
        if pin.checksum:
            return pin, arena
        arena.released.append(pin.number)
        assert time.monotonic() < deadline_s, f"no checksum of {pin}"
        time.sleep(0.002)


def opened(path: Path, timeout_s: float = 10) -> ArenaStore:
    return ArenaStore(ArenaOptions(str(path), timeout_s=timeout_s, verify=1))


def stats(path: Path) -> Stats:
    connection = ArenaConnection(str(path), "proxy", 10)
    try:
        return connection.call(GetStats())[0]
    finally:
        connection.close()


def until(path: Path, **expected: float) -> None:
    """Wait until the server's statistics have these values."""
    deadline_s = time.monotonic() + 10
    while True:
        found = stats(path)
        numbers = {**asdict(found.memory), **msgspec.structs.asdict(found)}
        if all(numbers[name] == value for name, value in expected.items()):
            return
        assert time.monotonic() < deadline_s, f"{found}, expected {expected}"
        time.sleep(0.01)


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "it has not happened"
        time.sleep(0.005)


def in_child(path: Path, code: str) -> subprocess.Popen[str]:
    """Run code in a process with `store`; return when it has printed a line."""
    start = f"""
import os, sys, time
from pathlib import Path
from ec_store.arena.protocol import *
from tests.ec_store.arena.served import *
from ec_store.testing.stores import *
store = opened(Path({str(path)!r}))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", start + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    )
    assert said(child) == "ready"
    return child


def said(child: subprocess.Popen[str]) -> str:
    """Return the next line that a child prints; empty if it has ended."""
    assert child.stdout is not None
    return child.stdout.readline().rstrip()


def tell(child: subprocess.Popen[str]) -> None:
    """Let a child go on that reads a line."""
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def lose_connection(store: ArenaStore) -> None:
    """End the store's connection, as after a time-out; what it reads stays pinned."""
    store.connection._disconnect()  # noqa: SLF001


def end(child: subprocess.Popen[str]) -> None:
    with child:
        child.kill()


def raw(path: Path, hello: bytes, message: bytes = b"") -> list[bytes]:
    """Send bytes on a connection of its own; return the messages that the server has sent."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        received = b""
        for sent in (hello, message):
            with suppress(ConnectionError):  # the server may have closed the connection already
                connection.sendall(sent)
            if sent is hello:
                received += connection.recv(2**16)
        with suppress(ConnectionResetError):
            while data := connection.recv(2**16):
                received += data
    replies = []
    while received:
        size = 4 + int.from_bytes(received[:4], "little")
        replies.append(received[4:size])
        received = received[size:]
    return replies


def refused(
    url: str, before: Callable[[], object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a server that does not start; `before` is called in its process."""
    command = [sys.executable, "-m", "ec_store", "serve", url, "--port", "0"]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=before,
    )


class Serve:
    """Process of `ec-store serve`, which a `with` statement starts and kills."""

    def __init__(
        self,
        path: Path,
        max_bytes: int = 16 * MIB,
        mode: str = "0600",
        open_files: tuple[int, int] | None = None,
        group: Path | None = None,
    ) -> None:
        """Describe a process.

        `open_files` are its soft and its hard limit, `group` is the folder of its control group.
        """
        self._path = path
        self._url = f"shm://{path}?max_bytes={max_bytes}&mode={mode}"
        self._open_files = open_files
        self._group = group
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ec_store", "serve", self._url, "--port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=self._limit,  # noqa: PLW1509 - it makes a few system calls
        )
        deadline_s = time.monotonic() + 30
        while True:
            try:
                stats(self._path)
            except StoreUnavailable:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            else:
                return

    def _limit(self) -> None:
        if self._group is not None:
            (self._group / "cgroup.procs").write_text("0")
        if self._open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
