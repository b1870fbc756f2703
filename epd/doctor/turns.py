"""Two turns of a conversation: whether prefill reads what decode holds of the first."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence

from epd.bodies.completions import Completions
from epd.bodies.items import Body
from epd.config import ProxyConfig
from epd.conversations.heard import Heard
from epd.doctor.facts import Trial
from epd.errors import ProxyError
from epd.request.context import RequestContext
from epd.request.stages import Stages
from epd.routing.instances import Instance
from epd.transfer.encoded import Consumed
from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import with_params
from epd.transfer.readback import kept_params

TOKENS = 128
"""Of the first turn: more than prefill rather computes than reads (`kv_recompute_threshold`)."""

WORDS = "One and two are three. " * TOKENS

ANSWER_S = 60.0
"""Silence in an answer of one token."""

READ_S = 10.0
"""The second turn's prefill: a handshake and some blocks. Who waits in vain never answers."""


class Turns:
    """Tries pairs of instances.

    Args:
        stages: as the proxy has them.
        transfer: how blocks are handed over, in both directions.
        headers: sent along, such as a key.
        config: how long instances may take.
    """

    def __init__(
        self,
        stages: Stages,
        transfer: KVTransfer,
        headers: Mapping[str, str],
        config: ProxyConfig,
    ) -> None:
        self._stages = stages
        self._transfer = transfer
        self._headers = headers
        self._config = config

    async def read(self, prefill: Instance, decode: Instance, model: str) -> Trial:
        """Have a prompt answered, and a longer one with the blocks that decode holds of the first.

        Prompts are tokens, as what is read has to be exactly what it is taken for. Each has a salt
        of its own: else prefill would have the first one in its cache, and read nothing.
        """
        rank = 0 if prefill.dp_size > 1 else None
        try:
            asked = {"model": model, "prompt": WORDS}
            tokens = (await self._stages.tokens(prefill, asked, self._context()))[:TOKENS]
            pair = Pair("", prefill, rank, decode)
            first = await self._answered(pair, decode, _asking(model, tokens), None)
            pair = pair._replace(earlier=kept_params(first.params or {}, decode.url))
            if pair.earlier is None:
                return Trial("decode named no blocks of a prompt of tokens")
            second = [*tokens, *first.answer, *tokens[-1:]]
            await self._answered(pair, decode, _asking(model, second), READ_S)
        except TimeoutError:
            return Trial(f"no answer in {READ_S:g} s")
        except ProxyError as error:
            return Trial(str(error), getattr(error, "status", None))
        return Trial()

    async def _answered(
        self, pair: Pair, decode: Instance, body: Body, prefill_s: float | None
    ) -> Heard:
        """What decode says of its blocks and their tokens, at the end of a turn.

        Raises:
            ProxyError: an instance failed.
            TimeoutError: prefill took more than these seconds; None: as many as it may.
        """
        context = self._context()
        pair = pair._replace(request_id=context.request_id)
        async with asyncio.timeout(prefill_s):
            prefilled = await self._stages.prefill(self._transfer, pair, Consumed(body), context)
        sent = with_params(body, prefilled.params)
        opened = await self._stages.decode(decode, Consumed(sent), context)
        with opened.reply as reply:
            said = await reply.read(idle_s=ANSWER_S)
        heard = Heard(cut_tokens=False)
        heard.hear(said)
        return heard

    def _context(self) -> RequestContext:
        request_id = f"doctor-{secrets.token_hex(8)}"
        return RequestContext(request_id, self._headers, self._config, Completions())


def _asking(model: str, tokens: Sequence[int]) -> Body:
    salt = secrets.token_hex(16)
    asked = {"model": model, "prompt": [*tokens], "max_tokens": 1, "cache_salt": salt}
    return {**asked, "return_token_ids": True}
