"""Check of the ports that a fleet is to listen on."""

import socket


def check_free(host: str, port: int) -> None:
    """Raise `OSError` if a server cannot listen on the address now."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        # Connections of an earlier server in TIME_WAIT do not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
