"""vLLM's publisher of KV events, on real ZeroMQ sockets: `ZmqEventPublisher` of vLLM 0.32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import zmq

SIZE = 16
"""Tokens of a block, as in vLLM's default."""


def stored(
    blocks: Sequence[bytes | int],
    *,
    parent: bytes | int | None = None,
    mark: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a `BlockStored` as vLLM encodes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": parent,
        "token_ids": [7] * SIZE * len(blocks),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[["key", 3]], *[None] * (len(blocks) - 1)],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": mark,
        **more,
    }


def removed(*blocks: bytes | int, **more: Any) -> dict[str, Any]:
    """Return a `BlockRemoved` as vLLM encodes it."""
    event = {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU", "group_idx": 0}
    return event | more


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: dict[str, Any]) -> bytes:
    """Return a `KVEventBatch` as vLLM encodes it."""
    return msgspec.msgpack.encode([1.5, list(events), 0])


@dataclass
class KVPublisher:
    """A publisher.

    Attributes:
        port: its port; 0 until it has started for a free one.
    """

    port: int = 0
    _number: int = field(default=0, init=False)
    _subscribers: int = field(default=0, init=False)

    def __enter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._number = self._subscribers = 0
        # An XPUB also reports subscriptions, so that no test has to wait for a time.
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.set(zmq.XPUB_VERBOSER, 1)
        self._socket.set(zmq.LINGER, 0)
        if self.port:
            self._socket.bind(f"tcp://127.0.0.1:{self.port}")
        else:
            self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.destroy(0)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def subscribers(self) -> int:
        """Number of subscribers, of this publisher since its start."""
        while self._socket.poll(0):
            self._subscribers += 1 if self._socket.recv()[:1] == b"\x01" else -1
        return self._subscribers

    def publish(self, *events: dict[str, Any]) -> None:
        self.publish_raw(batch(*events))

    def publish_raw(self, payload: bytes, *, sent: bool = True) -> None:
        """Publish a batch; or lose it on the way, if not `sent`."""
        number, self._number = self._number, self._number + 1
        if sent:
            self._socket.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def send_frames(self, *frames: bytes) -> None:
        """Send a message that is no batch."""
        self._socket.send_multipart(frames)


@contextmanager
def publishers(count: int) -> Iterator[list[KVPublisher]]:
    """Start publishers."""
    started: list[KVPublisher] = []
    try:
        for _ in range(count):
            started.append(KVPublisher().__enter__())  # noqa: PERF401 - closed if one fails
        yield started
    finally:
        for one in started:
            one.__exit__()
