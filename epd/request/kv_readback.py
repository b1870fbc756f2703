"""Read-back: the KV blocks of the previous turn that prefill may read from decode."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from ec_store.bounded import BoundedDict
from epd.conversations.capture import ReplyCapture
from epd.conversations.conversations import Conversations
from epd.conversations.entry import Basis, StoredBlocks
from epd.conversations.prompts import PromptQuestion, prompt_of
from epd.conversations.turn import AnsweredTurn, Turn
from epd.errors import ProxyError, UpstreamDied, UpstreamTimeout
from epd.request.attempt import Attempt
from epd.request.request import Request
from epd.request.stages import Stages
from epd.routing.health import HealthState
from epd.routing.instances import ANSWERING, Instance
from epd.routing.table import InstanceTable
from epd.transfer import Params
from epd.transfer.kv import Handover, KVTransfer
from epd.transfer.nixl import engine_of, shorten_params

LEAST = 64
"""Shared prefix in tokens below which prefill recomputes (vLLM's `kv_recompute_threshold`)."""

REST_S = 60.0
"""Cooldown of a prefill instance for the blocks of one engine after a failed read, in seconds."""

HUNG_S = 600.0
"""Cooldown after a timeout, which costs a client all of `--prefill-timeout-s`, in seconds."""

MOST = 1024
"""Upper bound of the remembered instances and pairs."""

logger = structlog.get_logger("epd")


class Cooldowns:
    """Which prefill instance may read from which engine, and when, after failed reads.

    A prefill instance without `bidirectional_kv_xfer` waits for the blocks of any engine until its
    request ends. So after a timeout, it reads the blocks of none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: BoundedDict[tuple[str, str | None], float] = BoundedDict(MOST)

    def may_read(self, prefill: str, engine: str) -> bool:
        """Return whether a prefill instance may read an engine's blocks."""
        now_s, until_s = self._clock(), self._until_s
        return all(until_s.get((prefill, source), -math.inf) <= now_s for source in (engine, None))

    def begin(self, prefill: str, engine: str, *, hung: bool) -> None:
        """Begin the cooldown after a failed read of an engine's blocks, or one that `hung`."""
        rest_s, source = (HUNG_S, None) if hung else (REST_S, engine)
        self._until_s[prefill, source] = self._clock() + rest_s


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
    _cooldowns: Cooldowns = field(default_factory=Cooldowns)

    async def begin_turn(self, turn: Turn) -> None:
        """Look up the previous turn, right before the choice of the instance that continues it.

        A turn's blocks are used once. A request that fails earlier leaves them for the next one.
        """
        decodes = self._table.of_roles(*ANSWERING)
        usable = {decode.url for decode in decodes if self._table.state(decode) != HealthState.DOWN}
        await self._conversations.begin_turn(turn, usable)

    async def previous_params(
        self, turn: Turn, attempt: Attempt, prefill: Instance
    ) -> Params | None:
        """Return `kv_transfer_params` of the previous turn; None if this prefill can use none.

        Only the first attempt of a request receives them. The prefill instance also tokenizes the
        prompt.
        """
        request, before = attempt.request, turn.before
        if before is None or attempt.resent or not self._transfer.bidirectional:
            return None
        if (blocks := before.blocks) is None:
            return None
        if not self._cooldowns.may_read(prefill.url, blocks.engine):
            self._conversations.results["rested"] += 1
            return None
        params, question = None, prompt_of(attempt.prompt.body, request.endpoint.tokenized)
        basis = _basis(question, attempt)
        if question is not None and basis and basis.may_continue(blocks.basis):
            params = await self._params(blocks, question, before.decode, prefill, request)
        if params is None:
            self._conversations.results["changed"] += 1
        return params

    def answered_turn(
        self, turn: Turn, attempt: Attempt, decode: Instance, handover: Handover | None
    ) -> AnsweredTurn:
        """Return the turn of a request to decode.

        Fields of the answer are extracted if decode continues an ended prefill of tokens.
        """
        body, tokenized = attempt.prompt.body, attempt.request.endpoint.tokenized
        prefill, basis, capture = None, None, None
        if handover is not None:
            prefill = handover.prefill.url
            if tokenized and not handover.concurrent:
                capture = ReplyCapture(cut_tokens=not body.get("return_token_ids"))
                if self._transfer.bidirectional:
                    basis = _basis(prompt_of(body, tokenized), attempt)
        return AnsweredTurn(turn.key, decode.url, prefill, basis, capture)

    def record_result(self, handover: Handover, error: ProxyError | None = None) -> None:
        """Record the result of a prefill that was asked to read blocks."""
        self._conversations.results["hit" if error is None else "failed"] += 1
        if error is None or not error.worked or handover.earlier is None:
            return  # it has read them, or never tried to
        prefill, engine = handover.prefill, engine_of(handover.earlier)
        hung = isinstance(error, UpstreamTimeout)
        if hung and self._cooldowns.may_read(prefill.url, engine):
            logger.warning(
                "a prefill instance waited for KV blocks in vain and reads none for a while",
                instance=prefill.url,
                rest_s=HUNG_S,
                next="give it bidirectional_kv_xfer in its --kv-transfer-config, and see that it "
                "reaches the NIXL side channel at {remote_host}:{remote_port}".format_map(
                    handover.earlier
                ),
            )
        self._cooldowns.begin(prefill.url, engine, hung=hung)

    async def _params(
        self,
        blocks: StoredBlocks,
        question: PromptQuestion,
        decode: str,
        prefill: Instance,
        request: Request,
    ) -> Params | None:
        """Return parameters for the shared prefix; None if it is too short or unknown."""
        try:
            tokens = question.tokens or await self._stages.prompt_tokens(
                prefill, question.question, request
            )
            shared_tokens = blocks.tokens.shared_prefix_len(tokens, self._conversations.token_key)
            if shared_tokens < LEAST:
                return None
            if shared_tokens >= blocks.params["remote_num_tokens"]:
                return blocks.params
        except UpstreamDied:
            raise
        except (ProxyError, ValueError):
            return None
        instance = self._table.find_instance(decode, *ANSWERING)
        size = 0 if instance is None else self._table.load(instance).block_tokens  # 0: unreported
        return shorten_params(blocks.params, shared_tokens, size) if size else None


def _basis(question: PromptQuestion | None, attempt: Attempt) -> Basis | None:
    """Return what the blocks of a request depend on; None if unknown.

    It is unknown if an engine made the key of an item.
    """
    if question is None:
        return None
    items = attempt.encoded_items or ()
    keys = [item.facts.identifier or item.item.engine_name for item in items]
    return None if None in keys else Basis(question.form, tuple(filter(None, keys)))
