"""Fleet of fake instances that check each parameter, and that answers belong to their requests.

The tests themselves state which instance prefills, what is encoded and which instance has ranks,
independently of `epd.policies`.
"""

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.requests import Part
from tests.support.fake_instance import ENCODE_TEXT, FakeInstance, Handler, streams
from tests.support.fake_turns import Turns
from tests.support.fleet import Fleet
from tests.support.strict_encode import Folder, Memory, Pushes, Strict, all_parts, features_of
from tests.support.strict_instance import WIRES

ADDED = {"kv_transfer_params", "ec_transfer_params", "return_token_ids"}
"""Fields that decode may receive in addition to the client's."""

ENCODED = {"model", "messages", "stream", "max_tokens", "ec_transfer_params"}
"""Fields of an encode request."""

ENCODERS: dict[str, type[Strict]] = {
    "store": Folder,
    "example": Folder,
    "nixl": Memory,
    "mooncake": Pushes,
}

Body = dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """Expected behaviour of the proxy for all requests of a fleet.

    Attributes:
        kv_transfer: connector between prefill and decode.
        ec_transfer: connector between encode and its consumers.
        encodes: whether media are encoded; otherwise they are forwarded unchanged.
        prefills: whether prefill instances prefill; otherwise decode instances do.
        reads_back: whether prefill may read decode's blocks of a conversation.
        ranks: ranks of each instance that prefills.
        addresses: addresses at which consumers receive pushes; all ranks of one consumer come
            before the next consumer.
    """

    kv_transfer: str
    ec_transfer: str
    encodes: bool
    prefills: bool
    reads_back: bool
    ranks: int
    addresses: Sequence[str]


