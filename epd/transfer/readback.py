"""`kv_transfer_params` by which prefill reads decode's blocks of a conversation's last turn. Pure.

The wire is that of vLLM's NixlConnector with `bidirectional_kv_xfer`
(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`). Prefill takes as many of
the blocks as it is told, by their position: it compares no token of them with its prompt's.
"""

import math
import re

from epd.transfer.params import Params, reachable

MAX_HOST = 253

RANK = re.compile(r"_dp\d+$")
"""What vLLM adds to an engine's id for each of its data-parallel ranks."""

BLOCKS_TTL_S = 475.0
"""How long prefill can read decode's blocks: `decoder_kv_blocks_ttl` (480 s unless it is configured
otherwise; `base_scheduler.py`) less `_KV_BLOCKS_EXPIRY_SAFETY_MARGIN` (5 s; `pull_worker.py`)."""


def kept_params(said: Params, decode: str) -> Params | None:
    """What decode's reply says of its blocks, for the next turn; None: they cannot be read.

    Args:
        said: its `kv_transfer_params`.
        decode: its URL. A side channel that listens at every address says no host by which
            prefill could reach it, and so gets this one's.
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
    return reachable(said, decode)


def engine_of(params: Params) -> str:
    """Whose blocks they name: an engine is another after each start."""
    return RANK.sub("", params["remote_engine_id"])


def shortened(params: Params, tokens: int, block_tokens: int) -> Params | None:
    """The same for the first of the tokens alone; None: their blocks cannot be told apart.

    Prefill pairs lists of blocks from their ends, so those of the others must not be there. Models
    with several kinds of attention have a list for each, with blocks of other sizes.

    Args:
        params: as they were kept.
        tokens: how many prefill may take.
        block_tokens: how many are in a block of decode's.
    """
    match params["remote_block_ids"]:
        case [[*blocks]] if len(blocks) == math.ceil(params["remote_num_tokens"] / block_tokens):
            pass
        case _:
            return None
    kept = blocks[: math.ceil(tokens / block_tokens)]
    return {**params, "remote_num_tokens": tokens, "remote_block_ids": [kept]}
