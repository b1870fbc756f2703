"""What an API is to the proxy: how its requests, streams and errors are written. Pure.

The stages are the same for all, and ask for what differs. What most have is in the base class.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from epd.api.body import (
    JSON,
    Cuts,
    Pieces,
    check_json_type,
    cut_and_parsed,
    dumped,
    parse_object,
    pieces,
)
from epd.api.items import Body, MMItem
from epd.api.sse import OPENAI, Grammar
from epd.errors import BadRequest, ProxyError

RESERVED = ("kv_transfer_params", "ec_transfer_params")
"""Fields between proxy and instances. A client's are dropped, as vLLM's security guide asks."""

NOT_FOR_PREFILL = ("stream_options", "min_tokens")
"""Fields that contradict a prefill request's `stream: false` and its one token."""


FALSE = frozenset({"0", "f", "false", "n", "no", "off"})
"""Strings that pydantic reads as false."""


class Endpoint:
    """An API that clients use and instances have.

    Attributes:
        path: its route, here and there.
        limits: fields that bound the answer's tokens; the first is the one to set.
        grammar: how its streams end.
        encodes: whether its media go through the encode stage; else decode encodes them.
        generates: whether its answers are of tokens, which begin with a prefill.
        salted: whether its requests take a `cache_salt`.
        priority_field: whether a request that generates can have its `priority` in the body; else
            vLLM takes it by a header alone.
        key_header: where its clients present their API key.
        tokenized: fields that `/tokenize` makes tokens of, where it does as this endpoint would.
        operation: its name in OpenTelemetry's conventions for generative AI, where it has one.
        paced: whether its requests take a `stream_interval`.
    """

    path: ClassVar[str]
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    grammar: ClassVar[Grammar] = OPENAI
    encodes: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    salted: ClassVar[bool] = True
    priority_field: ClassVar[bool] = True
    key_header: ClassVar[str] = "Authorization"
    tokenized: ClassVar[tuple[str, ...]] = ()
    operation: ClassVar[str | None] = "chat"
    paced: ClassVar[bool] = False

    def read(
        self, raw: bytes | bytearray, content_type: str, max_text_bytes: int
    ) -> tuple[Body, Cuts]:
        """The request in a body, and what was cut out of it.

        Args:
            raw: the body.
            content_type: what its client says it is.
            max_text_bytes: most of a JSON body that is parsed, its media not counted.

        Raises:
            RequestRefused: 415, its client does not call it JSON; 413, it has too much text.
            BadRequest: it is none of this endpoint's.
        """
        check_json_type(content_type)
        return cut_and_parsed(raw, self.parse, max_text_bytes)

    def parse(self, raw: bytes | bytearray) -> Body:
        """The request in a JSON body.

        Raises:
            BadRequest: not JSON, or not a request of this endpoint.
        """
        body = parse_object(raw)
        self.check(body)
        check_model(body)
        check_xargs(body)
        return {key: value for key, value in body.items() if key not in RESERVED}

    def check(self, body: Body) -> None:
        """Refuse what could not be read.

        Raises:
            BadRequest: there is such.
        """

    def items(self, body: Body) -> Iterator[MMItem]:  # noqa: ARG002
        """Its media items, in order.

        Raises:
            BadRequest: the place of one has the wrong shape, or one is nothing to send.
        """
        return iter(())

    def at_interval(self, body: Body, tokens: int) -> Body:
        """Return a request whose stream has so many tokens in each chunk.

        A request without a stream, or with a `stream_interval` of its client, is returned as it is.
        """
        if tokens == 1 or not self.paced or not is_stream(body):
            return body
        if body.get("stream_interval") is not None:
            return body
        return {**body, "stream_interval": tokens}

    def prefills(self, body: Body) -> bool:
        """Whether prefill can do its part of a request; without it, decode does both."""
        return self.generates and not _in_one_place(body)

    def prefill(self, body: Body, kv_transfer_params: Mapping[str, Any] | None) -> Body:
        """The prefill request: the same prompt, one token, the KV cache kept for decode."""
        own = {**self._one_token(body), "stream": False}
        return (
            own if kv_transfer_params is None else own | {"kv_transfer_params": kv_transfer_params}
        )

    def release(self, body: Body) -> Body:
        """A decode request as short as can be, answered at once: its head comes before a token."""
        params = body["kv_transfer_params"]
        return {**self._one_token(body), "stream": True, "kv_transfer_params": params}

    def _one_token(self, body: Body) -> Body:
        limits = {field: 1 for field in self.limits if field in body}
        kept = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
        return {**kept, **limits, self.limits[0]: 1}

    def content_type(self, body: Body) -> str:  # noqa: ARG002
        """Media type of a body as an instance is sent it."""
        return JSON

    def written(self, body: Body, cuts: Cuts) -> Pieces:
        """A body as an instance is sent it."""
        return written(body, cuts)

    def error(self, error: ProxyError) -> bytes:
        """The body of an answer that is an error."""
        return error.body()

    def error_event(self, error: ProxyError) -> bytes:
        """The last event of a stream that ends in an error."""
        # The official OpenAI client takes an end without [DONE] for success, and this for an error.
        return b"data: " + error.body() + b"\n\n"


def is_stream(body: Body) -> bool:
    """Return whether a request asks for a stream, as vLLM's parser (pydantic) reads the field."""
    asked = body.get("stream")
    return asked.lower() not in FALSE if isinstance(asked, str) else bool(asked)


def written(body: Body, cuts: Cuts) -> Pieces:
    """A JSON body, with what was cut out of its request."""
    return pieces(dumped(body), cuts)


def check_model(body: Body) -> None:
    """Refuse a model that is no name.

    Raises:
        BadRequest: it is none.
    """
    if not isinstance(body.get("model"), str | None):
        raise BadRequest("model must be a string", param="model")


def _in_one_place(body: Body) -> bool:
    """Whether a request asks for what an engine says of prompts alone that it has computed itself.

    `kv_transfer_params` are of one sequence. Of `n` of them, the first that has read prefill's
    blocks gives them back, whether or not the others have (`nixl/pull_worker.py`,
    `_get_new_notifs`), and a beam search hands none on. For log-probabilities of the prompt decode
    reads no blocks and computes all of it again (`vllm/v1/core/sched/scheduler.py`,
    `skip_reading_prefix_cache`), with media that it would not have been sent.
    """
    return (
        body.get("n") not in (None, 1)
        or bool(body.get("use_beam_search"))
        or bool(body.get("echo"))
        or body.get("prompt_logprobs") is not None
    )


def check_xargs(body: Body) -> None:
    """Refuse extra arguments that are, or may hide, a reserved field.

    vLLM merges `vllm_xargs` and the reserved fields into one mapping.

    Raises:
        BadRequest: `vllm_xargs` is not an object, or has a reserved field.
    """
    xargs = body.get("vllm_xargs")
    if not isinstance(xargs, dict | None):
        raise BadRequest("vllm_xargs must be an object", param="vllm_xargs")
    for field in RESERVED:
        if xargs and field in xargs:
            raise reserved(f"vllm_xargs.{field}")


def reserved(param: str) -> BadRequest:
    """The error of a request that has a field that only the proxy may send."""
    return BadRequest(f"{param} is not accepted from clients", slug="reserved_field", param=param)
