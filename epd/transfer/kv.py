"""KV blocks from prefill to decode: the `kv_transfer_params` of the simple connectors.

The base class is here too; `mooncake.py` and `nixl.py` have the connectors with more parameters.

- Connectors that need no parameters: their instances find each other's blocks in shared storage.
- LMCache: decode finds prefill's blocks by their tokens, in a store or in the memory to which
  prefill wrote them. The wire is that of `LMCacheConnectorV1Impl.update_state_after_alloc` in
  `vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/vllm_v1_adapter.py` of vLLM
  0.33, and of LMCache's `examples/disagg_prefill/disagg_proxy_server.py`.
"""

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from epd.api.usage import Usage
from epd.errors import UpstreamFailed
from epd.routing.instances import Instance, Role
from epd.transfer import Params

PORT = re.compile(r"[0-9]{1,5}")
HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
"""Pattern of the hosts that may be sent to instances, also in headers."""


class Handover(NamedTuple):
    """What is known before a prefill of the KV blocks that decode will read from it.

    Attributes:
        request_id: unique id of this attempt of a request.
        prefill_rank: data-parallel rank of the prefill; None if the instance chooses it.
        decode: the decode instance; None if it is chosen after prefill has answered.
        peer: facts about the prefill instance's connector; None if unknown.
        earlier: decode's `kv_transfer_params` of the conversation's previous turn, or None.
        concurrent: whether decode gets its request together with prefill.
    """

    request_id: str
    prefill: Instance
    prefill_rank: int | None = None
    decode: Instance | None = None
    peer: Params | None = None
    earlier: Params | None = None
    concurrent: bool = False


class Prefilled(NamedTuple):
    """What a prefill hands to decode and to the client's answer; empty until it has ended.

    Attributes:
        params: `kv_transfer_params` of the decode request; None for none.
        reply: `kv_transfer_params` of prefill's reply; empty for none.
        usage: prefill's numbers for the client's answer.
    """

    handover: Handover
    params: Params | None
    reply: Params
    usage: Usage


class KVTransfer(ABC):
    """Transfer of prefill's KV blocks to decode, as far as the proxy takes part in it.

    The base class passes prefill's reply on to decode unchanged. Subclasses override the
    differences.

    Attributes:
        name: name of the transfer in error messages.
        eager: whether decode must be chosen before the prefill request is sent.
        bidirectional: whether prefill can read decode's blocks of an earlier turn.
        has_peers: whether decode needs facts about prefill's connector (`Handover.peer`).
        released: whether prefill keeps its blocks until decode has requested them.
        named_apart: whether no two instances may have the same `kv_addr`.
        addressed: roles of the instances that may have a `kv_addr`.
    """

    name: ClassVar[str]
    eager: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False
    has_peers: ClassVar[bool] = False
    released: ClassVar[bool] = True
    named_apart: ClassVar[bool] = False
    addressed: ClassVar[frozenset[Role]] = frozenset()

    def check(self, instance: Instance) -> None:
        """Reject an instance that could not take part in a transfer.

        Raises:
            ValueError: its `kv_addr` is invalid, or would have no effect.
        """
        if instance.kv_addr and instance.role not in self.addressed:
            raise ValueError(f"{self.name} does not use a kv_addr of {instance.role} instances")

    def accepts_instance(self, instance: Instance) -> bool:
        try:
            self.check(instance)
        except ValueError:
            return False
        return True

    def peer_url(self, prefill: Instance) -> str | None:  # noqa: ARG002
        """Return the URL of the JSON that `parse_peer` reads; None without one."""
        return None

    def parse_peer(self, answer: Any) -> Params:  # noqa: ARG002
        """Return the facts for `Handover.peer` from the parsed JSON at `peer_url`.

        Raises:
            UpstreamFailed: the JSON is not in the connector's format.
        """
        return {}

    def facts_of_reply(self, handover: Handover, replied: Params) -> Params | None:  # noqa: ARG002
        """Return the facts about prefill's rank in its reply, for later requests; None for none."""
        return None

    def decode_concurrent(self, peer: Params | None) -> bool:  # noqa: ARG002
        """Return whether decode gets its request together with prefill, and waits for blocks.

        `peer` are the facts of `Handover.peer`.
        """
        return False

    @abstractmethod
    def prefill_params(self, handover: Handover) -> Params | None:
        """Return the `kv_transfer_params` of the prefill request; None for none."""

    def decode_params(self, handover: Handover, replied: Params) -> Params | None:  # noqa: ARG002
        """Return the `kv_transfer_params` of the decode request; None for none.

        `replied` are those of prefill: empty before its reply, or if it has none.

        Raises:
            UpstreamFailed: decode would have to compute everything again.
        """
        if not replied:
            raise UpstreamFailed(
                "the prefill instance returned no kv_transfer_params: is it started with "
                "--kv-transfer-config?",
                slug="prefill_no_kv",
                stage="prefill",
            )
        return replied


def host_and_ports(address: str, ports: int) -> list[str]:
    """Split an address into its host and ports. Each port may be a list such as `7300+7301`.

    Raises:
        ValueError: the address is invalid.
    """
    host, *port_lists = address.rsplit(":", ports)
    numbers = [number for port in port_lists for number in port.split("+")]
    valid = all(PORT.fullmatch(number) and 0 < int(number) < 2**16 for number in numbers)
    if not valid or not HOST.fullmatch(host) or len(port_lists) < ports:
        form = "host" + ":port" * ports
        raise ValueError(f"{address!r} is not an address such as {form}")
    return [host, *port_lists]


class WithoutParams(KVTransfer):
    """Transfer without parameters: vLLM's ExampleConnector, OffloadingConnector, a shared store."""

    name = "none"
    released = False

    def prefill_params(self, handover: Handover) -> None:  # noqa: ARG002
        return

    def decode_params(self, handover: Handover, replied: Params) -> None:  # noqa: ARG002
        return


class LMCache(KVTransfer):
    """Transfer by LMCache: prefill gets the address of decode's LMCache, if that has one.

    An address is `host:init:alloc`: the `pd_peer_host`, `pd_peer_init_port` and
    `pd_peer_alloc_port` of decode's LMCache. Ports of several tensor-parallel ranks are written as
    `7300+7301`.
    """

    name = "lmcache"
    eager = True
    released = False
    named_apart = True
    addressed = frozenset({Role.DECODE})

    def check(self, instance: Instance) -> None:
        super().check(instance)
        if instance.kv_addr:
            host_and_ports(instance.kv_addr, 2)

    def prefill_params(self, handover: Handover) -> Params | None:
        """Return the address to which prefill writes the blocks; None without one."""
        if handover.decode is None or not handover.decode.kv_addr:
            return None
        host, init, alloc = host_and_ports(handover.decode.kv_addr, 2)
        return {
            "disagg_spec": {
                "req_id": handover.request_id,
                "receiver_host": host,
                "receiver_init_port": [int(port) for port in init.split("+")],
                "receiver_alloc_port": [int(port) for port in alloc.split("+")],
            }
        }

    def decode_params(self, handover: Handover, replied: Params) -> None:  # noqa: ARG002
        """Return None: decode finds the blocks by their tokens."""
        return
