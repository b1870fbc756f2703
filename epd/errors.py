"""What can go wrong, as types that know what to answer.

Every error reaches the client in OpenAI's shape, the one vLLM uses
(`vllm/entrypoints/openai/engine/protocol.py`, `ErrorInfo`):
`{"error": {"message", "type", "param", "code"}}`, `code` being the HTTP status.
"""

import math
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Literal, Self

import orjson

Stage = Literal["proxy", "queue", "store", "encode", "prefill", "decode", "release"]

TYPES = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    503: "ServiceUnavailableError",
}

RETRY_AFTER = re.compile(r"[0-9]{1,6}")
"""Seconds; the other form, a date, is for browsers."""

SPENT = frozenset({500, 502, 504})
"""Statuses of what the proxy has tried again itself, where that could help."""

MAX_UPSTREAM_TEXT = 500
"""Characters of an upstream's non-JSON error text that are shown to a client."""

INSIDES = re.compile(r"0x[0-9a-fA-F]{6,}|(?:/[\w.~-]+){2,}")
"""Addresses and paths. vLLM strips them from its own errors; another shape is another's error."""


class ProxyError(Exception):
    """A request that ends in an error.

    Attributes:
        status: HTTP status of the answer.
        type: `error.type` of the answer.
        slug: machine-readable cause, sent as `x-epd-error`.
        stage: who failed, sent as `x-epd-stage`.
        param: the part of the request that is at fault, such as `messages[0].content[2]`.
        answered: the status that an instance answered, where one did.
    """

    status: int = 500
    type: str = "InternalServerError"
    default_slug: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        slug: str | None = None,
        stage: Stage = "proxy",
        param: str | None = None,
        answered: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.slug = slug or self.default_slug
        self.stage = stage
        self.param = param
        self.answered = answered

    def at(self, param: str | None) -> Self:
        """The same error, with this part of the request at fault: others may be told of it too."""
        located = type(self).__new__(type(self), *self.args)
        located.__dict__.update(self.__dict__)
        located.param = param
        return located

    @property
    def detail(self) -> dict[str, Any]:
        """The `error` object of the answer."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.status,
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the answer, beside those every answer has."""
        own = {"x-epd-stage": self.stage, "x-epd-error": self.slug}
        # The official OpenAI client obeys it, and would repeat what was repeated here already.
        return own | {"x-should-retry": "false"} if self.spent else own

    @property
    def spent(self) -> bool:
        """Whether another try of the client's would end as this one, after the proxy's own."""
        return self.status in SPENT

    def body(self) -> bytes:
        """The answer's JSON body."""
        return orjson.dumps({"error": self.detail})


def slug_of(error: BaseException | None) -> str | None:
    """How what has ended by an error is counted; what nobody waits for any more is `cancelled`."""
    if error is None:
        return None
    return error.slug if isinstance(error, ProxyError) else "cancelled"


class BadRequest(ProxyError):
    """The client's request cannot be served as it is."""

    status = 400
    type = "BadRequestError"
    default_slug = "invalid_request"


class RequestRefused(ProxyError):
    """The HTTP layer refused the request: unknown route, wrong method, too large."""

    default_slug = "invalid_request"

    def __init__(self, status: int, message: str, *, slug: str) -> None:
        super().__init__(message, slug=slug)
        self.status = status
        self.type = TYPES.get(status, "BadRequestError")


class WrongMethod(RequestRefused):
    """The route is there, and has other methods."""

    def __init__(self, allowed: Iterable[str]) -> None:
        super().__init__(405, "Method Not Allowed", slug="unknown_route")
        self._allowed = ", ".join(sorted(allowed))

    @property
    def headers(self) -> dict[str, str]:
        """As for every error, and the methods there are, which a 405 must name (RFC 9110)."""
        return {**super().headers, "Allow": self._allowed}


class Unauthorized(ProxyError):
    """The request has no API key, or one that is none."""

    status = 401
    type = "AuthenticationError"
    default_slug = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        """As for every error, and the scheme that is wanted, as RFC 6750 asks."""
        return {**super().headers, "WWW-Authenticate": "Bearer"}


class UnknownMedia(ProxyError):
    """The client names media that it has not sent, or that the store has let go of."""

    status = 404
    type = "NotFoundError"
    default_slug = "unknown_media"


