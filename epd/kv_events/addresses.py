"""Addresses of the KV events of instances. No I/O."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from epd.routing.instances import CONSUMERS, Instance
from epd.routing.urls import EVENTS_AT, named_events_address

DEFAULT_EVENTS_AT = "tcp://*:5557"
"""vLLM's default endpoint. `*` stands for the host of the instance."""

MAX_PORT = 65535


class EventSource(NamedTuple):
    """Endpoints of one engine: publisher of the events, and server of past ones; empty for none."""

    endpoint: str
    replay: str = ""


def event_sources(instance: Instance, addresses: Sequence[str]) -> Iterator[EventSource]:
    """Yield the endpoints of each of an instance's engines.

    The addresses are of instances, as of `named_events_address`. vLLM adds the number of a
    data-parallel rank to the ports.
    """
    if instance.dp_size > 1 and instance.role not in CONSUMERS:
        return  # it chooses the rank itself: which engine has a prompt is not known
    named = dict(map(named_events_address, addresses))
    address = instance.kv_events or named.get(instance.url) or named.get("", DEFAULT_EVENTS_AT)
    found = EVENTS_AT.fullmatch(address)
    if found is None:
        yield EventSource(address)
        return
    host, port, replay = found.groups()
    if host == "*":
        host = urlsplit(instance.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
    last = MAX_PORT - max(int(port), int(replay or 0))
    for rank in range(min(instance.dp_size, last + 1)):
        yield EventSource(
            f"tcp://{host}:{int(port) + rank}",
            f"tcp://{host}:{int(replay) + rank}" if replay else "",
        )
