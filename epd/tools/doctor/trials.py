"""Trial requests of `epd doctor`: each stage is tested with small requests of one output token.

A conversation of two turns shows whether prefill reads the KV blocks that decode keeps of the first
turn.
"""

import asyncio
import base64
import io
import math
import random
import secrets
import time
import wave
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from PIL import Image

from epd.api.body import reply_field
from epd.api.chat import CHAT
from epd.api.completions import Completions
from epd.api.items import Body
from epd.config import ProxyConfig
from epd.conversations.turn import ReplyCapture
from epd.errors import UpstreamRejected
from epd.request.kv_peers import PeerRegistry
from epd.request.request import Request
from epd.request.stages import Stages
from epd.routing.instances import Instance, Role
from epd.routing.table import Reservation
from epd.tools.doctor.kv_bandwidth import (
    MAX_BYTES,
    PairFacts,
    Transfers,
    Window,
    read_transfers,
)
from epd.transfer import Params, with_params
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem, OutputFacts, Prompt, consumer_body
from epd.transfer.kv import Handover, KVTransfer
from epd.transfer.nixl import kept_params

SIDE = 64
"""Width and height of the picture in pixels, above the minimum of models' processors."""
SOUND_S = 1
RATE_HZ = 16_000
ANSWERS_S = 60.0
"""Maximum silence within an answer of one token."""

TOKENS = 128
"""Tokens of the first turn, above the number that prefill computes instead of reading them
(`kv_recompute_threshold`)."""

WORDS = "One and two are three. " * TOKENS


REPEATS = 3
"""Maximum number of large trials of KV transfers, if other transfers take place."""

COUNTED_EVERY_S = 0.1
"""Interval of the readings of metrics after a transfer."""


def picture() -> Mapping[str, Any]:
    """Return a content part with a new random picture, which no cache can have."""
    noise = random.Random(secrets.token_bytes(16)).randbytes(3 * SIDE * SIDE)  # noqa: S311
    file = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), noise).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def new_sound() -> Mapping[str, Any]:
    """Return a content part with a new random sound, which no cache can have."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        written.writeframes(secrets.token_bytes(2 * RATE_HZ * SOUND_S))
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


@dataclass(frozen=True, slots=True, eq=False)
class TrialOutput:
    """Output of an encode instance for the picture or sound of a trial.

    Attributes:
        body: request with the picture or sound.
        params: `ec_transfer_params` of a request with it.
        consumer: consumer to which the output was pushed; None: every consumer can read it.
    """

    body: Body
    encoded: OutputFacts
    params: Params
    consumer: Reservation | None

    def by_key(self) -> Body:
        """Return the request with the output's key in place of the media."""
        [item] = CHAT.items(self.body)
        encoded_item = EncodedItem(item, self.encoded, "encoded")
        return consumer_body(self.body, [encoded_item], self.params, raw=False).body


class TrialFailed(Exception):
    """Error of an answer that lacks what the next stage needs."""


