"""Addresses of the KV events of instances. No I/O."""

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from epd.routing.instances import CONSUMERS, Instance
from epd.routing.urls import EVENTS_AT, named_events_address

DEFAULT_EVENTS_AT = "tcp://*:5557"
"""vLLM's default endpoint. `*` stands for the host of the instance."""

MAX_PORT = 65535


def event_endpoints(instance: Instance, addresses: Sequence[str]) -> Iterator[str]:
    """Yield the endpoint of each of an instance's engines.

    The addresses are of instances, as of `named_events_address`. vLLM adds the number of a
    data-parallel rank to the port.
    """
    if instance.dp_size > 1 and instance.role not in CONSUMERS:
        return  # it chooses the rank itself: which engine has a prompt is not known
    by_url = dict(map(named_events_address, addresses))
    address = instance.kv_events or by_url.get(instance.url) or by_url.get("", DEFAULT_EVENTS_AT)
    found = EVENTS_AT.fullmatch(address)
    if found is None:
        yield address
        return
    host, port = found[1], int(found[2])
    if host == "*":
        host = urlsplit(instance.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
    for rank_port in range(port, min(port + instance.dp_size, MAX_PORT + 1)):
        yield f"tcp://{host}:{rank_port}"
