"""vLLM's NIXL connectors: with NixlConnector decode reads, with NixlPushConnector prefill writes.

The wire is that of `vllm/distributed/kv_transfer/kv_connector/v1/nixl/` of vLLM 0.33: the functions
`update_state_after_alloc` and `request_finished` of `pull_scheduler.py` and of `push_scheduler.py`.

With `bidirectional_kv_xfer` of NixlConnector, prefill reads decode's blocks of a conversation's
previous turn. Prefill takes the number of blocks that its `kv_transfer_params` state, by position:
it does not compare their tokens with those of its prompt.
"""

import math
import re
from typing import ClassVar

from epd.errors import UpstreamFailed
from epd.transfer import Params, with_reachable_host
from epd.transfer.kv import Handover, KVTransfer

MAX_HOST = 253

RANK = re.compile(r"_dp\d+$")
"""Suffix that vLLM adds to an engine's id for each data-parallel rank."""

BLOCKS_TTL_S = 475.0
"""Time for which prefill can read decode's blocks: `decoder_kv_blocks_ttl` (default 480 s;
`base_scheduler.py`) less `_KV_BLOCKS_EXPIRY_SAFETY_MARGIN` (5 s; `pull_worker.py`)."""

KEEP: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters that make a prefill instance keep its blocks for decode."""


class Nixl(KVTransfer):
    """Transfer in which decode reads prefill's blocks.

    In a conversation, prefill also reads decode's blocks of the previous turn.
    """

    name = "nixl"
    bidirectional = True

    def prefill_params(self, handover: Handover) -> Params:
        """Return the parameters that keep prefill's blocks, and name those of the previous turn."""
        if handover.earlier is None:
            return KEEP
        return {**handover.earlier, "do_remote_decode": True, "do_remote_prefill": False}

    def decode_params(self, handover: Handover, replied: Params) -> Params | None:
        return _with_host(handover, super().decode_params(handover, replied))


class NixlPush(KVTransfer):
    """Transfer in which prefill writes its blocks into those of decode.

    Decode registers the location of its blocks at the prefill instance, by coordinates that the
    proxy sends to decode. The proxy learns the coordinates from a reply of prefill. From then on,
    prefill and decode get their requests concurrently. Prefill finds decode's registration by the
    request's id, without the random suffix that vLLM appends (`push_worker.py`,
    `_pop_matching_registration`), so each attempt needs an id of its own.

    The blocks of an abandoned prefill stay until their lease expires: naming them in another
    request would not release them.
    """

    name = "nixl-push"
    has_peers = True
    released = False

    COORDINATES: ClassVar = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
    """Fields of prefill's reply that decode needs."""

    SIZES: ClassVar = ("pp_size", "dcp_size")
    """Fields that decode needs too, if the reply has them."""

    def facts_of_reply(self, handover: Handover, replied: Params) -> Params | None:
        """Return the coordinates of prefill's data-parallel rank; each rank has its own.

        None if the instance chooses the rank, because the next request may get another one. None
        also if the reply is incomplete.
        """
        if any(replied.get(name) is None for name in self.COORDINATES):
            return None
        if handover.prefill_rank is None and RANK.search(str(replied["remote_engine_id"])):
            return None
        return {name: replied[name] for name in (*self.COORDINATES, *self.SIZES) if name in replied}

    def decode_concurrent(self, peer: Params | None) -> bool:
        return peer is not None

    def prefill_params(self, handover: Handover) -> Params:  # noqa: ARG002
        return KEEP

    def decode_params(self, handover: Handover, replied: Params) -> Params | None:
        """Return the coordinates of prefill, at which decode registers its blocks.

        Raises:
            UpstreamFailed: prefill's reply has no parameters, or its coordinates differ from those
                that decode got: the instance has been replaced.
        """
        if handover.peer is None:
            return _with_host(handover, super().decode_params(handover, replied))
        if replied and self.facts_of_reply(handover, replied) != handover.peer:
            raise UpstreamFailed(
                "the prefill instance has been replaced", slug="prefill_replaced", stage="prefill"
            )
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            **with_reachable_host(handover.peer, handover.prefill.url),
            "remote_request_id": handover.request_id,
        }


class Multi(Nixl):
    """Transfer by vLLM's MultiConnector: at most one of its connectors has decode parameters."""

    name = "multi"

    def decode_params(self, handover: Handover, replied: Params) -> Params | None:
        return super().decode_params(handover, replied) if replied else None


def _with_host(handover: Handover, params: Params | None) -> Params | None:
    """Return the parameters of a handover's prefill, with a host that decode can reach."""
    return None if params is None else with_reachable_host(params, handover.prefill.url)


def kept_params(params: Params, decode: str) -> Params | None:
    """Return the parameters for the next turn from decode's reply; None for unreadable blocks.

    `decode` is the URL of the decode instance, for `with_reachable_host`.
    """
    match params:
        case {
            "do_remote_decode": True,
            "remote_engine_id": str(),
            "remote_request_id": str(),
            "remote_block_ids": [*groups],
            "remote_host": str() as host,
            "remote_port": int(),
            "remote_num_tokens": int() as tokens,
        } if tokens > 0 and any(groups) and len(host) <= MAX_HOST:
            pulls = params.get("transfer_mode", "pull") == "pull"
            return with_reachable_host(params, decode) if pulls else None
    return None


def engine_of(params: Params) -> str:
    """Return the id of the engine that has the blocks. It changes with each start."""
    return RANK.sub("", params["remote_engine_id"])


def shorten_params(params: Params, tokens: int, block_tokens: int) -> Params | None:
    """Return the parameters for only the first tokens; None if their blocks cannot be identified.

    Prefill pairs lists of blocks from their ends, so the blocks of the other tokens must be
    removed. Models with several kinds of attention have one list for each kind, with blocks of
    different sizes. `block_tokens` is the size of a block of decode.
    """
    match params["remote_block_ids"]:
        case [[*blocks]] if len(blocks) == math.ceil(params["remote_num_tokens"] / block_tokens):
            first = blocks[: math.ceil(tokens / block_tokens)]
            return {**params, "remote_num_tokens": tokens, "remote_block_ids": [first]}
    return None