@dataclass(frozen=True, slots=True, eq=False)
class Trials:
    """Trial requests of single stages, and of conversations, sent as the proxy sends them.

    The methods raise `ProxyError`, with the stage of the instance that failed, or `TrialFailed`.
    """

    _stages: Stages
    _encoded: ECTransfer
    _transfer: KVTransfer
    _peers: PeerRegistry
    _headers: Mapping[str, str]
    _config: ProxyConfig
    _read_s: float
    _counted_s: float

    @property
    def reads_back(self) -> bool:
        """Whether prefill can read decode's blocks with this transfer."""
        return self._transfer.bidirectional

    @property
    def prefills_alone(self) -> bool:
        """Whether a request may go to a prefill instance without a decode instance."""
        return Role.DECODE not in self._transfer.addressed

    async def encode(
        self, instance: Instance, model: str, consumer: Reservation | None = None
    ) -> TrialOutput:
        """Send a picture to an encode instance; if the model rejects pictures, a sound.

        With a transfer that pushes, the output goes to `consumer`.
        """
        try:
            return await self._encode(instance, _asking(model, picture()), consumer)
        except UpstreamRejected:
            with suppress(UpstreamRejected):
                return await self._encode(instance, _asking(model, new_sound()), consumer)
            raise

    async def _encode(
        self, instance: Instance, body: Body, consumer: Reservation | None
    ) -> TrialOutput:
        item = next(CHAT.items(body))
        asked = self._encoded.encode_params(consumer, 1)
        request, timeout_s = self._request(), self._config.encode_timeout_s
        replied = await self._stages.encode(instance, body, item, asked, request, timeout_s)
        encoded = self._encoded.encoded(replied, asked)
        if not encoded.params:
            raise TrialFailed("encodes, but reports no ec_transfer_params")
        if (lacking := self._encoded.missing_field(replied)) is not None:
            raise TrialFailed(f"encodes, but its ec_transfer_params have no {lacking}")
        return TrialOutput(body, encoded, self._encoded.consumer_params([encoded]), consumer)

    async def consume(self, instance: Instance, output: TrialOutput) -> None:
        """Send a request with the key of an encoder output in place of the media."""
        rank = None if output.consumer is None else output.consumer.rank
        await self._answered(instance, output.by_key(), rank=rank)

    async def transfer(self, prefill: Instance, decode: Instance, model: str) -> bool:
        """Prefill a request at one instance and decode it at another.

        Return whether decode keeps its blocks for the next turn of a conversation.
        """
        body = _asking(model, {"type": "text", "text": "Hello."})
        request = self._request()
        handover = Handover(request.id, prefill, 0 if prefill.dp_size > 1 else None, decode)
        handover.peer = await self._peers.params_for(handover)
        if not self._transfer.decode_concurrent(handover):
            await self._stages.prefill(self._transfer, handover, Prompt(body), request)
            return await self._answered(decode, with_params(body, handover.params), handover)
        sent = with_params(body, self._transfer.decode_params(handover, {}))
        decoding = asyncio.create_task(self._answered(decode, sent, handover))
        try:  # each waits for the other
            await self._stages.prefill(self._transfer, handover, Prompt(body), request)
            return await decoding
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)

    async def _answered(
        self,
        instance: Instance,
        body: Body,
        handover: Handover | None = None,
        rank: int | None = None,
    ) -> bool:
        """Send a request, and return whether the instance keeps its blocks."""
        content = await self._decode(instance, body, self._request(), handover, rank)
        params = reply_field(content, "kv_transfer_params", stage="decode")
        return kept_params(params, instance.url) is not None

    async def _decode(
        self,
        instance: Instance,
        body: Body,
        request: Request,
        handover: Handover | None = None,
        rank: int | None = None,
    ) -> bytes:
        reply, _ = await self._stages.decode(instance, Prompt(body), request, rank, handover)
        with reply:
            return await reply.read(idle_s=ANSWERS_S)

    async def read_back(self, prefill: Instance, decode: Instance, model: str) -> None:
        """Send a prompt, then a longer one with the blocks that decode keeps of the first.

        Prompts are token ids, because the blocks must match the tokens exactly. Each prompt has
        its own salt: otherwise prefill would find the first one in its prefix cache and read
        nothing.
        """
        tokens = await self._tokens(prefill, model)
        handover = Handover("", prefill, 0 if prefill.dp_size > 1 else None, decode)
        first = await self._turn(handover, decode, _asking_tokens(model, tokens), None)
        handover.earlier = kept_params(first.params or {}, decode.url)
        if handover.earlier is None:
            raise TrialFailed("decode named no blocks of a prompt of tokens")
        second = [*tokens, *first.answer, *tokens[-1:]]
        try:
            await self._turn(handover, decode, _asking_tokens(model, second), self._read_s)
        except TimeoutError:
            raise TrialFailed(f"no answer in {self._read_s:g} s") from None

    async def _tokens(self, prefill: Instance, model: str) -> Sequence[int]:
        asked, request = {"model": model, "prompt": WORDS}, self._request(of_tokens=True)
        return (await self._stages.prompt_tokens(prefill, asked, request))[:TOKENS]

    async def kv_bandwidth(
        self, prefill: Instance, decode: Instance, model: str, max_tokens: int
    ) -> PairFacts | None:
        """Move the KV blocks of long prompts from prefill to decode, and return what vLLM counted.

        Prompts have as many tokens as fit into `max_tokens` and `MAX_BYTES` of blocks. If other
        transfers take place, they are repeated. None: the instances count no transfers.
        """
        if await self._transfers(prefill, decode) is None:
            return None
        handover = Handover("", prefill, 0 if prefill.dp_size > 1 else None, decode)
        tokens = await self._tokens(prefill, model)
        small = await self._window(handover, decode, model, tokens)
        if small is None:
            return PairFacts(prefill, decode)
        _, size, _, all_tokens = small.transfers
        fitting = math.ceil(MAX_BYTES * all_tokens / max(1.0, size))
        many = [*islice(cycle(tokens), max(len(tokens), min(fitting, max_tokens - 1)))]
        large: list[Window] = []
        while len(large) < REPEATS and not (large and large[-1].is_alone):
            window = await self._window(handover, decode, model, many)
            if window is None:
                break
            large.append(window)
        return PairFacts(prefill, decode, small, large)

    async def _window(
        self, handover: Handover, decode: Instance, model: str, tokens: Sequence[int]
    ) -> Window | None:
        """Return the transfers of a prompt; None: none are counted within `_counted_s` seconds."""
        request, body = self._request(of_tokens=True), _asking_tokens(model, tokens)
        handover = replace(handover, request_id=request.id)
        began_s = time.monotonic()
        await self._stages.prefill(self._transfer, handover, Prompt(body), request)
        prefill_s = time.monotonic() - began_s
        before = await self._transfers(handover.prefill, decode)
        began_s = time.monotonic()
        await self._decode(decode, with_params(body, handover.params), request)
        decoded_s = time.monotonic()
        while time.monotonic() < decoded_s + self._counted_s:
            after = await self._transfers(handover.prefill, decode)
            found = None if before is None or after is None else after.since(before)
            if found is not None and found.number > 0 and found.tokens > 0:
                return Window(found, len(tokens), prefill_s, decoded_s - began_s)
            await asyncio.sleep(COUNTED_EVERY_S)
        return None

    async def _transfers(self, prefill: Instance, decode: Instance) -> Transfers | None:
        pages = [await self._stages.metrics(instance.url) for instance in (decode, prefill)]
        return read_transfers(*pages)

    async def _turn(
        self, handover: Handover, decode: Instance, body: Body, prefill_s: float | None
    ) -> ReplyCapture:
        """Return what decode reports about its blocks and their tokens at the end of a turn.

        Raises:
            TimeoutError: prefill took longer than `prefill_s` seconds; None: no limit.
        """
        request = self._request(of_tokens=True)
        handover = replace(handover, request_id=request.id)
        async with asyncio.timeout(prefill_s):
            await self._stages.prefill(self._transfer, handover, Prompt(body), request)
        content = await self._decode(decode, with_params(body, handover.params), request)
        fields = ReplyCapture(cut_tokens=False)
        fields.capture_fields(content)
        return fields

    def _request(self, *, of_tokens: bool = False) -> Request:
        request_id = f"doctor-{secrets.token_hex(8)}"
        endpoint = Completions() if of_tokens else CHAT
        return Request(request_id, self._headers, self._config, endpoint)


def _asking(model: str, part: Mapping[str, Any]) -> Body:
    content: Sequence[Mapping[str, Any]] = [part, {"type": "text", "text": "What is it?"}]
    return {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


def _asking_tokens(model: str, tokens: Sequence[int]) -> Body:
    salt = secrets.token_hex(16)
    asked = {"model": model, "prompt": [*tokens], "max_tokens": 1, "cache_salt": salt}
    return {**asked, "return_token_ids": True}
