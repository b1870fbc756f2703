"""Interface of an endpoint: the format of its requests, streams and errors. Pure.

The stages are the same for all endpoints, and call the endpoint for the differences. The base class
has the behaviour of most endpoints. The docstrings of the classes are published in `/openapi.json`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from epd.api.body import (
    JSON,
    Cuts,
    Pieces,
    check_json_type,
    cut_and_parsed,
    dump_json,
    parse_object,
    pieces,
)
from epd.api.items import Body, MMItem
from epd.api.sse import OPENAI, Grammar
from epd.errors import BadRequest, ProxyError

RESERVED = ("kv_transfer_params", "ec_transfer_params")
"""Fields between proxy and instances. vLLM's security guide asks to drop those of clients."""

NOT_FOR_PREFILL = ("stream_options", "min_tokens")
"""Fields that contradict a prefill request's `stream: false` and its one token."""

FALSE = frozenset({"0", "f", "false", "n", "no", "off"})
"""Strings that pydantic reads as false."""


class Endpoint:
    """An endpoint of the proxy, which the instances have too.

    Attributes:
        path: route, at the proxy and at the instances.
        limits: fields that limit the answer's tokens; the proxy sets the first one.
        grammar: format of events and of the end of its streams.
        encodes: whether its media go through the encode stage; else decode encodes them.
        generates: whether its answers are generated tokens, which begin with a prefill.
        salted: whether its requests accept a `cache_salt`.
        priority_field: whether a generating request can have its `priority` in the body; else vLLM
            accepts it only in a header.
        key_header: header with the client's API key.
        tokenized: fields that `/tokenize` tokenizes as this endpoint does; empty for none.
        operation: name in OpenTelemetry's conventions for generative AI, if there is one.
    """

    path: str
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    grammar: ClassVar[Grammar] = OPENAI
    encodes: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    salted: ClassVar[bool] = True
    priority_field: ClassVar[bool] = True
    key_header: ClassVar[str] = "Authorization"
    tokenized: ClassVar[tuple[str, ...]] = ()
    operation: ClassVar[str | None] = "chat"

    def read(
        self, raw: bytes | bytearray, content_type: str, max_text_bytes: int
    ) -> tuple[Body, Cuts, int]:
        """Return the request in a body, the texts that were cut out of it, and the rest's size.

        `max_text_bytes` limits a JSON body without its media.

        Raises:
            RequestRefused: 415, the media type is not JSON; 413, the text is too large.
            BadRequest: the body is not a request of this endpoint.
        """
        check_json_type(content_type)
        return cut_and_parsed(raw, self.parse, max_text_bytes)

    def parse(self, raw: bytes | bytearray) -> Body:
        """Return the request in a JSON body. Raise `BadRequest` if it is invalid."""
        body = parse_object(raw)
        self.check(body)
        check_model(body)
        check_xargs(body)
        return {key: value for key, value in body.items() if key not in RESERVED}

    def check(self, body: Body) -> None:
        """Raise `BadRequest` if a field is missing or invalid for this endpoint."""

    def items(self, body: Body) -> Iterator[MMItem]:  # noqa: ARG002
        """Return the media items of a request in order. Raise `BadRequest` if a part is invalid."""
        return iter(())

    def can_prefill(self, body: Body) -> bool:
        """Return whether prefill can do its part of a request; else decode does both parts."""
        return self.generates and not _needs_one_engine(body)

    def prefill(self, body: Body, kv_transfer_params: Mapping[str, Any] | None) -> Body:
        """Return the prefill request: the same prompt and one token; KV is kept for decode."""
        params = {} if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}
        return {**self._one_token(body), "stream": False, **params}

    def release(self, body: Body) -> Body:
        """Return a minimal decode request, for an answer with a head before the first token."""
        params = body["kv_transfer_params"]
        return {**self._one_token(body), "stream": True, "kv_transfer_params": params}

    def _one_token(self, body: Body) -> Body:
        limits = {field: 1 for field in self.limits if field in body}
        fields = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
        return {**fields, **limits, self.limits[0]: 1}

    def content_type(self, body: Body) -> str:  # noqa: ARG002
        return JSON

    def encode_body(self, body: Body, cuts: Cuts) -> Pieces:
        return encode_json(body, cuts)

    def error(self, error: ProxyError) -> bytes:
        return error.body()

    def error_event(self, error: ProxyError) -> bytes:
        """Return the last event of a stream that ends in an error."""
        # The official OpenAI client treats an end without [DONE] as success. It raises an error
        # for this event.
        return b"data: " + error.body() + b"\n\n"


def is_stream(body: Body) -> bool:
    """Return whether a request asks for a stream, as vLLM's parser (pydantic) reads the field."""
    stream = body.get("stream")
    return stream.lower() not in FALSE if isinstance(stream, str) else bool(stream)


def encode_json(body: Body, cuts: Cuts) -> Pieces:
    """Return a JSON body in pieces, with the texts that were cut out of its request."""
    return pieces(dump_json(body), cuts)


def check_model(body: Body) -> None:
    """Raise `BadRequest` if the model is not a string."""
    if not isinstance(body.get("model"), str | None):
        raise BadRequest("model must be a string", param="model")


def _needs_one_engine(body: Body) -> bool:
    """Return whether only an engine that computes the prompt itself can serve a request.

    `kv_transfer_params` are for one sequence. Of `n` sequences, the first one that has read
    prefill's blocks releases them, even if the others have not read them (`nixl/pull_worker.py`,
    `_get_new_notifs`). A beam search passes no blocks on. For log-probabilities of the prompt,
    decode reads no blocks and computes the whole prompt again (`vllm/v1/core/sched/scheduler.py`,
    `skip_reading_prefix_cache`), for which it would lack the media.
    """
    return (
        body.get("n") not in (None, 1)
        or bool(body.get("use_beam_search"))
        or bool(body.get("echo"))
        or body.get("prompt_logprobs") is not None
    )


def check_xargs(body: Body) -> None:
    """Raise `BadRequest` if extra arguments are not an object, or have a reserved field.

    vLLM merges `vllm_xargs` and the reserved fields into one mapping.
    """
    xargs = body.get("vllm_xargs")
    if not isinstance(xargs, dict | None):
        raise BadRequest("vllm_xargs must be an object", param="vllm_xargs")
    for field in RESERVED:
        if xargs and field in xargs:
            raise reserved_field(f"vllm_xargs.{field}")


def reserved_field(param: str) -> BadRequest:
    """Return the error for a field that only the proxy may send."""
    return BadRequest(f"{param} is not accepted from clients", slug="reserved_field", param=param)
