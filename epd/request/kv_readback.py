"""Read-back: the KV blocks of the previous turn that prefill may read from decode.

After a failed read-back, the prefill instance skips that engine for a cooldown. No I/O.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from ec_store.bounded import BoundedDict
from epd.conversations.conversations import Conversations
from epd.conversations.prompts import PromptQuestion, prompt_of
from epd.conversations.turn import Basis, HeldBlocks, Turn
from epd.errors import ProxyError, UpstreamDied, UpstreamTimeout
from epd.request.request import Request
from epd.request.stages import Stages
from epd.routing.health import HealthState
from epd.routing.instances import ANSWERING, Instance
from epd.routing.table import InstanceTable
from epd.transfer import Params
from epd.transfer.encoded import EncodedItem, Prompt
from epd.transfer.kv import Handover, KVTransfer
from epd.transfer.nixl import engine_of, shorten_params

REST_S = 60.0
"""Cooldown of a prefill instance for the blocks of one engine after a failed read, in seconds."""

HUNG_S = 600.0
"""Cooldown after a timeout, which costs a client all of `--prefill-timeout-s`, in seconds."""

MOST = 1024
"""Upper bound of the remembered instances and pairs."""


class Cooldown(NamedTuple):
    """Cooldown that has just begun: its length, and the engine to skip; None for all engines."""

    rest_s: float
    engine: str | None


class Cooldowns:
    """Cooldowns, by the URL of a prefill instance and the id of a decode engine.

    A prefill instance without `bidirectional_kv_xfer` waits for the blocks of any engine until its
    request ends. For an instance that has read blocks before, a timeout is attributed to the
    engine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: BoundedDict[tuple[str, str | None], float] = BoundedDict(MOST)
        self._able: BoundedDict[str, None] = BoundedDict(MOST)

    def may_read(self, prefill: str, engine: str) -> bool:
        """Return whether a prefill instance may read an engine's blocks."""
        now_s, until_s = self._clock(), self._until_s
        return all(until_s.get((prefill, source), -math.inf) <= now_s for source in (engine, None))

    def read(self, prefill: str) -> None:
        """Record an answer of an instance that was asked to read blocks."""
        self._able[prefill] = None

    def record_failure(self, prefill: str, engine: str, *, hung: bool) -> Cooldown | None:
        """Record that an instance failed to read an engine's blocks, or `hung` until its timeout.

        Return the new cooldown; None if one has begun already, as after concurrent failures.
        """
        now_s = self._clock()
        until_s = max(self._until_s.get((prefill, source), now_s) for source in (engine, None))
        if until_s > now_s + (REST_S if hung else 0):
            return None
        rest = Cooldown(REST_S, engine)
        if hung:
            rest = Cooldown(HUNG_S, engine if prefill in self._able else None)
            self._able.pop(prefill, None)
        self._until_s[prefill, rest.engine] = now_s + rest.rest_s
        return rest


LEAST = 64
"""Shared prefix in tokens below which prefill recomputes (vLLM's `kv_recompute_threshold`)."""

MAX_ENGINES = 1024
"""Upper bound of the remembered block sizes of engines."""

BLOCK_SIZE = re.compile(
    rb'^vllm:cache_config_info\{[^}]*\bblock_size="([1-9][0-9]{0,5})"', re.MULTILINE
)
"""Block size in an instance's `/metrics`, in tokens."""

logger = structlog.get_logger("epd")


