"""Media of a request: their keys, and the prompt in which prefill and decode get them."""

from collections.abc import Sequence
from dataclasses import replace

from epd.api.body import NO_CUTS, PLACEHOLDER_LENGTH
from epd.api.prompts import BYTES_PER_TOKEN
from epd.encoder_cache.keys import Keys
from epd.media.fetch import MediaFetcher
from epd.media.parts import inline_bytes
from epd.request.attempt import Attempt, SendForm
from epd.request.item_tokens import TYPICAL_TOKENS, media_tokens
from epd.request.request import Request
from epd.routing.table import Work
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem, Prompt, consumer_body


async def keyed_request(request: Request, keys: Keys, fetcher: MediaFetcher | None) -> Request:
    """Return the request with the media that the proxy fetches, and the keys of its items.

    Raises:
        ProxyError: a fetch failed, or an item is invalid.
    """
    body, items, cuts = request.body, request.items, request.cuts
    if fetcher is not None:
        body, cuts = await fetcher.inline_media(body, items, cuts, request.memory)
        if body is not request.body:
            items = tuple(request.endpoint.items(body))
    items = await keys.keyed_items(body, items, request.tenant, request.config, cuts)
    return replace(request, body=body, items=items, cuts=cuts)


def media_prompt(
    attempt: Attempt,
    transfer: ECTransfer,
    *,
    has_decode: bool,
) -> Prompt:
    """Return the request for prefill and decode, with the encoder outputs of its items.

    `has_decode` is whether the fleet has instances that only decode.
    """
    request, encoded_items = attempt.request, attempt.encoded_items or ()
    # A decode-only instance looks up no encoder outputs.
    decodes_only = has_decode and not attempt.course.prefill
    needs_media = attempt.form is not SendForm.METADATA or attempt.without_prefill
    raw = request.config.decode_media == "raw" or needs_media or decodes_only
    params = transfer.consumer_params(encoded_item.facts for encoded_item in encoded_items)
    prompt = consumer_body(
        request.body,
        encoded_items,
        params,
        raw=raw,
        named=attempt.form is not SendForm.UNNAMED,
    )
    sizes_bytes = [
        inline_bytes(encoded_item.item, request.cuts)
        for encoded_item in encoded_items
        if encoded_item.result == "hit" and encoded_item.item in prompt.bare
    ]
    request.record.add_media(
        metadata=len(prompt.bare),
        raw=len(encoded_items) - len(prompt.bare),
        saved_bytes=sum(sizes_bytes),
    )
    # A consumer that expects a push blocks on it even where the media are in the body too.
    waits = bool(params and transfer.pushed)
    work = media_work(request, encoded_items)
    return prompt._replace(depends=prompt.depends or waits, work=work)


def media_work(request: Request, encoded_items: Sequence[EncodedItem]) -> Work:
    """Return the predicted work of the instance that prefills a request with media."""
    # `text_bytes` includes short media, which are not cut, but no marks of cut ones.
    lengths = [inline_bytes(item, NO_CUTS) for item in request.items]
    text_bytes = request.text_bytes - sum([size for size in lengths if size != PLACEHOLDER_LENGTH])
    tokens = [
        encoded_item.tokens
        or media_tokens(encoded_item.facts.metadata)
        or TYPICAL_TOKENS[encoded_item.item.modality]
        for encoded_item in encoded_items
    ]
    prompt_tokens = max(0, text_bytes) // BYTES_PER_TOKEN + sum(tokens)
    return Work(prompt_tokens, sum([encoded_item.tokens for encoded_item in encoded_items]))
