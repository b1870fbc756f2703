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
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from epd.api.body import reply_field
from epd.api.chat import CHAT
from epd.api.completions import Completions
from epd.api.items import Body
from epd.config import ProxyConfig
from epd.conversations.capture import ReplyCapture
from epd.errors import ProxyError, UpstreamRejected
from epd.request.kv_peers import PeerRegistry
from epd.request.request import Request
from epd.request.stages import Stages
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.table import InstanceTable, Reservation
from epd.tools.doctor import facts
from epd.tools.doctor.facts import InstanceFacts, Trial
from epd.tools.doctor.host import has_no_device
from epd.tools.doctor.instances import headers_of
from epd.tools.doctor.kv_bandwidth import (
    MAX_BYTES,
    PairFacts,
    Transfers,
    Window,
    read_transfers,
)
from epd.transfer import Params, with_params
from epd.transfer.encoded import EncodedItem, OutputFacts, Prompt, consumer_body
from epd.transfer.kv import Handover
from epd.transfer.nixl import kept_params
from epd.transfer.registry import load_ec_transfer, load_kv_transfer
from epd.upstream import Upstream

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


First = TypeVar("First")
Second = TypeVar("Second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an examination.

    Attributes:
        read_s: deadline for the prefill of a conversation's second turn: a handshake and some
            blocks. An instance that waits for blocks in vain never answers.
        counted_s: deadline for a KV transfer in the metrics of its instance. vLLM counts it with a
            later step of its scheduler.
        arrives_s: deadline for a new entry in the store: encode instances write in the background.
        full_bytes: as in `StoreFacts`.
        dev: folder with the files of devices.
    """

    read_s: float = 10.0
    counted_s: float = 3.0
    arrives_s: float = 5.0
    full_bytes: int = facts.FULL_BYTES
    dev: Path = Path("/dev")


class TrialOutput(NamedTuple):
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


class TrialFailed(Exception):
    """Error of an answer that lacks what the next stage needs."""


class Trials:
    """Trial requests to the instances that can be used, sent as the proxy sends them.

    Attributes:
        output: first output of an encode instance.
        pairs: measured pairs of prefill and decode.
    """

    def __init__(
        self,
        config: ProxyConfig,
        upstream: Upstream,
        instances: Sequence[InstanceFacts],
        model: str,
        limits: Limits,
    ) -> None:
        self._config, self._instances, self._model, self._limits = config, instances, model, limits
        self._stages = Stages(upstream)
        self._headers = headers_of(config)
        self._ec = load_ec_transfer(config.ec_transfer)
        self._kv = load_kv_transfer(config.kv_transfer)
        self._peers = PeerRegistry(InstanceTable(), self._kv, upstream, config)
        self.output: TrialOutput | None = None
        self.pairs: list[PairFacts] = []

    async def run(self) -> None:
        """Try each stage, and record in the facts of each instance whether it succeeds."""
        if self._ec.pushed:
            await self._try_pushes()
        elif self._config.encodes or self._config.ec_store:
            await self._try_encode()
        for prefill, decode in _pairs(self._of_roles(Role.PREFILL), self._of_roles(Role.DECODE)):
            await self._try_handover(prefill, decode)

    def _of_roles(self, *roles: Role) -> Sequence[InstanceFacts]:
        return [engine for engine in self._instances if engine.instance.role in roles]

    async def _try_encode(self) -> None:
        """Let each encode instance encode, and each consumer find the first output.

        Without encode instances, the consumers encode.
        """
        for encoder in self._of_roles(Role.ENCODE) or self._of_roles(*CONSUMERS):
            output = await self._encode(encoder)
            if output is not None and not output.encoded.metadata:
                encoder.add_trial(facts.RAW, Trial())
        if self.output is not None and self.output.encoded.metadata:
            # An engine that sends blocks to an address crashes on a request without one.
            alone = () if Role.DECODE in self._kv.addressed else (Role.PREFILL,)
            for consumer in self._of_roles(*alone, Role.PREFILL_DECODE):
                await _record(consumer, facts.CONSUME, self._consume(consumer, self.output))

    async def _try_pushes(self) -> None:
        """Try pushes so that each encode instance and each rank of a consumer takes part."""
        consumers = {
            engine.instance: engine for engine in self._of_roles(Role.PREFILL, Role.PREFILL_DECODE)
        }
        table = InstanceTable(consumers)
        ranks = [
            table.reserve_place(instance) for instance in consumers for _ in range(instance.dp_size)
        ]
        for encoder, rank in _pairs(self._of_roles(Role.ENCODE), ranks):
            output = await self._encode(encoder, rank)
            if output is not None and output.encoded.metadata:
                consumer = consumers[rank.instance]
                await _record(consumer, facts.CONSUME, self._consume(consumer, output))

    async def _encode(
        self, encoder: InstanceFacts, consumer: Reservation | None = None
    ) -> TrialOutput | None:
        """Let an encode instance encode a picture; if the model rejects pictures, a sound.

        With a transfer that pushes, the output goes to `consumer`.
        """
        output = await _record(encoder, facts.ENCODE, self._encode_media(encoder, consumer))
        if output is not None and output.encoded.namespace is not None:
            encoder.namespaces |= {output.encoded.namespace}
        self.output = self.output or output
        return output

    async def _encode_media(
        self, encoder: InstanceFacts, consumer: Reservation | None
    ) -> TrialOutput:
        try:
            return await self._encode_part(encoder.instance, picture(), consumer)
        except UpstreamRejected:
            with suppress(UpstreamRejected):
                return await self._encode_part(encoder.instance, new_sound(), consumer)
            raise

    async def _encode_part(
        self, instance: Instance, part: Mapping[str, Any], consumer: Reservation | None
    ) -> TrialOutput:
        body = _asking(self._model, part)
        item = next(CHAT.items(body))
        asked = self._ec.encode_params(consumer, 1)
        request, timeout_s = self._request(), self._config.encode_timeout_s
        replied = await self._stages.encode(instance, body, item, asked, request, timeout_s)
        encoded = self._ec.output_facts(replied, asked)
        if not encoded.params:
            raise TrialFailed("encodes, but reports no ec_transfer_params")
        if (lacking := self._ec.missing_field(replied)) is not None:
            raise TrialFailed(f"encodes, but its ec_transfer_params have no {lacking}")
        return TrialOutput(body, encoded, self._ec.consumer_params([encoded]), consumer)

    async def _consume(self, consumer: InstanceFacts, output: TrialOutput) -> None:
        """Send a request with the key of an encoder output in place of the media."""
        [item] = CHAT.items(output.body)
        encoded = EncodedItem(item, output.encoded, "encoded")
        body = consumer_body(output.body, [encoded], output.params, raw=False).body
        rank = None if output.consumer is None else output.consumer.rank
        await self._keeps_blocks(consumer.instance, body, rank=rank)

    async def _try_handover(self, prefill: InstanceFacts, decode: InstanceFacts) -> None:
        """Let a prefill instance hand over to a decode instance, and decode continue."""
        pair = prefill.instance, decode.instance
        try:
            keeps = await self._transfer(*pair)
        except ProxyError as error:
            if error.stage == "decode":
                prefill.add_trial(facts.PREFILL, Trial())
                decode.add_trial(facts.DECODE, Trial(str(error)))
            else:
                prefill.add_trial(facts.PREFILL, Trial(str(error)))
            return
        prefill.add_trial(facts.PREFILL, Trial())
        decode.add_trial(facts.DECODE, Trial())
        max_tokens = min(engine.max_model_len(self._model) for engine in (prefill, decode))
        try:
            measured = await self._kv_bandwidth(*pair, max_tokens)
        except ProxyError as error:
            measured = PairFacts(*pair, problem=str(error))
        if measured is not None:
            in_host_memory = has_no_device(self._limits.dev, *pair)
            self.pairs.append(replace(measured, in_host_memory=in_host_memory))
        if keeps and self._kv.bidirectional:
            await _record(prefill, facts.READ, self._read_back(*pair))
        elif self._kv.bidirectional:
            decode.add_trial(facts.FORGET, Trial())

    async def _transfer(self, prefill: Instance, decode: Instance) -> bool:
        """Prefill a request at one instance and decode it at another.

        Return whether decode keeps its blocks for the next turn of a conversation.
        """
        body = _asking(self._model, {"type": "text", "text": "Hello."})
        request = self._request()
        handover = _handover(request, prefill, decode)
        peer = await self._peers.params_for(prefill, handover.prefill_rank)
        handover = handover._replace(peer=peer)
        if not self._kv.decode_concurrent(peer):
            prefilled = await self._stages.prefill(self._kv, handover, Prompt(body), request)
            return await self._keeps_blocks(decode, with_params(body, prefilled.params), handover)
        sent = with_params(body, self._kv.decode_params(handover, {}))
        decoding = asyncio.create_task(self._keeps_blocks(decode, sent, handover))
        try:  # each waits for the other
            await self._stages.prefill(self._kv, handover, Prompt(body), request)
            return await decoding
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)

    async def _keeps_blocks(
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
        request_id = request.id if handover is None else handover.request_id
        reply = await self._stages.decode(instance, Prompt(body), request, request_id, rank)
        with reply:
            return await reply.read(idle_s=ANSWERS_S)

    async def _read_back(self, prefill: Instance, decode: Instance) -> None:
        """Send a prompt, then a longer one with the blocks that decode keeps of the first.

        Prompts are token ids, because the blocks must match the tokens exactly. Each prompt has
        its own salt: otherwise prefill would find the first one in its prefix cache and read
        nothing.
        """
        tokens = await self._tokens(prefill)
        request = self._request(of_tokens=True)
        handover = _handover(request, prefill, decode)
        first = ReplyCapture(cut_tokens=False)
        first.capture_fields(await self._turn(handover, decode, request, tokens))
        earlier = kept_params(first.params or {}, decode.url)
        if earlier is None:
            raise TrialFailed("decode named no blocks of a prompt of tokens")
        request = self._request(of_tokens=True)
        handover = _handover(request, prefill, decode)._replace(earlier=earlier)
        longer = [*tokens, *first.answer, *tokens[-1:]]
        await self._turn(handover, decode, request, longer, self._limits.read_s)

    async def _turn(
        self,
        handover: Handover,
        decode: Instance,
        request: Request,
        tokens: Sequence[int],
        prefill_s: float | None = None,
    ) -> bytes:
        """Prefill a prompt of tokens, within `prefill_s`, and return decode's answer to it."""
        body = _asking_tokens(self._model, tokens)
        try:
            async with asyncio.timeout(prefill_s):
                prefilled = await self._stages.prefill(self._kv, handover, Prompt(body), request)
        except TimeoutError:
            raise TrialFailed(f"no answer in {prefill_s:g} s") from None
        return await self._decode(decode, with_params(body, prefilled.params), request)

    async def _tokens(self, prefill: Instance) -> Sequence[int]:
        asked, request = {"model": self._model, "prompt": WORDS}, self._request(of_tokens=True)
        return (await self._stages.prompt_tokens(prefill, asked, request))[:TOKENS]

    async def _kv_bandwidth(
        self, prefill: Instance, decode: Instance, max_tokens: int
    ) -> PairFacts | None:
        """Move the KV blocks of a long prompt from prefill to decode, and return what vLLM counted.

        The prompt has as many tokens as fit into `max_tokens` and `MAX_BYTES` of blocks; a short
        one before it shows how many. None: the instances count no transfers.
        """
        if await self._transfers(prefill, decode) is None:
            return None
        tokens = await self._tokens(prefill)
        small = await self._window(prefill, decode, tokens)
        if small is None:
            return PairFacts(prefill, decode)
        fitting = math.ceil(MAX_BYTES * small.transfers.tokens / max(1.0, small.transfers.bytes))
        many = [*islice(cycle(tokens), max(len(tokens), min(fitting, max_tokens - 1)))]
        return PairFacts(prefill, decode, small, await self._window(prefill, decode, many))

    async def _window(
        self, prefill: Instance, decode: Instance, tokens: Sequence[int]
    ) -> Window | None:
        """Return the transfers of a prompt; None: none are counted within `counted_s` seconds."""
        request, body = self._request(of_tokens=True), _asking_tokens(self._model, tokens)
        handover = _handover(request, prefill, decode)
        prefilled = await self._stages.prefill(self._kv, handover, Prompt(body), request)
        before = await self._transfers(prefill, decode)
        await self._decode(decode, with_params(body, prefilled.params), request)
        decoded_s = time.monotonic()
        while time.monotonic() < decoded_s + self._limits.counted_s:
            after = await self._transfers(prefill, decode)
            found = None if before is None or after is None else after.since(before)
            if found is not None and found.number > 0 and found.tokens > 0:
                return Window(found, len(tokens))
            await asyncio.sleep(COUNTED_EVERY_S)
        return None

    async def _transfers(self, prefill: Instance, decode: Instance) -> Transfers | None:
        pages = [await self._stages.metrics(instance.url) for instance in (decode, prefill)]
        return read_transfers(*pages)

    def _request(self, *, of_tokens: bool = False) -> Request:
        request_id = f"doctor-{secrets.token_hex(8)}"
        endpoint = Completions() if of_tokens else CHAT
        return Request(request_id, self._headers, self._config, endpoint)


async def _record(engine: InstanceFacts, stage: str, request: Awaitable[First]) -> First | None:
    """Record whether a request succeeds, and return its result."""
    try:
        result = await request
    except (ProxyError, TrialFailed) as error:
        engine.add_trial(stage, Trial(str(error), getattr(error, "status", None)))
        return None
    engine.add_trial(stage, Trial())
    return result


def _pairs(firsts: Sequence[First], seconds: Sequence[Second]) -> Iterable[tuple[First, Second]]:
    """Return pairs in which each one of both takes part; none if one of both is empty."""
    pairs = zip(cycle(firsts), cycle(seconds), strict=False)
    return islice(pairs, max(len(firsts), len(seconds)))


def _handover(request: Request, prefill: Instance, decode: Instance) -> Handover:
    return Handover(request.id, prefill, 0 if prefill.dp_size > 1 else None, decode)


def _asking(model: str, part: Mapping[str, Any]) -> Body:
    content: Sequence[Mapping[str, Any]] = [part, {"type": "text", "text": "What is it?"}]
    return {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


def _asking_tokens(model: str, tokens: Sequence[int]) -> Body:
    salt = secrets.token_hex(16)
    asked = {"model": model, "prompt": [*tokens], "max_tokens": 1, "cache_salt": salt}
    return {**asked, "return_token_ids": True}
