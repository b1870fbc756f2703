"""What can go wrong, as types that know what to answer.

Every error reaches the client in OpenAI's shape, the one vLLM uses
(`vllm/entrypoints/openai/engine/protocol.py`, `ErrorInfo`):
`{"error": {"message", "type", "param", "code"}}`, `code` being the HTTP status.
"""

import enum
import math
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Literal, Self

import orjson

from epd.upstream_text import openai_error, plain_message, said_retry_after_s

Stage = Literal["proxy", "queue", "store", "encode", "prefill", "decode", "release"]

TYPES = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    503: "ServiceUnavailableError",
}

BUSY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""Statuses of an instance that has too much to do, which is no failure of it."""

ELSEWHERE = BUSY | {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.GATEWAY_TIMEOUT,
}
"""Statuses of decode after which another instance may do better."""

UNJUDGED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.REQUEST_TIMEOUT})
"""Statuses that say nothing of the instance's health."""

NOT_CLIENTS = frozenset({408, 429})
"""Statuses below 500 that depend on the moment and not on the request."""

SPENT = frozenset({500, 502, 504})
"""Statuses of what the proxy has tried again itself, where that could help."""


class Outcome(enum.Enum):
    """What the end of a request says of the health of its instance."""

    GOOD = enum.auto()
    BAD = enum.auto()
    UNREACHABLE = enum.auto()
    BUSY = enum.auto()
    NOTHING = enum.auto()


class ProxyError(Exception):
    """A request that ends in an error.

    The class of an error, and for an instance's own answer its status, say what the error allows.
    Nothing else decides that; `epd.request.recovery` and `epd.routing` read it here.

    Attributes:
        status: HTTP status of the answer.
        type: `error.type` of the answer.
        slug: machine-readable cause, sent as `x-epd-error`.
        stage: the stage that failed, sent as `x-epd-stage`.
        param: the part of the request that is at fault, such as `messages[0].content[2]`.
        answered: the status that an instance answered, where one did.
        outcome: what it says of the instance's health.
        retryable: whether another instance may do better.
        repeatable: whether the same instance may, where there is no other.
        worked: whether the instance had the request and failed at it, so that what it was told to
            load may be at fault.
        died: whether the instance died while it had the request.
        rest_s: for how many seconds the instance asks to get no request; None: it does not say.
    """

    status: int = 500
    type: str = "InternalServerError"
    default_slug: ClassVar[str] = "internal_error"
    outcome: Outcome = Outcome.NOTHING
    retryable: bool = False
    repeatable: bool = False
    worked: bool = False
    died: bool = False
    rest_s: float | None = None

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

    @property
    def engine_failed(self) -> bool:
        """Whether an engine answered 500: an entry or KV blocks may have been lost.

        An engine that cannot load what it was named says no more than that.
        """
        return self.answered == HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def rejects_request(self) -> bool:
        """Whether the request itself is at fault, so that no instance failed."""
        return 400 <= self.status < 500 and self.status not in NOT_CLIENTS  # noqa: PLR2004

    def body(self) -> bytes:
        """The answer's JSON body."""
        return orjson.dumps({"error": self.detail})


def slug_of(error: BaseException | None) -> str | None:
    """Return what an error is counted as; a request that was abandoned is `cancelled`."""
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


class MediaFetchFailed(ProxyError):
    """The media that a client's URL names could not be fetched. No instance is at fault."""

    status = 422
    type = "UnprocessableEntityError"
    default_slug = "media_fetch_failed"


class TryLater(ProxyError):
    """Nothing is wrong with the request but the moment.

    Attributes:
        retry_after_s: when the client may try again, sent as `Retry-After`; None: it is not known.
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

    retryable = True
    repeatable = True


class SuspectedFatal(TryLater):
    """Two instances died while they served the request: it is not sent to a third one.

    The official OpenAI client is told not to repeat it.
    """

    status = 503
    type = "ServiceUnavailableError"
    default_slug = "suspected_fatal"
    spent = True
    died = True


class TooManyRequests(TryLater):
    """This client, or all of them, asks for more at once than is allowed."""

    status = 429
    type = "RateLimitError"
    default_slug = "queue_full"


class UpstreamFailed(ProxyError):
    """An instance could not be reached, broke off, or answered what it must not."""

    status = 502
    type = "BadGatewayError"
    outcome = Outcome.BAD
    retryable = True
    repeatable = True
    worked = True


class EncodeMismatch(UpstreamFailed):
    """What an encode instance replied does not fit the item. Its next reply would not either."""

    default_slug = "encode_metadata"
    retryable = False

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the encode instance's ec_transfer_params cannot be matched to the item: {reason}",
            stage="encode",
        )


class AnswerTooLarge(UpstreamFailed):
    """An instance's answer is larger than the proxy keeps. Another one's would be as large."""

    retryable = False


class UpstreamUnreachable(UpstreamFailed):
    """No connection to an instance: the request has not left the proxy."""

    outcome = Outcome.UNREACHABLE
    repeatable = False
    worked = False


class UpstreamDied(UpstreamFailed):
    """An instance died, or its connection did, after it had all of a request.

    The instance may have died of that request. The last answer that a client gets is the same as
    for every other failure.
    """

    died = True


class UpstreamDenied(ProxyError):
    """An instance does not take the key that the proxy has for it, which no client can mend."""

    status = 502
    type = "BadGatewayError"


class UpstreamBusy(Overloaded):
    """An encode or prefill instance has too much to do."""

    outcome = Outcome.BUSY
    retryable = True

    @property
    def rest_s(self) -> float | None:  # type: ignore[override]
        """Its `Retry-After`."""
        return self.retry_after_s


class UpstreamTimeout(ProxyError):
    """An instance did not answer within its stage's deadline."""

    status = 504
    type = "GatewayTimeoutError"
    retryable = True
    worked = True

    @property
    def outcome(self) -> Outcome:  # type: ignore[override]
        """A failure at encode, which takes a known time.

        Prefill and decode may be late because requests queue at them or because an answer is long:
        there, only probes find an instance that hangs.
        """
        return Outcome.NOTHING if self.stage in {"prefill", "decode"} else Outcome.BAD


class UpstreamRejected(ProxyError):
    """An instance answered with an error that is the client's to see.

    What the instance said is kept; its shape is made OpenAI's where it was not.
    """

    def __init__(
        self, status: int, reply: bytes, *, stage: Stage, headers: Mapping[str, str]
    ) -> None:
        said = openai_error(reply)
        self._said = {"type": "UpstreamError", "param": None, "code": status} | (
            said or {"message": plain_message(status, reply)}
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
        self.rest_s = said_retry_after_s(self._passed_headers)
        self.retryable = status in ELSEWHERE
        self.outcome = _outcome_of(status)
        if status in BUSY:
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


def _outcome_of(status: int) -> Outcome:
    if status in BUSY:
        return Outcome.BUSY
    if status in UNJUDGED:
        return Outcome.NOTHING
    return Outcome.BAD if status >= HTTPStatus.INTERNAL_SERVER_ERROR else Outcome.GOOD


def no_store(message: str) -> RequestRefused:
    """503: what only the encoder-cache store could answer."""
    return RequestRefused(503, message, slug="no_store")
