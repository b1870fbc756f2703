"""Program that runs Mooncake's library: `python -m ec_store.mooncake.child`.

The library is native code that may end or block its process. `ec-store serve` keeps the memory of
all engines of a host, so the library runs beside it. Each lane has a socket, a thread and a memory
that is registered with the library. It serves one request after another: JSON, the name of an
operation and its arguments. The reply is the library's result.
"""

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

REQUEST_BYTES = 2**20
CLOSE_S = 2.0


class Operations:
    """Operations of one lane, on a memory that starts at an address."""

    def __init__(self, library: Any, replication: Any, address: int) -> None:
        self._library = library
        self._replication = replication
        self._address = address

    def exist(self, names: list[str]) -> Any:
        """Return 1 for each name that exists. That protects it for the master's lease time."""
        return self._library.batch_is_exist(names)

    def get(self, names: list[str], places: Sequence[int], sizes: list[int]) -> Any:
        """Read values to places of the memory; return their sizes."""
        return self._library.batch_get_into(names, self._addresses(places), sizes)

    def put(self, names: list[str], places: Sequence[int], sizes: list[int]) -> Any:
        addresses = self._addresses(places)
        return self._library.batch_put_from(names, addresses, sizes, self._replication)

    def remove(self, names: list[str]) -> Any:
        return self._library.batch_remove(names, True)

    def remove_matching(self, pattern: str) -> Any:
        return [self._library.remove_by_regex(pattern, True)]

    def _addresses(self, places: Sequence[int]) -> list[int]:
        return [self._address + place for place in places]


def main() -> None:
    """Serve the lanes of the configuration on the command line until the parent's end closes."""
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=config["control"])
    library, replication = _set_up(config)
    memories = [mmap.mmap(memory, 0) for _, memory in config["lanes"]]
    for number, (handle, _) in enumerate(config["lanes"]):
        operations = Operations(library, replication, _register(library, memories[number]))
        lane = socket.socket(fileno=handle)
        threading.Thread(
            target=_serve, args=(lane, operations), name=f"lane-{number}", daemon=True
        ).start()
    control.send(b"ready")
    control.recv(1)  # until the parent ends
    closing = threading.Thread(target=library.close, daemon=True)
    closing.start()
    closing.join(CLOSE_S)  # the master may not answer
    os._exit(0)


def _set_up(config: dict[str, Any]) -> tuple[Any, Any]:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415

    library = MooncakeDistributedStore()
    status = library.setup(*config["setup"])
    if status != 0:
        sys.exit(f"Mooncake's client cannot start: error {status}")
    replication = ReplicateConfig()
    replication.replica_num = config["replicas"]
    return library, replication


def _register(library: Any, memory: mmap.mmap) -> int:
    """Register a memory with the library and return its address."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    status = library.register_buffer(address, len(memory))
    if status != 0:
        sys.exit(f"{len(memory)} bytes cannot be registered with Mooncake: error {status}")
    return address


def _serve(lane: socket.socket, operations: Operations) -> None:
    while request := lane.recv(REQUEST_BYTES):
        name, *arguments = json.loads(request)
        operation: Callable[..., Any] = getattr(operations, name)
        lane.send(json.dumps(list(operation(*arguments))).encode())


if __name__ == "__main__":
    main()
