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
from epd.errors import ProxyError, UpstreamRejected
from epd.request.kv_peers import PeerRegistry
from epd.request.request import Request
from epd.request.stages import Stages
from epd.routing.instances import Instance, Role
from epd.routing.table import Reservation
from epd.tools.doctor.facts import Trial
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


@dataclass(frozen=True, slots=True, eq=False)
class Trials:
    """Trial requests of single stages, and of conversations, sent as the proxy sends them."""

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
    ) -> tuple[Trial, TrialOutput | None]:
        """Send a picture to an encode instance; if the model rejects pictures, a sound.

        With a transfer that pushes, the output goes to `consumer`. Return the result and the
        output; None: the trial failed.
        """
        refused = None
        for part in (picture(), new_sound()):
            body = _asking(model, part)
            item = next(CHAT.items(body))
            try:
                asked = self._encoded.encode_params(consumer, 1)
                request = self._request()
                timeout_s = self._config.encode_timeout_s
                replied = await self._stages.encode(instance, body, item, asked, request, timeout_s)
                encoded = self._encoded.encoded(replied, asked)
            except UpstreamRejected as error:
                refused = refused or error
                continue
            except ProxyError as error:
                return _failed(error), None
            if not encoded.params:
                return Trial("encodes, but reports no ec_transfer_params"), None
            if (lacking := self._encoded.missing_field(replied)) is not None:
                return Trial(f"encodes, but its ec_transfer_params have no {lacking}"), None
            params = self._encoded.consumer_params([encoded])
            return Trial(), TrialOutput(body, encoded, params, consumer)
        return _failed(refused) if refused else Trial(), None

    async def consume(self, instance: Instance, output: TrialOutput) -> Trial:
        """Send a request with the key of an encoder output in place of the media."""
        rank = None if output.consumer is None else output.consumer.rank
        trial, _ = await self._answered(instance, output.by_key(), rank=rank)
        return trial

    async def transfer(
        self, prefill: Instance, decode: Instance, model: str
    ) -> tuple[Trial, Trial | None, bool]:
        """Prefill a request at one instance and decode it at another.

        Return the results of prefill and of decode, None if prefill failed, and whether decode
        keeps its blocks for the next turn of a conversation.
        """
        body = _asking(model, {"type": "text", "text": "Hello."})
        request = self._request()
        handover = Handover(request.id, prefill, 0 if prefill.dp_size > 1 else None, decode)
        try:
            handover.peer = await self._peers.params_for(handover)
            if self._transfer.decode_concurrent(handover):
                return await self._at_once(handover, decode, body, request)
            await self._stages.prefill(self._transfer, handover, Prompt(body), request)
        except ProxyError as error:
            return _failed(error), None, False
        sent = with_params(body, handover.params)
        return Trial(), *await self._answered(decode, sent, handover)

    async def _at_once(
        self, handover: Handover, decode: Instance, body: Body, request: Request
    ) -> tuple[Trial, Trial, bool]:
        """Send a request to both instances at the same time: each waits for the other."""
        sent = with_params(body, self._transfer.decode_params(handover, {}))
        decoding = asyncio.create_task(self._answered(decode, sent, handover))
        try:
            await self._stages.prefill(self._transfer, handover, Prompt(body), request)
            return Trial(), *await decoding
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)

    async def _answered(
        self,
        instance: Instance,
        body: Body,
        handover: Handover | None = None,
        rank: int | None = None,
    ) -> tuple[Trial, bool]:
        """Return the result of a request, and whether the instance keeps its blocks."""
        try:
            content = await self._decode(instance, body, self._request(), handover, rank)
            params = reply_field(content, "kv_transfer_params", stage="decode")
        except ProxyError as error:
            return _failed(error), False
        return Trial(), kept_params(params, instance.url) is not None

    async def _decode(
        self,
        instance: Instance,
        body: Body,
        request: Request,
        handover: Handover | None = None,
        rank: int | None = None,
    ) -> bytes:
        """Return the answer to a request.

        Raises:
            ProxyError: the instance failed.
        """
        reply, _ = await self._stages.decode(instance, Prompt(body), request, rank, handover)
        with reply:
            return await reply.read(idle_s=ANSWERS_S)

    async def read_back(self, prefill: Instance, decode: Instance, model: str) -> Trial:
        """Send a prompt, then a longer one with the blocks that decode keeps of the first.

        Prompts are token ids, because the blocks must match the tokens exactly. Each prompt has
        its own salt: otherwise prefill would find the first one in its prefix cache and read
        nothing.
        """
        rank = 0 if prefill.dp_size > 1 else None
        try:
            asked = {"model": model, "prompt": WORDS}
            request = self._request(of_tokens=True)
            tokens = (await self._stages.prompt_tokens(prefill, asked, request))[:TOKENS]
            handover = Handover("", prefill, rank, decode)
            first = await self._turn(handover, decode, _asking_tokens(model, tokens), None)
            handover.earlier = kept_params(first.params or {}, decode.url)
            if handover.earlier is None:
                return Trial("decode named no blocks of a prompt of tokens")
            second = [*tokens, *first.answer, *tokens[-1:]]
            await self._turn(handover, decode, _asking_tokens(model, second), self._read_s)
        except TimeoutError:
            return Trial(f"no answer in {self._read_s:g} s")
        except ProxyError as error:
            return _failed(error)
        return Trial()

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
        request = self._request(of_tokens=True)
        asked = {"model": model, "prompt": WORDS}
        tokens = (await self._stages.prompt_tokens(prefill, asked, request))[:TOKENS]
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
        """Return the transfers of a prompt; None: none are counted within `_counted_s` seconds.

        Raises:
            ProxyError: an instance failed.
        """
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
            ProxyError: an instance failed.
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


def _failed(error: ProxyError) -> Trial:
    return Trial(str(error), getattr(error, "status", None))


def _asking_tokens(model: str, tokens: Sequence[int]) -> Body:
    salt = secrets.token_hex(16)
    asked = {"model": model, "prompt": [*tokens], "max_tokens": 1, "cache_salt": salt}
    return {**asked, "return_token_ids": True}
