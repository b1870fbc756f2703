"""What prefill may read of the blocks that decode holds of a conversation's last turn."""

import re
from collections.abc import Sequence

import structlog

from epd.bodies.prompts import Prompt, prompt_of
from epd.conversations.conversations import Conversations
from epd.conversations.entry import Held
from epd.conversations.rests import Rest, Rests
from epd.conversations.turn import Basis, Turn
from epd.errors import ProxyError, UpstreamDied, UpstreamTimeout
from epd.request.context import RequestContext
from epd.request.sending import Sending
from epd.request.stages import Stages
from epd.routing.health import State
from epd.routing.instances import ANSWERING, Instance
from epd.routing.table import InstanceTable
from epd.transfer.encoded import EncodedItem
from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import Params
from epd.transfer.readback import engine_of, shortened

LEAST = 64
"""Tokens below which prefill computes them itself (vLLM's `kv_recompute_threshold`)."""

MAX_ENGINES = 1024
"""Whose blocks' sizes are remembered."""

BLOCK_SIZE = re.compile(
    rb'^vllm:cache_config_info\{[^}]*\bblock_size="([1-9][0-9]{0,5})"', re.MULTILINE
)
"""Where an instance's `/metrics` say how many tokens are in a block."""

logger = structlog.get_logger("epd")


class Readbacks:
    """Finds out how much of a prompt decode holds: only that may be read.

    vLLM compares nothing: given the blocks of another prompt, prefill answers from them, and keeps
    them as if they were this one's. So the tokens are compared here, before.
    """

    def __init__(
        self,
        table: InstanceTable,
        stages: Stages,
        transfer: KVTransfer,
        conversations: Conversations,
    ) -> None:
        self._table = table
        self._stages = stages
        self._transfer = transfer
        self._conversations = conversations
        self._rests = Rests()
        self._block_tokens: dict[str, int] = {}

    async def begin(self, context: RequestContext) -> None:
        """Have a turn find the last one, right before who is to go on with that is chosen.

        What it has left is used once: a request that fails before leaves it for the next.
        """
        if context.turn is not None:
            some = self._table.of(*ANSWERING)
            there = {one.url for one in some if self._table.state(one) != State.DOWN}
            await self._conversations.begin(context.turn, there)

    async def earlier(self, sending: Sending, prefill: Instance) -> Params | None:
        """Return `kv_transfer_params` of the previous turn; None: this prefill can use none.

        Args:
            sending: the request's; only its first one gets any.
            prefill: the instance that is to read the blocks. It is asked for the prompt's tokens.
        """
        context = sending.context
        turn = context.turn
        if turn is None or not self._transfer.bidirectional:
            return None
        held = turn.take()
        prompt = prompt_of(sending.prompt.body, context.endpoint.tokenized)
        turn.basis = None if prompt is None else _basis(prompt, sending)
        if held is None:
            return None
        if not self._rests.over(prefill.url, held.engine):
            self._conversations.results["rested"] += 1
            return None
        params = None
        if prompt is not None and turn.basis is not None and turn.basis.continues(held):
            params = await self._params(held, prompt, turn, prefill, context)
        if params is None:
            self._conversations.results["changed"] += 1
        return params

    def ended(self, pair: Pair, earlier: Params, error: ProxyError | None = None) -> None:
        """A prefill that was to read blocks has answered, or has failed.

        Args:
            pair: who was to read them.
            earlier: which.
            error: its failure; None: it has answered.
        """
        self._conversations.results["hit" if error is None else "failed"] += 1
        if error is None:
            self._rests.read(pair.prefill.url)
        elif error.worked:  # else it has not tried to read them
            hung = isinstance(error, UpstreamTimeout)
            rest = self._rests.failed(pair.prefill.url, engine_of(earlier), hung=hung)
            if rest is not None and hung:
                _warn(pair.prefill, earlier, rest)

    async def _params(
        self, held: Held, prompt: Prompt, turn: Turn, prefill: Instance, context: RequestContext
    ) -> Params | None:
        """Those of the tokens that a prompt begins with; None: of too few, or nobody can tell."""
        try:
            tokens = prompt.tokens or await self._stages.tokens(prefill, prompt.question, context)
            shared = self._conversations.common(held, tokens)
            if shared < LEAST:
                return None
            if shared >= held.params["remote_num_tokens"]:
                return held.params
            size = await self._block_size(turn.prefers_decode, held.engine)
        except UpstreamDied:
            raise
        except (ProxyError, ValueError):
            return None
        return None if size is None else shortened(held.params, shared, size)

    async def _block_size(self, decode: str | None, engine: str) -> int | None:
        """How many tokens are in a block of a decode instance's; None: it does not say.

        Raises:
            ProxyError: it did not answer.
        """
        known = self._block_tokens.get(engine)
        if known is None and decode is not None:
            found = BLOCK_SIZE.search(await self._stages.metrics(decode))
            if found is not None:
                known = self._block_tokens[engine] = int(found[1])
            while len(self._block_tokens) > MAX_ENGINES:
                del self._block_tokens[next(iter(self._block_tokens))]
        return known


def _warn(prefill: Instance, earlier: Params, rest: Rest) -> None:
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


def _basis(prompt: Prompt, sending: Sending) -> Basis | None:
    """What the blocks of a request depend on; None: nobody can tell."""
    media = _media(sending.encodings.items)
    return None if media is None else Basis(prompt.form, media)


def _media(items: Sequence[EncodedItem]) -> tuple[str, ...] | None:
    """The keys of a request's items, in order; None: an engine alone knows those of some."""
    keys = [one.encoded.identifier or one.uuid for one in items]
    return None if None in keys else tuple(filter(None, keys))
