"""vLLM's NIXL connectors: with NixlConnector decode reads, with NixlPushConnector prefill writes.

The wire is that of `vllm/distributed/kv_transfer/kv_connector/v1/nixl/` of vLLM 0.33:
`pull_scheduler.py` and `push_scheduler.py`, each its `update_state_after_alloc` and
`request_finished`.
"""

from typing import ClassVar

from epd.errors import UpstreamFailed
from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import Params, reachable
from epd.transfer.readback import RANK

KEEP: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Make a prefill instance keep its blocks for decode."""


class Nixl(KVTransfer):
    """Decode reads prefill's blocks; in a conversation, prefill reads decode's of the last turn."""

    name = "nixl"
    bidirectional = True

    def prefill_params(self, pair: Pair) -> Params:
        """Those that make it keep its blocks, and name those of the last turn."""
        if pair.earlier is None:
            return KEEP
        return {**pair.earlier, "do_remote_decode": True, "do_remote_prefill": False}

    def decode_params(self, pair: Pair, replied: Params) -> Params | None:
        """What prefill has replied, with a host that decode can reach."""
        return _with_host(pair, super().decode_params(pair, replied))


class NixlPush(KVTransfer):
    """Prefill writes its blocks into decode's, which says where those are.

    Decode says it to the prefill instance whose coordinates it is given. They are learnt from a
    reply; from then on decode is asked at once with prefill. Prefill finds what decode said by
    the request's id, without the random end that vLLM puts to it (`push_worker.py`,
    `_pop_matching_registration`): each attempt needs an id of its own.

    A prefill that nobody wants is kept until its lease ends: telling another request of it would
    not release it.
    """

    name = "nixl-push"
    released = False

    COORDINATES: ClassVar = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
    """What decode needs of the prefill instance."""

    SIZES: ClassVar = ("pp_size", "dcp_size")
    """What it needs too, where it is said."""

    def learned(self, pair: Pair, replied: Params) -> Params | None:
        """The coordinates of the pair's prefill, whose data-parallel ranks have each their own.

        None where the instance chooses the rank: nobody knows the next one's.
        """
        if any(replied.get(name) is None for name in self.COORDINATES):
            return None
        if pair.prefill_rank is None and RANK.search(str(replied["remote_engine_id"])):
            return None
        return {name: replied[name] for name in (*self.COORDINATES, *self.SIZES) if name in replied}

    def concurrent(self, pair: Pair) -> bool:
        """Once they are known."""
        return pair.peer is not None

    def prefill_params(self, pair: Pair) -> Params:  # noqa: ARG002
        """Those that make it keep its blocks."""
        return KEEP

    def decode_params(self, pair: Pair, replied: Params) -> Params | None:
        """Whom to tell where the blocks go.

        Raises:
            UpstreamFailed: the instance said nothing, or is not whom decode has been told of.
        """
        if pair.peer is None:
            return _with_host(pair, super().decode_params(pair, replied))
        if replied and self.learned(pair, replied) != pair.peer:
            raise UpstreamFailed(
                "the prefill instance has been replaced", slug="prefill_replaced", stage="prefill"
            )
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            **reachable(pair.peer, pair.prefill.url),
            "remote_request_id": pair.request_id,
        }


class Multi(Nixl):
    """vLLM's MultiConnector: of its connectors, one or none has decode be told something."""

    name = "multi"

    def decode_params(self, pair: Pair, replied: Params) -> Params | None:
        """What prefill has replied, where it has."""
        return super().decode_params(pair, replied) if replied else None


def _with_host(pair: Pair, said: Params | None) -> Params | None:
    """What a pair's prefill has said, with a host that decode can reach."""
    return None if said is None else reachable(said, pair.prefill.url)
