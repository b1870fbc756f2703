"""Addresses at which engines publish their KV events. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.urls import EVENTS_AT, named_events_address

DEFAULT = "tcp://*:5557"
"""vLLM's default endpoint. `*` stands for the host of the instance."""

MAX_PORT = 65535


EventCounts = Callable[[], Mapping[tuple[Role, str], Mapping[str, int]]]
"""Returns the number of KV events and of faults, by the key of an instance and kind."""


class EventSource(NamedTuple):
    """Endpoints of one engine.

    Attributes:
        endpoint: publisher of the events.
        replay: server of past events; empty for none.
    """

    endpoint: str
    replay: str = ""


def event_sources(instance: Instance, addresses: Sequence[str]) -> Iterator[EventSource]:
    """Yield the endpoints of each of an instance's engines.

    vLLM adds the number of a data-parallel rank to the ports.

    Args:
        instance: the instance.
        addresses: addresses of instances, as of `named_events_address`.
    """
    if instance.dp_size > 1 and instance.role not in CONSUMERS:
        return  # it chooses the rank itself: which engine has a prompt is not known
    named = dict(map(named_events_address, addresses))
    address = instance.kv_events or named.get(instance.url) or named.get("", DEFAULT)
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
