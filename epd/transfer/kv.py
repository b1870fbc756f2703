"""From prefill to decode: what `kv_transfer_params` carry, whatever the connector.

Connectors whose instances find each other's blocks themselves, in what they share.

LMCache: decode finds prefill's blocks by their tokens, in a store or where prefill wrote them.

The wire is that of `LMCacheConnectorV1Impl.update_state_after_alloc` in
`vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/vllm_v1_adapter.py` of vLLM 0.33,
and of LMCache's `examples/disagg_prefill/disagg_proxy_server.py`.
"""

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from epd.errors import UpstreamFailed
from epd.routing.instances import Instance, Role
from epd.transfer.params import Params

HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
"""What may be sent to instances, in a header too."""


class Pair(NamedTuple):
    """A prefill instance, and the decode instance that gets its KV blocks.

    Attributes:
        request_id: of this attempt of a request; no two have the same.
        prefill: who prefills.
        prefill_rank: its data-parallel rank; None: the instance sees to it.
        decode: who decodes; None where that is chosen once prefill has answered.
        peer: what is known of the prefill instance's connector; None where nothing is.
        earlier: decode's `kv_transfer_params` of the conversation's last turn; None: none.
    """

    request_id: str
    prefill: Instance
    prefill_rank: int | None = None
    decode: Instance | None = None
    peer: Params | None = None
    earlier: Params | None = None


class KVTransfer(ABC):
    """How decode gets prefill's KV blocks, as far as the proxy has a part in it.

    This one carries what prefill replies to decode, as it is. Others say what differs.

    Attributes:
        name: what it is chosen by.
        eager: whether decode has to be chosen before prefill is asked.
        bidirectional: whether prefill can read decode's blocks of an earlier turn.
        released: whether prefill keeps its blocks until decode has asked for them.
        named_apart: whether no two instances may have the same `kv_addr`.
        addressed: roles of the instances that may have a `kv_addr`.
    """

    name: ClassVar[str]
    eager: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False
    released: ClassVar[bool] = True
    named_apart: ClassVar[bool] = False
    addressed: ClassVar[frozenset[Role]] = frozenset()

    def check(self, instance: Instance) -> None:
        """Refuse an instance that could take no part.

        Raises:
            ValueError: its `kv_addr` is invalid, or would have no effect.
        """
        if instance.kv_addr and instance.role not in self.addressed:
            raise ValueError(f"{self.name} has no use for a kv_addr of {instance.role} instances")

    def fits(self, instance: Instance) -> bool:
        """Whether `check` has nothing against an instance."""
        try:
            self.check(instance)
        except ValueError:
            return False
        return True

    def peer_url(self, prefill: Instance) -> str | None:  # noqa: ARG002
        """Where a prefill instance's connector says what `peer` reads; None: nowhere."""
        return None

    def peer(self, said: Any) -> Params:  # noqa: ARG002
        """What is said there, parsed from JSON, as `Pair` has it.

        Raises:
            UpstreamFailed: it is not what the connector says.
        """
        return {}

    def learned(self, pair: Pair, replied: Params) -> Params | None:  # noqa: ARG002
        """What a prefill's reply tells of its rank, for requests to come; None: nothing."""
        return None

    def concurrent(self, pair: Pair) -> bool:  # noqa: ARG002
        """Whether decode is asked at the same time as prefill, and waits for the blocks."""
        return False

    @abstractmethod
    def prefill_params(self, pair: Pair) -> Params | None:
        """`kv_transfer_params` of the prefill request; None: it has none."""

    def decode_params(self, pair: Pair, replied: Params) -> Params | None:  # noqa: ARG002
        """`kv_transfer_params` of the decode request; None: it has none.

        Args:
            pair: who hands over to whom.
            replied: prefill's; empty where it has not replied yet, or replied none.

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
    """An address such as `host:7300`, in its parts.

    Args:
        address: the host, and so many ports.
        ports: how many; each may be several, as `7300+7301`.

    Raises:
        ValueError: it is none.
    """
    host, *found = address.rsplit(":", ports)
    numbers = [number for port in found for number in port.split("+")]
    if (
        not HOST.fullmatch(host)
        or len(found) < ports
        or not all(_is_port(number) for number in numbers)
    ):
        wanted = "host" + ":port" * ports
        raise ValueError(f"{address!r} is no address such as {wanted}")
    return [host, *found]


def _is_port(number: str) -> bool:
    return number.isascii() and number.isdigit() and 0 < int(number) < 2**16


class Untold(KVTransfer):
    """Nobody is told anything: vLLM's ExampleConnector, OffloadingConnector, a shared store."""

    name = "none"
    released = False

    def prefill_params(self, pair: Pair) -> None:  # noqa: ARG002
        """None."""
        return

    def decode_params(self, pair: Pair, replied: Params) -> None:  # noqa: ARG002
        """None."""
        return


class LMCache(KVTransfer):
    """Prefill is told where decode's LMCache is, where it has an address; else nobody anything.

    An address is `host:init:alloc`: its `pd_peer_host`, `pd_peer_init_port`, `pd_peer_alloc_port`;
    ports of several tensor-parallel ranks as `7300+7301`.
    """

    name = "lmcache"
    eager = True
    released = False
    named_apart = True
    addressed = frozenset({Role.DECODE})

    def check(self, instance: Instance) -> None:
        """Refuse a `kv_addr` that is none of decode's LMCache."""
        super().check(instance)
        if instance.kv_addr:
            host_and_ports(instance.kv_addr, 2)

    def prefill_params(self, pair: Pair) -> Params | None:
        """Where the blocks go."""
        if pair.decode is None or not pair.decode.kv_addr:
            return None
        host, init, alloc = host_and_ports(pair.decode.kv_addr, 2)
        return {
            "disagg_spec": {
                "req_id": pair.request_id,
                "receiver_host": host,
                "receiver_init_port": [int(port) for port in init.split("+")],
                "receiver_alloc_port": [int(port) for port in alloc.split("+")],
            }
        }

    def decode_params(self, pair: Pair, replied: Params) -> None:  # noqa: ARG002
        """None: decode looks for itself."""
        return
