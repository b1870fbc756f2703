"""Fake of the system's resolver."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest


class SystemNames:
    """Names of hosts. Every one is this machine, unless it is given addresses.

    Attributes:
        addresses: addresses of names.
        error: error number of each lookup; 0 for none.
        hanging: end of the names that are looked up only after `go_on`; None for none.
        asked: all names so far.
    """

    def __init__(self) -> None:
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.error = 0
        self.hanging: str | None = None
        self.asked: list[str] = []
        self._go_on = threading.Event()
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, *args: Any, **more: Any) -> Any:
        if host.replace(".", "").isdigit():
            return self._real(host, *args, **more)
        self.asked.append(host)
        if self.hanging is not None and host.endswith(self.hanging):
            self._go_on.wait(30)
        if self.error:
            raise socket.gaierror(self.error, "failed")
        addresses = self.addresses.get(host, ("127.0.0.1",))
        return [found for each in addresses for found in self._real(each, *args, **more)]

    def go_on(self) -> None:
        self._go_on.set()


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[SystemNames]:
    """Put a fake in place of the system's resolver."""
    system = SystemNames()
    monkeypatch.setattr(socket, "getaddrinfo", system.getaddrinfo)
    yield system
    system.go_on()