class StrictFleet:
    """Handlers of a fleet's instances.

    Attributes:
        wire: connector of prefill and decode.
        turns: prefill and decode instances that hold blocks, if blocks are read back.
        encoder: connector of encode.
        decoded: instance that decoded a request, by the request's `seed`.
    """

    def __init__(self, expected: Expected, prefill: int, decode: int) -> None:
        self.wire = WIRES[expected.kv_transfer](prefill, decode)
        self.wire.answers = self._answers
        self.turns = Turns(self._answer)
        self.encoder = ENCODERS[expected.ec_transfer]()
        self.decoded: dict[int, FakeInstance] = {}
        self._wrong: list[str] = []
        self._expected = expected
        self._sent: dict[int, Body] = {}
        self._seen: dict[str, str] = {}

    async def begin(self, stack: AsyncExitStack) -> dict[str, Any]:
        """Return the part of the proxy's configuration for its connectors."""
        return await self.wire.begin(stack)

    @property
    def wrong(self) -> list[str]:
        """Return the errors in the requests that instances received."""
        return [*self._wrong, *self.wire.wrong, *self.encoder.wrong]

    @property
    def left(self) -> list[Any]:
        """Return what instances keep for other instances that have not fetched it."""
        pushed = self.encoder.waiting if isinstance(self.encoder, Pushes) else ()
        return [*self.wire.left(), *pushed]

    def sends(self, body: Body) -> str:
        """Expect this request; return the right answer to it."""
        self._sent[body["seed"]] = body
        return self._answer(body)

    def settle(self, fleet: Fleet) -> None:
        """Install the strict handlers on these instances."""
        expected = self._expected
        self.wire.settle(fleet.prefill, fleet.decode)
        for ranks in getattr(self.wire, "engines", ()):
            ranks |= {str(rank): f"{ranks['0']}.{rank}" for rank in range(expected.ranks)}
        for port, one in enumerate(fleet.encode, 5601):
            one.chat = self._encodes(_encoder(self.encoder, port))
        for one in fleet.prefill:
            if expected.reads_back:
                self.turns.start(one, decode=False)
            one.chat = self._consumes(one.chat, ())
        size = expected.ranks
        for number, one in enumerate(fleet.decode):
            if expected.reads_back:
                self.turns.start(one, decode=True)
            one.chat = self._decodes(one, one.chat if expected.prefills else self._alone)
            if not fleet.prefill:
                at = expected.addresses[number * size : (number + 1) * size]
                one.chat = self._consumes(one.chat, at)

    def _encodes(self, then: Handler) -> Handler:
        async def chat(request: web.Request, body: Body) -> web.StreamResponse:
            *parts, text = all_parts(body)
            self._check(text == ENCODE_TEXT, f"encode is sent {text}")
            self._check(set(body) <= ENCODED, f"encode is sent {sorted(body)}")
            self._check((body["stream"], body["max_tokens"]) == (False, 1), "encode answers")
            self._check(len(parts) == 1, f"encode is sent {len(parts)} parts")
            self._check(_rank(request) is None, "encode is told a rank")
            for part in parts:
                self._seen |= {key: _media(part) for _, key in features_of(body, part)}
            return await then(request, body)

        return chat

    def _consumes(self, then: Handler, addresses: Sequence[str]) -> Handler:
        """Return the handler of a prefill instance: it receives encoder outputs and has ranks."""
        expected = self._expected
        takes = _consumer(self.encoder, addresses, then)

        async def chat(request: web.Request, body: Body) -> web.StreamResponse:
            if request.path == "/tokenize":
                return await then(request, body)
            rank = _rank(request)
            ranks = [str(rank) for rank in range(expected.ranks)] if expected.ranks > 1 else [None]
            self._check(rank in ranks, f"a consumer is told rank {rank}")
            self._check("conversation_id" not in body, "a consumer is told the conversation")
            embeds = [_is_embeds(part) for part in all_parts(body) if part["type"] != "text"]
            media = [part for part in all_parts(self._sent[body["seed"]]) if part["type"] != "text"]
            self._check(embeds == [expected.encodes] * len(media), f"metadata: {embeds}")
            told = "ec_transfer_params" in body
            self._check(told == (expected.encodes and bool(media)), f"told of outputs: {told}")
            return await takes(request, body)

        return chat

    def _decodes(self, one: FakeInstance, then: Handler) -> Handler:
        async def chat(request: web.Request, body: Body) -> web.StreamResponse:
            sent = self._sent[body["seed"]]
            self.decoded[body["seed"]] = one
            found = {name: value for name, value in body.items() if name not in ADDED}
            left = {name: value for name, value in sent.items() if name != "conversation_id"}
            self._check(found | _prompt(left) == left, f"decode is sent {found} of {left}")
            if self._expected.prefills:
                self._check(_rank(request) is None, "decode is told prefill's rank")
            return await then(request, body)

        return chat

    async def _alone(self, request: web.Request, body: Body) -> web.StreamResponse:
        """Decode a request without a prefill."""
        self._check(
            "kv_transfer_params" not in body, "decode is told of blocks that no prefill made"
        )
        whole, events = self._answers(request.path, body)
        if not body["stream"]:
            return web.json_response(whole)
        return await streams(events)(request, body)

    def _answer(self, body: Body) -> str:
        """Return an answer that contains the whole prompt, and so fits only this request."""
        if "messages" not in body:
            return f"to {body['prompt']}"
        words = [self._words(message["content"]) for message in body["messages"]]
        return f"to {words}"

    def _words(self, content: str | list[Part]) -> str | list[str]:
        if isinstance(content, str):
            return content
        return [
            self._seen.get(part["uuid"], "nothing that was encoded")
            if _is_embeds(part)
            else _media(part)
            for part in content
        ]

    def _answers(self, path: str, body: Body) -> tuple[Body, list[bytes]]:
        answer, chat = self._answer(body), path == "/v1/chat/completions"
        own = {"id": "c", "created": 1, "model": "m"}
        said = {"message": {"role": "assistant", "content": answer}} if chat else {"text": answer}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        whole = {**own, "choices": [{"index": 0, **said, "finish_reason": "stop"}], "usage": usage}
        half = len(answer) // 2
        events = [
            {
                **own,
                "choices": [{"index": 0, **({"delta": {"content": it}} if chat else {"text": it})}],
            }
            for it in (answer[:half], answer[half:])
        ]
        lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        return whole, [*lines, b"data: [DONE]\n\n"]

    def _check(self, right: bool, what: str) -> None:
        if not right:
            self._wrong.append(what)


def heard(raw: bytes, *, stream: bool) -> str:
    """Return the text of an answer of either endpoint."""
    if not stream:
        [choice] = json.loads(raw)["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    events = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    return "".join(one["delta"]["content"] if "delta" in one else one["text"] for one in choices)


def _encoder(encoder: Strict, port: int) -> Handler:
    if isinstance(encoder, Memory):
        return encoder.encodes(port)
    assert isinstance(encoder, Folder | Pushes)
    return encoder.encodes


def _consumer(encoder: Strict, addresses: Sequence[str], then: Handler) -> Handler:
    if isinstance(encoder, Pushes):
        return encoder.consumes(*addresses, then=then)
    assert isinstance(encoder, Folder | Memory)
    return encoder.consumes(then)


def _rank(request: web.Request) -> str | None:
    return request.headers.get("X-data-parallel-rank")


def _is_embeds(part: Part) -> bool:
    return str(part["type"]).endswith("_embeds")


def _media(part: Part) -> str:
    """Return the content of a part without its key."""
    kind = part["type"]
    return str(part[kind])


def _prompt(body: Body) -> Body:
    """Return the body without fields that may change on the way: media become metadata."""
    return {name: body[name] for name in ("messages",) if name in body}
