"""Hosts in network namespaces of their own, which Linux makes for root.

A namespace has the PID of its test process in its name. The next test process deletes those of
processes that were killed.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

END_S = 20.0
NAME = re.compile(r"^epd-(\d+)-\w+", re.MULTILINE)


def why_not() -> str | None:
    """Return why there can be no network namespaces here; None if there can."""
    name = f"epd-{os.getpid()}-tried"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except FileNotFoundError:
        return "the program `ip` is missing: install iproute2"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused: {error.stderr.strip()}"
    return None


@contextmanager
def connected(addresses: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Make a namespace for each address, on one network; yield their names.

    The bridge between them is in the first one. At the end, all processes in them are killed.
    """
    names = {address: f"epd-{os.getpid()}-{number}" for number, address in enumerate(addresses)}
    bridge = names[addresses[0]]
    _delete_left()
    with ExitStack() as undo:
        for name in names.values():
            _ip("netns", "add", name)
            undo.callback(_delete, name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "eth0", "type", "bridge")
        for number, name in enumerate(list(names.values())[1:]):
            port = f"port{number}"
            pair = ("type", "veth", "peer", "name", port, "netns", bridge)
            _ip("-n", name, "link", "add", "eth0", *pair)
            _ip("-n", bridge, "link", "set", port, "master", "eth0", "up")
        for address, name in names.items():
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names


def _delete_left() -> None:
    """Delete the namespaces of test processes that were killed, with the processes in them."""
    for found in list(NAME.finditer(_ip("netns", "list"))):
        try:
            os.kill(int(found[1]), 0)
        except ProcessLookupError:
            with suppress(subprocess.CalledProcessError):  # another test process deletes it too
                _delete(found[0])


def _delete(name: str) -> None:
    deadline_s = time.monotonic() + END_S
    while (running := _ip("netns", "pids", name).split()) and time.monotonic() < deadline_s:
        for process in map(int, running):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)  # noqa: S607
    return done.stdout
