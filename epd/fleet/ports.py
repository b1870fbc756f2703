"""Ports that nobody listens on."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on, all different.

    They lie below the range that the kernel hands out, from which vLLM's processes take theirs
    while they start. vLLM listens with SO_REUSEPORT: two instances given one port would share it
    without a word.
    """
    first_ephemeral = int(EPHEMERAL_PORTS.read_text().split()[0])
    candidates = range(max(1024, first_ephemeral - 16384), first_ephemeral)
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(candidates, len(candidates)):
            one = held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"no {count} free ports in {candidates}")


def check_free(host: str, port: int) -> None:
    """Raise `OSError` where the address cannot be listened on now."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as one:
        # What another server's connections left behind is not in the way.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
