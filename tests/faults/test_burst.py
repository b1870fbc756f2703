"""Hundreds of clients that connect at the same moment."""

import json
import select
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.certificates import Authority
from tests.support.fleet import until
from tests.support.programs import INSTANCES, serving

CLIENTS = 500
SOMAXCONN = int(Path("/proc/sys/net/core/somaxconn").read_text())

pytestmark = [
    pytest.mark.fault(72),
    pytest.mark.skipif(SOMAXCONN < CLIENTS, reason="the kernel limits backlogs to somaxconn"),
]


@contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    """Suspend a process and its workers, so that none accepts a connection."""
    first = psutil.Process(process.pid)
    family = [first, *first.children(recursive=True)]
    for one in family:
        one.suspend()
    try:
        yield
    finally:
        for one in family:
            one.resume()


class Burst:
    """Connections that were started at the same moment."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self._connected = set[int]()
        self._poll = select.poll()
        self.clients = [stack.enter_context(closing(socket.socket())) for _ in range(CLIENTS)]
        for client in self.clients:
            client.setblocking(False)
            self._poll.register(client, select.POLLOUT)
            client.connect_ex(("127.0.0.1", port))

    def all_connected(self) -> bool:
        """Return whether the kernel has completed all connections; it retries dropped ones."""
        for descriptor, events in self._poll.poll(0):
            assert events == select.POLLOUT
            self._connected.add(descriptor)
            self._poll.unregister(descriptor)
        return len(self._connected) == CLIENTS


def wait_for_workers(process: subprocess.Popen[str], count: int) -> None:
    """Read the log until `count` workers listen."""
    assert process.stderr is not None
    while count:
        count -= json.loads(process.stderr.readline())["event"] == "serving"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("tls", [False, True])
async def test_the_kernel_queues_500_connections_before_they_are_accepted(
    tmp_path: Path, workers: int, tls: bool
) -> None:
    flags = [*INSTANCES, "--workers", str(workers)]
    if tls:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        flags += Authority.made(tmp_path).issue().flags
    with serving(*flags) as (url, process), ExitStack() as stack:
        wait_for_workers(process, workers if workers > 1 else 0)
        with stopped(process):
            burst = Burst(int(url.rpartition(":")[2]), stack)
            await until(burst.all_connected)
        if not tls:
            some = burst.clients[::10]  # the log lines fit into the pipe
            for client in some:
                client.settimeout(60)
                client.sendall(b"GET /ready HTTP/1.1\r\nHost: epd\r\n\r\n")
            assert {client.recv(12) for client in some} == {b"HTTP/1.1 503"}
