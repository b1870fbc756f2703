"""Network namespaces of tests."""

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.ec_store.waiting import until
from tests.support.namespaces import connected, why_not

SERVER, CLIENT = "10.78.0.1", "10.78.0.2"
LISTEN = f"import socket; print(socket.create_server(('{SERVER}', 80)).accept()); input()"
CONNECT = f"import socket; socket.create_connection(('{SERVER}', 80), 5)"


def inside(name: str, code: str) -> Sequence[str]:
    """Return the command line that runs Python in a namespace."""
    return ["ip", "netns", "exec", name, sys.executable, "-c", code]


def test_namespaces_are_connected_and_end_with_their_processes_after_a_failure() -> None:
    if reason := why_not():
        pytest.skip(reason)
    servers = []

    def connect_and_fail() -> None:
        with connected([SERVER, CLIENT]) as names:
            servers.append(subprocess.Popen(inside(names[SERVER], LISTEN), stdin=subprocess.PIPE))
            ask = inside(names[CLIENT], CONNECT)
            until(
                lambda: subprocess.run(ask, stderr=subprocess.DEVNULL, check=False).returncode == 0
            )
            raise RuntimeError(*names.values())

    with pytest.raises(RuntimeError) as failed:
        connect_and_fail()

    with servers[0] as server:
        assert server.wait(20) == -signal.SIGKILL
    command = ["ip", "netns", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [name for name in failed.value.args if name in listed] == []
