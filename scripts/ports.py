"""Free ports of this machine."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return distinct free ports of the loopback address; raise `OSError` if there are fewer.

    They are below the ephemeral range of the kernel, from which vLLM's processes take ports while
    they start. vLLM listens with SO_REUSEPORT: two instances with the same port would share it
    silently.
    """
    first_ephemeral = int(EPHEMERAL_PORTS.read_text().split()[0])
    candidates = range(max(1024, first_ephemeral - 16384), first_ephemeral)
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(candidates, len(candidates)):
            listener = held.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"no {count} free ports in {candidates}")
