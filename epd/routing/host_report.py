"""Server of the memory of an instance's host, as its metrics name it. Pure.

An engine reads entries of its own host's memory. An entry of another host reaches it only through a
tier that both servers share.
"""

import re
from typing import NamedTuple

from epd.routing.reports import samples

NAME = b"vllm:ec_store_host_info"
"""The gauge of our connector, one sample for each engine (`ec_store.vllm_connector.host_info`)."""

_LABELS = tuple(
    re.compile(rb'[{,]%b="(%b)"' % label)
    for label in (
        (b"address", rb'shm\+(?:tcp|tls)://[^"\\/?#@]{1,256}'),
        (b"arena", rb"[0-9a-f]{1,64}"),
        (b"tier", rb"[0-9a-f]{,64}"),
    )
)


class Host(NamedTuple):
    """Server of the memory of one host.

    Attributes:
        address: URL by which proxies reach it; the instances of a host have the same.
        arena: name of its memory, another one after each start.
        tier: digest of the URL of its shared tier; empty: there is none.
    """

    address: str
    arena: str
    tier: str = ""

    def reaches(self, other: "Host") -> bool:
        """Return whether an engine of the other host can read what one of this host writes."""
        return self.address == other.address or (bool(self.tier) and self.tier == other.tier)


def read_host(page: bytes) -> Host | None:
    """Return the common server of all engines on a page; None if there is none, or several.

    A sample of 0 marks a server that the engine no longer has.
    """
    try:
        found = {_host(labels) for labels, value in samples(page, NAME) if value}
    except ValueError:  # UnicodeDecodeError is one
        return None
    return found.pop() if len(found) == 1 else None


def _host(labels: bytes) -> Host | None:
    found = [label.search(labels) for label in _LABELS]
    texts = [match[1].decode() for match in found if match is not None]
    return Host(*texts) if len(texts) == len(found) else None
