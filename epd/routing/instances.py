"""The vLLM servers behind the proxy."""

import enum
from dataclasses import dataclass


class Role(enum.StrEnum):
    """The stage an instance serves."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_DECODE = "prefill_decode"


ANSWERING = (Role.DECODE, Role.PREFILL_DECODE)
"""The roles of the instances that answer, of which there is one at a time."""

CONSUMERS = frozenset({Role.PREFILL, Role.PREFILL_DECODE})
"""The roles of the instances that encoder outputs go to."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM server.

    Attributes:
        role: the stage it serves.
        url: base URL without a trailing slash, such as `http://host:8001`.
        dp_size: data-parallel ranks behind it, of which a request to a consumer names one.
        weight: how much of the load is for it, beside others of its role; 0: nothing new, unless
            nobody else can.
        kv_addr: where its KV connector is spoken to, as the KV transfer in use writes it; empty:
            nowhere, or where the transfer knows.
        ec_zmq_addrs: where encode instances push encoder outputs to, for each data-parallel rank.
    """

    role: Role
    url: str
    dp_size: int = 1
    weight: float = 1.0
    kv_addr: str = ""
    ec_zmq_addrs: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Role, str]:
        """Who it is, whatever else is said of it."""
        return self.role, self.url

    def __hash__(self) -> int:
        """The URL's, which Python remembers: tables of instances are looked into all the time."""
        return hash(self.url)
