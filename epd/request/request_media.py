"""Media items of a request: their keys, and the body in which prefill and decode get them."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from epd.api.body import NO_CUTS
from epd.api.items import Body, MMItem, at_most, check_mm_kwargs
from epd.api.prompts import BYTES_PER_TOKEN
from epd.encoder_cache.keys import Keys
from epd.media.fetch import MediaFetcher
from epd.media.parts import inline_bytes
from epd.request.attempts import Sending, item_key
from epd.request.context import RequestContext
from epd.request.item_tokens import TYPICAL_TOKENS, media_tokens
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Role
from epd.routing.table import InstanceTable, Work
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Consumed, consumer_body, metadata_uuids


class KeyedRequest(NamedTuple):
    """Request, and the keys of its media items.

    Attributes:
        body: the client's request, with the media that the proxy fetched.
        uuids: keys of the items; None for a key that an engine makes.
        pixels: number of pixels of each picture in the request; 0 for an unknown format.
    """

    body: Body
    uuids: Mapping[MMItem, str | None] = {}
    pixels: Mapping[MMItem, int] = {}


class RequestMedia:
    """Preparation of requests with media: fetch, keys, and the body for prefill and decode."""

    def __init__(
        self,
        table: InstanceTable,
        fetcher: MediaFetcher,
        keys: Keys,
        transfer: ECTransfer,
        fatal: FatalRequests,
    ) -> None:
        self._table = table
        self._fetcher = fetcher
        self._keys = keys
        self._transfer = transfer
        self._fatal = fatal

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
        keyed = KeyedRequest(body)
        if items:
            inlined, context.cuts = await self._fetcher.inline_media(
                body, items, context.config, context.cuts, context.held
            )
            if inlined is not body:
                body, items = inlined, tuple(context.endpoint.items(inlined))
            keys = await self._keys.keys_for(
                body, items, context.tenant, context.config, context.cuts
            )
            keyed = KeyedRequest(body, *keys)
        self._fatal.check(context.watched, [item_key(*item) for item in keyed.uuids.items()])
        return keyed

    def prompt(self, request: KeyedRequest, sending: Sending) -> Consumed:
        """Return the body for prefill and decode."""
        attempt, record = sending.attempt, sending.context.record
        items = sending.encodings.items
        record.saved_bytes = 0
        if attempt.without_prefill:
            record.degraded.add("prefill-local")
        if not items:
            return Consumed(request.body)
        # A decode-only instance looks up no encoder outputs.
        alone = not attempt.course.prefill and self._table.has(Role.DECODE)
        lost = attempt.reencode or attempt.without_prefill
        raw = sending.context.config.decode_media == "raw" or lost or alone or attempt.raw
        params = self._transfer.consumer_params(one.encoded for one in items)
        prompt = consumer_body(request.body, items, params, raw=raw)
        record.media = {"metadata": prompt.bare, "raw": len(items) - prompt.bare}
        if record.hits:
            unsent = metadata_uuids(items, request.body, raw=raw)
            hits = [one.item for one in items if one.result == "hit"]
            cuts = sending.context.cuts
            record.saved_bytes = sum(inline_bytes(item, cuts) for item in hits if item in unsent)
        # A consumer that expects a push blocks on it even where the media are in the body too.
        waits = bool(params and self._transfer.pushed)
        return prompt._replace(depends=prompt.depends or waits)


def request_work(uuids: Collection[MMItem], sending: Sending) -> Work:
    """Return the predicted work of the instance that prefills a request.

    Args:
        uuids: the items.
        sending: the attempt, with its encoder outputs.
    """
    text_bytes = sending.context.text_bytes
    if not uuids:
        return Work(text_bytes // BYTES_PER_TOKEN)
    text_bytes -= sum([inline_bytes(item, NO_CUTS) for item in uuids])  # short media are not cut
    items = sending.encodings.items
    tokens = [
        one.tokens or media_tokens(one.encoded.metadata) or TYPICAL_TOKENS[one.item.modality]
        for one in items
    ]
    prompt_tokens = max(0, text_bytes) // BYTES_PER_TOKEN + sum(tokens)
    return Work(prompt_tokens, sum([one.tokens for one in items]))
