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
import time
from collections.abc import Callable, Sequence
from typing import Any

REQUEST_BYTES = 2**20
CLOSE_S = 2.0

POLL_S = 0.0002
"""Interval in seconds at which the end of a transfer is looked for."""

DONE, FAILED = 1, -1
"""Results of a transfer that has ended."""


class Operations:
    """Operations of one lane, on a memory that starts at an address."""

    def __init__(
        self, library: Any, engine: Any, replication: Any, address: int, reached: set[str]
    ) -> None:
        """Create the operations.

        Args:
            library: the library.
            engine: its engine of transfers; None if the library alone reads.
            replication: its settings of replicas.
            address: address of the lane's memory.
            reached: owners of values that the library has read from, shared by all lanes.
        """
        self._library = library
        self._engine = engine
        self._replication = replication
        self._address = address
        self._reached = reached

    def exist(self, names: list[str]) -> Any:
        """Return 1 for each name that exists. That protects it for the master's lease time."""
        return self._library.batch_is_exist(names)

    def get(self, names: list[str], places: Sequence[int], sizes: list[int]) -> Any:
        """Read values to places of the memory; return their sizes."""
        return self._library.batch_get_into(names, self._addresses(places), sizes)

    def read(self, name: str, size: int) -> Any:
        """Read one value to the start of the memory; return its size.

        The engine's first call for an owner connects to it, and no other call of the engine begins
        until that ends. So the library, which has no such lock, reads from each owner first.
        """
        source = None if self._engine is None else self._source(name, size)
        if source is None:
            return self.get([name], [0], [size])
        owner = source.transport_endpoint
        if owner in self._reached:
            if self._transfer(source):
                return [source.size]
            self._reached.discard(owner)
        sizes = self.get([name], [0], [size])
        if sizes[0] >= 0:
            self._reached.add(owner)
        return sizes

    def _source(self, name: str, size: int) -> Any:
        """Return where a value is that the engine can read; None if there is no such place."""
        replicas = self._library.batch_get_replica_desc([name]).get(name, ())
        in_memory = (each for each in replicas if each.is_memory_replica())
        replica = next((each for each in in_memory if each.status.name == "COMPLETE"), None)
        if replica is None:
            return None
        source = replica.get_memory_descriptor().buffer_descriptor
        return source if source.size <= size else None

    def _transfer(self, source: Any) -> bool:
        """Read a value with the engine; return whether it was read.

        The library waits for a transfer in a loop without a pause, which takes a core for as long
        as it lasts. Over TCP that is a core that the transfer needs.
        """
        transfer = self._engine.batch_transfer_async_read(
            source.transport_endpoint, [self._address], [source.buffer_address], [source.size]
        )
        if not transfer:
            return False
        while (result := self._engine.transfer_check_status(transfer)) not in {DONE, FAILED}:
            time.sleep(POLL_S)
        return bool(result == DONE)

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
    library, engine, replication = _set_up(config)
    memories = [mmap.mmap(memory, 0) for _, memory in config["lanes"]]
    reached: set[str] = set()
    for number, (handle, _) in enumerate(config["lanes"]):
        address = _register(library, memories[number])
        operations = Operations(library, engine, replication, address, reached)
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


def _set_up(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    from mooncake.engine import TransferEngine  # noqa: PLC0415
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415

    host, metadata, _, _, protocol, devices, _ = config["setup"]
    engine = None
    # A metadata service knows each process by the port that the library adds to the host; this
    # engine has none before it is started.
    if protocol == "tcp" and metadata == "P2PHANDSHAKE":
        engine = TransferEngine()
        _check(engine.initialize(host, metadata, protocol, devices))
    library = MooncakeDistributedStore()
    _check(library.setup(*config["setup"], engine and engine.get_engine()))
    replication = ReplicateConfig()
    replication.replica_num = config["replicas"]
    return library, engine, replication


def _check(status: int) -> None:
    if status != 0:
        sys.exit(f"Mooncake's client cannot start: error {status}")


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
