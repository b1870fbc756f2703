"""Instances, which are the vLLM servers behind the proxy, and their roles."""

import enum
from dataclasses import dataclass


class Role(enum.StrEnum):
    """The stage that an instance serves."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_DECODE = "prefill_decode"


ANSWERING = (Role.DECODE, Role.PREFILL_DECODE)
"""Roles of the instances that answer clients. Only one of them is in use at a time."""

CONSUMERS = frozenset({Role.PREFILL, Role.PREFILL_DECODE})
"""Roles of the instances that consume encoder outputs."""

TRANSFERS_KV = frozenset({Role.PREFILL, Role.DECODE})
"""Roles of the instances that send or receive KV blocks."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Instance: a vLLM server with its role.

    Attributes:
        url: base URL without a trailing slash, such as `http://host:8001`.
        dp_size: number of data-parallel ranks; a request to a consumer names one.
        weight: relative share of the load in its role. 0 drains it: no new requests unless no other
            instance is available.
        kv_addr: address of its KV connector, in the format of the KV transfer in use; empty for
            none, or if the transfer derives it.
        ec_zmq_addrs: addresses to which encode instances push encoder outputs, one for each
            data-parallel rank.
        kv_events: address of its KV events; empty for the configured one.
    """

    role: Role
    url: str
    dp_size: int = 1
    weight: float = 1.0
    kv_addr: str = ""
    ec_zmq_addrs: tuple[str, ...] = ()
    kv_events: str = ""

    @property
    def key(self) -> tuple[Role, str]:
        """The identity of the instance, without its details."""
        return self.role, self.url

    def __hash__(self) -> int:
        # A str caches its hash, and tables of instances are looked up often.
        return hash(self.url)
