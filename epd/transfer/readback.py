"""Parameters with which prefill reads decode's blocks of a conversation's previous turn. Pure.

The wire is that of vLLM's NixlConnector with `bidirectional_kv_xfer`
(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`). Prefill takes the number of
blocks that its `kv_transfer_params` state, by position: it does not compare their tokens with those
of its prompt.
"""

import math
import re

from epd.transfer.params import Params, with_reachable_host

MAX_HOST = 253

RANK = re.compile(r"_dp\d+$")
"""Suffix that vLLM adds to an engine's id for each data-parallel rank."""

BLOCKS_TTL_S = 475.0
"""Time for which prefill can read decode's blocks: `decoder_kv_blocks_ttl` (default 480 s;
`base_scheduler.py`) less `_KV_BLOCKS_EXPIRY_SAFETY_MARGIN` (5 s; `pull_worker.py`)."""


def kept_params(said: Params, decode: str) -> Params | None:
    """Return the parameters for the next turn from decode's reply; None for unreadable blocks.

    Args:
        said: `kv_transfer_params` of the reply.
        decode: URL of the decode instance. Its host replaces that of a side channel that listens
            at every address, because prefill could not reach the reported one.
    """
    match said:
        case {
            "do_remote_decode": True,
            "remote_engine_id": str(),
            "remote_request_id": str(),
            "remote_block_ids": [*groups],
            "remote_host": str() as host,
            "remote_port": int(),
            "remote_num_tokens": int() as tokens,
        } if tokens > 0 and said.get("transfer_mode", "pull") == "pull":
            pass
        case _:
            return None
    if not any(groups) or len(host) > MAX_HOST:
        return None
    return with_reachable_host(said, decode)


def engine_of(params: Params) -> str:
    """Return the id of the engine that has the blocks. It changes with each start."""
    return RANK.sub("", params["remote_engine_id"])


def shorten_params(params: Params, tokens: int, block_tokens: int) -> Params | None:
    """Return the parameters for only the first tokens; None if their blocks cannot be identified.

    Prefill pairs lists of blocks from their ends, so the blocks of the other tokens must be
    removed. Models with several kinds of attention have one list for each kind, with blocks of
    different sizes.

    Args:
        params: parameters as stored.
        tokens: number of tokens that prefill may take.
        block_tokens: number of tokens in a block of decode.
    """
    match params["remote_block_ids"]:
        case [[*blocks]] if len(blocks) == math.ceil(params["remote_num_tokens"] / block_tokens):
            pass
        case _:
            return None
    kept = blocks[: math.ceil(tokens / block_tokens)]
    return {**params, "remote_num_tokens": tokens, "remote_block_ids": [kept]}