@dataclass(frozen=True, slots=True, eq=False)
class Readbacks:
    """Search for the part of a prompt that decode has in its blocks: prefill may read only that.

    vLLM does not compare prompts. With blocks of another prompt, prefill would answer from them and
    cache them for this prompt. The proxy therefore compares the tokens first.
    """

    _table: InstanceTable
    _stages: Stages
    _transfer: KVTransfer
    _conversations: Conversations
    _rests: Cooldowns = field(default_factory=Cooldowns)
    _block_tokens: BoundedDict[str, int] = field(default_factory=lambda: BoundedDict(MAX_ENGINES))

    async def begin_turn(self, turn: Turn) -> None:
        """Look up the previous turn, right before the choice of the instance that continues it.

        A turn's blocks are used once. A request that fails earlier leaves them for the next one.
        """
        decodes = self._table.of_roles(*ANSWERING)
        usable = {decode.url for decode in decodes if self._table.state(decode) != HealthState.DOWN}
        await self._conversations.begin_turn(turn, usable)

    async def previous_params(
        self, request: Request, turn: Turn, prompt: Prompt, prefill: Instance
    ) -> Params | None:
        """Return `kv_transfer_params` of the previous turn; None if this prefill can use none.

        Only the first attempt of a request receives them. The prefill instance also tokenizes the
        prompt.
        """
        if not self._transfer.bidirectional:
            return None
        blocks = turn.take_blocks()
        question = prompt_of(prompt.body, request.endpoint.tokenized)
        basis = None if question is None else _basis(question, prompt.encoded_items)
        turn.set_basis(basis)
        if blocks is None:
            return None
        if not self._rests.may_read(prefill.url, blocks.engine):
            self._conversations.results["rested"] += 1
            return None
        params = None
        if question is not None and basis is not None and basis.may_continue(blocks):
            params = await self._params(blocks, question, turn, prefill, request)
        if params is None:
            self._conversations.results["changed"] += 1
        return params

    def record_result(self, handover: Handover, error: ProxyError | None = None) -> None:
        """Record the result of a prefill that was asked to read blocks."""
        earlier = handover.earlier or {}
        self._conversations.results["hit" if error is None else "failed"] += 1
        if error is None:
            self._rests.read(handover.prefill.url)
        elif error.worked:  # else it never tried to read them
            hung = isinstance(error, UpstreamTimeout)
            rest = self._rests.record_failure(handover.prefill.url, engine_of(earlier), hung=hung)
            if rest is not None and hung:
                _warn(handover.prefill, earlier, rest)

    async def _params(
        self,
        blocks: HeldBlocks,
        question: PromptQuestion,
        turn: Turn,
        prefill: Instance,
        request: Request,
    ) -> Params | None:
        """Return parameters for the shared prefix; None if it is too short or unknown."""
        try:
            tokens = question.tokens or await self._stages.prompt_tokens(
                prefill, question.question, request
            )
            shared = self._conversations.shared_prefix_len(blocks, tokens)
            if shared < LEAST:
                return None
            if shared >= blocks.params["remote_num_tokens"]:
                return blocks.params
            size = await self._block_size(turn.prefers_decode, blocks.engine)
        except UpstreamDied:
            raise
        except (ProxyError, ValueError):
            return None
        return None if size is None else shorten_params(blocks.params, shared, size)

    async def _block_size(self, decode: str | None, engine: str) -> int | None:
        """Return the tokens per block of a decode instance; None if its metrics do not state them.

        Raises:
            ProxyError: it did not answer.
        """
        known = self._block_tokens.get(engine)
        if known is None and decode is not None:
            found = BLOCK_SIZE.search(await self._stages.metrics(decode))
            if found is not None:
                known = self._block_tokens[engine] = int(found[1])
        return known


def _warn(prefill: Instance, earlier: Params, rest: Cooldown) -> None:
    holder = "{remote_host}:{remote_port}".format_map(earlier)
    whose = "any decode instance" if rest.engine is None else holder
    logger.warning(
        "a prefill instance waited for KV blocks in vain and reads none for a while",
        instance=prefill.url,
        of=whose,
        rest_s=rest.rest_s,
        next="give it bidirectional_kv_xfer in its --kv-transfer-config"
        if rest.engine is None
        else f"see that it reaches the NIXL side channel at {holder}",
    )


def _basis(question: PromptQuestion, items: Sequence[EncodedItem]) -> Basis | None:
    """Return what the blocks of a request depend on; None if an engine made the key of an item."""
    keys = [encoded.encoded.identifier or encoded.item.engine_name for encoded in items]
    return None if None in keys else Basis(question.form, tuple(filter(None, keys)))
