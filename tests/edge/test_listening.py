"""Addresses that cannot be listened on."""

import errno
import socket
from typing import Any

import pytest

from epd.config import ProxyConfig
from epd.edge.listening import CannotListen, bound_sockets
from epd.workers.supervisor import supervise

V4 = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", 0, 0, 0))


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_an_address_without_ipv6_is_left_out_unless_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    bind = socket.socket.bind
    found = [V6, V4]

    def without_ipv6(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_INET6:
            raise OSError(number, "no IPv6")
        bind(self, address)

    monkeypatch.setattr(socket.socket, "bind", without_ipv6)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    config = ProxyConfig(
        port=0, encode_servers_urls=(), decode_servers_urls=("http://127.0.0.1:9",), workers=1
    )
    with bound_sockets(config) as [[only]]:
        assert only.family == socket.AF_INET

    found.remove(V4)
    with pytest.raises(CannotListen), bound_sockets(config):
        pass


async def test_an_error_of_listen_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(*_: object) -> None:
        raise OSError(errno.EADDRINUSE, "in use")

    async def serve(*_: object) -> None:
        pass

    monkeypatch.setattr(socket.socket, "listen", listen)
    config = ProxyConfig(
        host="127.0.0.1",
        port=0,
        workers=2,
        encode_servers_urls=(),
        decode_servers_urls=("http://127.0.0.1:9",),
    )
    with pytest.raises(CannotListen, match=r"cannot listen on 127\.0\.0\.1:0: in use"):
        await supervise(config, serve)