class TryLater(ProxyError):
    """Nothing is wrong with the request but the moment.

    Attributes:
        retry_after_s: when the client may try again, sent as `Retry-After`; None: nobody knows.
    """

    def __init__(
        self,
        message: str,
        *,
        slug: str | None = None,
        stage: Stage = "proxy",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, slug=slug, stage=stage)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """As for every error, and when to try again, in whole seconds (RFC 9110, 10.2.3)."""
        return {**super().headers, "Retry-After": str(max(1, math.ceil(self.retry_after_s or 1)))}


class Overloaded(TryLater):
    """The proxy, or what is behind it, has too much to do, or is about to stop."""

    status = 503
    type = "ServiceUnavailableError"
    default_slug = "overloaded"


class NoInstance(Overloaded):
    """No instance of a role can be reached."""


class TooManyRequests(TryLater):
    """This client, or all of them, asks for more at once than is allowed."""

    status = 429
    type = "RateLimitError"
    default_slug = "queue_full"


class UpstreamFailed(ProxyError):
    """An instance could not be reached, broke off, or answered what it must not."""

    status = 502
    type = "BadGatewayError"


class UpstreamUnreachable(UpstreamFailed):
    """No connection to an instance: the request has not left the proxy."""


class UpstreamDenied(ProxyError):
    """An instance does not take the key that the proxy has for it, which no client can mend."""

    status = 502
    type = "BadGatewayError"


class UpstreamBusy(Overloaded):
    """An encode or prefill instance has too much to do."""


class UpstreamTimeout(ProxyError):
    """An instance did not answer within its stage's deadline."""

    status = 504
    type = "GatewayTimeoutError"


class UpstreamRejected(ProxyError):
    """An instance answered with an error that is the client's to see.

    What the instance said is kept; its shape is made OpenAI's where it was not.

    Attributes:
        retry_after_s: when the instance may be asked again, where it says so.
    """

    def __init__(
        self, status: int, reply: bytes, *, stage: Stage, headers: Mapping[str, str]
    ) -> None:
        said = _openai_error(reply)
        self._said = {"type": "UpstreamError", "param": None, "code": status} | (
            said or {"message": _plain_message(status, reply)}
        )
        kind = "rejected" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"
        super().__init__(
            self._said["message"], slug=f"{stage}_{kind}", stage=stage, answered=status
        )
        self.status = status
        self._reply = reply if said else None
        self._passed_headers = {
            name: headers[name]
            for name in ("Retry-After", "WWW-Authenticate")
            if name in headers and headers[name].isprintable()
        }
        self.retry_after_s = said_retry_after_s(self._passed_headers)
        if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
            self._passed_headers.setdefault("Retry-After", "1")

    @property
    def detail(self) -> dict[str, Any]:
        """What the instance said, and where in the client's request it applies."""
        return self._said if self.param is None else self._said | {"param": self.param}

    def body(self) -> bytes:
        """The instance's own bytes, where they are what a client should see."""
        return self._reply if self._reply and self.param is None else super().body()

    @property
    def headers(self) -> dict[str, str]:
        """As for every error, and what tells a client when and how to try again."""
        return {**super().headers, **self._passed_headers}


def no_store(message: str) -> RequestRefused:
    """503: what only the encoder-cache store could answer."""
    return RequestRefused(503, message, slug="no_store")


def said_retry_after_s(headers: Mapping[str, str]) -> float | None:
    """When an instance may be asked again, where its answer says so in seconds."""
    said = headers.get("Retry-After", "")
    return float(said) if RETRY_AFTER.fullmatch(said) else None


def _openai_error(reply: bytes) -> dict[str, Any] | None:
    match _parsed(reply):
        case {"error": {"message": str()} as error}:
            return dict(error)
        case _:
            return None


def _plain_message(status: int, reply: bytes) -> str:
    match _parsed(reply):
        # FastAPI's own errors, and vLLM's answer to a wrong API key.
        case {"detail": str() as message} | {"error": str() as message} if message:
            text = message
        case _:
            text = reply[:MAX_UPSTREAM_TEXT].decode("utf-8", "replace").strip()
    return INSIDES.sub("…", text) or f"the instance answered {status}"


def _parsed(reply: bytes) -> Any:
    try:
        return orjson.loads(reply)
    except orjson.JSONDecodeError:
        return None
