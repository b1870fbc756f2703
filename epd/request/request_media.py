"""Media items of a request: their keys, and the body in which prefill and decode get them."""

from dataclasses import dataclass

from epd.api.body import NO_CUTS
from epd.api.items import Body, MMItem, at_most, check_mm_kwargs
from epd.api.prompts import BYTES_PER_TOKEN
from epd.encoder_cache.keys import Keys
from epd.media.fetch import MediaFetcher
from epd.media.parts import inline_bytes
from epd.request.context import RequestContext
from epd.request.item_tokens import TYPICAL_TOKENS, media_tokens
from epd.request.recovery import Encodings
from epd.request.stage_inputs import KeyedRequest, StageInput
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Role
from epd.routing.table import InstanceTable, Work
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Consumed, consumer_body, metadata_uuids


@dataclass(frozen=True, slots=True, eq=False)
class RequestMedia:
    """Preparation of requests with media: fetch, keys, and the body for prefill and decode."""

    _table: InstanceTable
    _fetcher: MediaFetcher | None
    _keys: Keys
    _transfer: ECTransfer
    _fatal: FatalRequests

    def items(self, body: Body, context: RequestContext) -> tuple[MMItem, ...]:
        """Return the media items of a valid request.

        Raises:
            BadRequest: the request is invalid.
        """
        if not context.config.trust_request_mm_kwargs:
            check_mm_kwargs(body)
        return at_most(context.endpoint.items(body), context.config.max_items)

    async def keyed(
        self, body: Body, items: tuple[MMItem, ...], context: RequestContext
    ) -> KeyedRequest:
        """Fetch the media that the proxy has to fetch, and determine the keys of the items.

        Raises:
            SuspectedFatal: instances have died of an item.
            ProxyError: a fetch failed, or an item is invalid.
        """
        if items:
            if self._fetcher is not None:
                inlined, context.cuts = await self._fetcher.inline_media(
                    body, items, context.cuts, context.held
                )
                if inlined is not body:
                    body, items = inlined, tuple(context.endpoint.items(inlined))
            items = await self._keys.keyed_items(
                body, items, context.tenant, context.config, context.cuts
            )
        self._fatal.check(context.watched, [item.identity for item in items])
        return KeyedRequest(body, items)

    def consumed(self, stage_input: StageInput, encodings: Encodings) -> Consumed:
        """Return the body for prefill and decode, with the encoder outputs of its items."""
        body, attempt, context = stage_input.request.body, stage_input.attempt, stage_input.context
        record, items = context.record, encodings.encoded_items
        record.saved_bytes = 0
        if attempt.without_prefill:
            record.degraded.add("prefill-local")
        if not items:
            return Consumed(body)
        # A decode-only instance looks up no encoder outputs.
        alone = not attempt.course.prefill and self._table.has(Role.DECODE)
        lost = attempt.reencode or attempt.without_prefill
        raw = context.config.decode_media == "raw" or lost or alone or attempt.raw
        params = self._transfer.consumer_params(encoded_item.encoded for encoded_item in items)
        consumed = consumer_body(
            body, items, params, raw=raw or attempt.unnamed, named=not attempt.unnamed
        )
        record.media = {"metadata": consumed.bare, "raw": len(items) - consumed.bare}
        if record.hits:
            unsent = metadata_uuids(items, body, raw=raw)
            hits = [encoded_item.item for encoded_item in items if encoded_item.result == "hit"]
            record.saved_bytes = sum(
                inline_bytes(item, context.cuts) for item in hits if item in unsent
            )
        # A consumer that expects a push blocks on it even where the media are in the body too.
        waits = bool(params and self._transfer.pushed)
        return consumed._replace(depends=consumed.depends or waits)


def request_work(stage_input: StageInput, encodings: Encodings) -> Work:
    """Return the predicted work of the instance that prefills a request."""
    items, text_bytes = stage_input.request.media_items, stage_input.context.text_bytes
    if not items:
        return Work(text_bytes // BYTES_PER_TOKEN)
    text_bytes -= sum([inline_bytes(item, NO_CUTS) for item in items])  # short media are not cut
    encoded_items = encodings.encoded_items
    tokens = [
        encoded_item.tokens
        or media_tokens(encoded_item.encoded.metadata)
        or TYPICAL_TOKENS[encoded_item.item.modality]
        for encoded_item in encoded_items
    ]
    prompt_tokens = max(0, text_bytes) // BYTES_PER_TOKEN + sum(tokens)
    return Work(prompt_tokens, sum([encoded_item.tokens for encoded_item in encoded_items]))
