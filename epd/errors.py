"""Error types of the proxy, with the answer to the client and the meaning of each. Pure.

Every error reaches the client in the OpenAI shape, which vLLM uses too
(`vllm/entrypoints/openai/engine/protocol.py`, `ErrorInfo`): `{"error": {"message", "type", "param",
"code"}}`. `code` is the HTTP status.

If an instance answered with an error, the client gets its message and its `Retry-After`.
"""

import enum
import math
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Literal, Self

import orjson

from epd.json_or_none import json_or_none

RETRY_AFTER = re.compile(r"[0-9]{1,6}")
"""`Retry-After` in seconds. The other form, a date, is ignored."""

MAX_UPSTREAM_TEXT = 500
"""Maximum length of an upstream's non-JSON error text in the client's answer, in characters."""

INSIDES = re.compile(r"0x[0-9a-fA-F]{6,}|(?:/[\w.~-]+){2,}")
"""Memory addresses and file paths. vLLM removes them from its own errors, but an error in another
shape may come from other software."""


Stage = Literal["proxy", "queue", "store", "encode", "prefill", "decode", "release"]

TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
"""`error.type` by status; `BadRequestError` for every other one."""

BUSY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""Statuses of an overloaded instance. They do not count as failures of the instance."""

ELSEWHERE = BUSY | {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.GATEWAY_TIMEOUT,
}
"""Statuses of a decode instance after which another instance may succeed."""

UNJUDGED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.REQUEST_TIMEOUT})
"""Statuses that carry no information about the health of the instance."""

NOT_CLIENTS = frozenset({408, 429})
"""Statuses below 500 that depend on the moment and not on the request."""

SPENT = frozenset({500, 502, 504})
"""Statuses of errors that remain after the proxy's own retries, where a retry could help."""


def reported_retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds for which an instance asks for no further request; None without them."""
    seconds = headers.get("Retry-After", "")
    return float(seconds) if RETRY_AFTER.fullmatch(seconds) else None


def openai_error(reply: bytes) -> dict[str, Any] | None:
    """Return the `error` object of an answer in the OpenAI shape; None for another shape."""
    match json_or_none(reply):
        case {"error": {"message": str()} as error}:
            return dict(error)
        case _:
            return None


def plain_message(status: int, reply: bytes) -> str:
    """Return the message of an answer in another shape, without addresses and paths of the host.

    A page of HTML is not from vLLM, but from another server at this address, or from a proxy.
    """
    match json_or_none(reply):
        # Errors of FastAPI, and vLLM's answer to a wrong API key.
        case {"detail": str() as message} | {"error": str() as message} if message:
            text = message
        case _:
            text = reply[:MAX_UPSTREAM_TEXT].decode("utf-8", "replace").strip()
    if text.startswith("<"):
        return f"the instance answered {status} with a page of HTML, as no vLLM server does"
    return INSIDES.sub("…", text) or f"the instance answered {status}"


class Outcome(enum.Enum):
    """The effect of a request's result on the health of its instance."""

    GOOD = enum.auto()
    BAD = enum.auto()
    LATE = enum.auto()
    """No answer in time: a failure only if the instance made no progress meanwhile."""
    UNREACHABLE = enum.auto()
    REFUSED = enum.auto()
    """The host refused the connection: no process listens there."""
    BUSY = enum.auto()
    DOUBTFUL = enum.auto()
    NOTHING = enum.auto()


class ProxyError(Exception):
    """A request that ends in an error.

    The class of an error states what the error allows. For an error that an instance answered, the
    status does. No other module classifies errors; `epd.request.recovery` and `epd.routing` read
    these attributes.

    Attributes:
        status: HTTP status of the answer.
        slug: machine-readable cause, sent as `x-epd-error`.
        stage: the stage that failed, sent as `x-epd-stage`.
        param: the invalid part of the request, such as `messages[0].content[2]`.
        answered: HTTP status that the instance answered; None without an answer.
        outcome: effect on the instance's health, unless it is a 500 (`engine_failed`).
        retryable: whether another instance may succeed.
        repeatable: whether the same instance may succeed, if there is no other.
        worked: whether the instance received the request and failed at it. The entries or blocks
            that it was asked to load may then be at fault.
        died: whether the instance died while it held the request.
        rest_s: seconds for which the instance asks for no further request; None if it does not
            state them.
    """

    status: int = 500
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

    def at_param(self, param: str | None) -> Self:
        """Return a copy of the error that names this part of the request as `param`.

        Several requests may share the original.
        """
        located = self._copy()
        located.param = param
        return located

    def after(self, first: "ProxyError") -> Self:
        """Return the error; its message also names the request's first failure if it differs.

        An instance's own message is left out: it may quote a prompt, and this one is logged.
        """
        answered = first.answered
        cause = f"the {first.stage} instance answered {answered}" if answered else first.message
        if self.status not in SPENT or self.answered is not None or cause == self.message:
            return self
        copy = self._copy()
        copy.message = f"{self.message}; the first attempt failed: {cause}"
        return copy

    def _copy(self) -> Self:
        copy = type(self).__new__(type(self), *self.args)
        copy.__dict__.update(self.__dict__)
        copy.__cause__ = self.__cause__
        return copy

    @property
    def detail(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "BadRequestError")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.status}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, in addition to those of every answer."""
        headers = {"x-epd-stage": self.stage, "x-epd-error": self.slug}
        # The official OpenAI client obeys this header. It would otherwise repeat the proxy's
        # retries.
        return headers | {"x-should-retry": "false"} if self.retry_pointless else headers

    @property
    def retry_pointless(self) -> bool:
        """Whether a retry by the client is pointless, because the proxy has retried already."""
        return self.status in SPENT

    @property
    def engine_failed(self) -> bool:
        """Whether an engine answered 500: an entry or KV blocks may be lost.

        An engine that cannot load the entry or the blocks named in its request answers no more than
        that.
        """
        return self.answered == HTTPStatus.INTERNAL_SERVER_ERROR

    def retry_delay_s(self, *, others: bool, patience_s: float = 0.0) -> float | None:
        """Return the delay before the next request after this error; None for no further request.

        `others` is whether there is an untried instance. If there is none, the proxy waits for a
        `Retry-After` of at most `patience_s` seconds.
        """
        if not self.retryable:
            return None
        if others:
            return 0.0
        if self.rest_s is not None and self.rest_s <= patience_s:
            return self.rest_s
        return 0.0 if self.repeatable else None

    @property
    def rejects_request(self) -> bool:
        """Whether the request itself is invalid, so that no instance failed."""
        return 400 <= self.status < 500 and self.status not in NOT_CLIENTS  # noqa: PLR2004

    def body(self) -> bytes:
        return orjson.dumps({"error": self.detail})


def slug_of(error: BaseException | None) -> str | None:
    """Return the slug under which an error is counted; `cancelled` for an abandoned request."""
    if error is None:
        return None
    return error.slug if isinstance(error, ProxyError) else "cancelled"


def drop_tracebacks(error: BaseException | None) -> None:
    """Delete the tracebacks of an error that was handled, and of the errors that led to it.

    A frame with an error in a local variable and the error's traceback are a reference cycle: a
    request that failed once would keep its media until a garbage collection.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        reached = pending.pop()
        if reached is not None and id(reached) not in seen:
            seen.add(id(reached))
            reached.__traceback__ = None
            pending += [reached.__cause__, reached.__context__]


class BadRequest(ProxyError):
    """The client's request is invalid."""

    status = 400
    default_slug = "invalid_request"


class RequestRefused(ProxyError):
    """The HTTP layer rejected the request: unknown route, wrong method, body too large."""

    default_slug = "invalid_request"

    def __init__(self, status: int, message: str, *, slug: str) -> None:
        super().__init__(message, slug=slug)
        self.status = status


class WrongMethod(RequestRefused):
    """The route exists but does not accept the request's method."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = ", ".join(sorted(allowed))
        super().__init__(405, f"this route accepts only {self._allowed}", slug="unknown_route")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every error, and `Allow`, which a 405 must have (RFC 9110, 15.5.6)."""
        return {**super().headers, "Allow": self._allowed}


class Unauthorized(ProxyError):
    """The request has no API key, or an invalid one."""

    status = 401
    default_slug = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every error, and the authentication scheme (RFC 6750, 3)."""
        return {**super().headers, "WWW-Authenticate": "Bearer"}


class UnknownMedia(ProxyError):
    """The request names media that the client has not uploaded, or that the store has evicted."""

    status = 404
    default_slug = "unknown_media"


class MediaFetchFailed(ProxyError):
    """The proxy could not fetch the media at a URL of the request. No instance is at fault."""

    status = 422
    default_slug = "media_fetch_failed"


class TryLater(ProxyError):
    """The request is valid but cannot be served now.

    Attributes:
        retry_after_s: seconds until the client may retry, sent as `Retry-After`; None if unknown.
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
        """Headers of every error, and `Retry-After` in whole seconds (RFC 9110, 10.2.3)."""
        return {**super().headers, "Retry-After": str(max(1, math.ceil(self.retry_after_s or 1)))}


class Overloaded(TryLater):
    """The proxy or a service behind it is overloaded, or the proxy is about to stop."""

    status = 503
    default_slug = "overloaded"


class NoInstance(Overloaded):
    """No instance of a role is reachable."""

    retryable = True
    repeatable = True


class SuspectedFatal(TryLater):
    """Two instances died while they served the request: the proxy sends it to no third one.

    The answer tells the official OpenAI client not to retry.
    """

    status = 503
    default_slug = "suspected_fatal"
    retry_pointless = True
    died = True


class TooManyRequests(TryLater):
    """The concurrent requests of a client, or of all clients together, exceed a limit."""

    status = 429
    default_slug = "queue_full"


class UpstreamFailed(ProxyError):
    """An instance was unreachable, closed the connection early, or sent an invalid answer."""

    status = 502
    outcome = Outcome.BAD
    retryable = True
    repeatable = True
    worked = True


class EncodeMismatch(UpstreamFailed):
    """The reply of an encode instance does not fit the item. A retry would get the same reply."""

    default_slug = "encode_metadata"
    retryable = False

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the encode instance's ec_transfer_params cannot be matched to the item: {reason}",
            stage="encode",
        )


class ReplyTooLarge(UpstreamFailed):
    """The answer of an instance exceeds the proxy's limit. Another instance would exceed it too."""

    retryable = False


class UpstreamUnreachable(UpstreamFailed):
    """The connection to an instance failed: the request has not left the proxy."""

    outcome = Outcome.UNREACHABLE
    repeatable = False
    worked = False


class UpstreamDied(UpstreamFailed):
    """An instance died, or its connection closed, after it received all of a request.

    The request may have caused it. The client's last answer is the same as for other failures.
    """

    died = True


class UpstreamDenied(ProxyError):
    """An instance rejects the proxy's own API key. The client cannot correct that."""

    status = 502


class UpstreamBusy(Overloaded):
    """An encode or prefill instance is overloaded."""

    outcome = Outcome.BUSY
    retryable = True

    @property
    def rest_s(self) -> float | None:  # type: ignore[override]
        return self.retry_after_s


class UpstreamTimeout(ProxyError):
    """An instance did not answer within the deadline of its stage."""

    status = 504
    outcome = Outcome.BAD
    retryable = True
    worked = True

    def __init__(self, message: str, *, slug: str | None = None, stage: Stage = "proxy") -> None:
        super().__init__(message, slug=slug, stage=stage)
        # Queued requests or a long answer can cause the delay there.
        if stage in {"prefill", "decode"}:
            self.outcome = Outcome.LATE


class UpstreamRejected(ProxyError):
    """An instance answered with an error that the client receives.

    The instance's message is kept. An answer of another shape is converted to the OpenAI shape.
    """

    def __init__(
        self, status: int, reply: bytes, *, stage: Stage, headers: Mapping[str, str]
    ) -> None:
        error = openai_error(reply)
        self._error = {"type": "UpstreamError", "param": None, "code": status} | (
            error or {"message": plain_message(status, reply)}
        )
        kind = "rejected" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"
        super().__init__(
            self._error["message"], slug=f"{stage}_{kind}", stage=stage, answered=status
        )
        self.status = status
        self._reply = reply if error else None
        self._passed_headers = {
            name: headers[name]
            for name in ("Retry-After", "WWW-Authenticate")
            if name in headers and headers[name].isprintable()
        }
        self.rest_s = reported_retry_after_s(self._passed_headers)
        self.retryable = status in ELSEWHERE
        self.outcome = _outcome_of(status)
        if status in BUSY:
            self._passed_headers.setdefault("Retry-After", "1")

    @property
    def detail(self) -> dict[str, Any]:
        return self._error if self.param is None else self._error | {"param": self.param}

    def body(self) -> bytes:
        return self._reply if self._reply and self.param is None else super().body()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every error, and those of the instance that control a retry."""
        return {**super().headers, **self._passed_headers}


def _outcome_of(status: int) -> Outcome:
    if status in BUSY:
        return Outcome.BUSY
    if status in UNJUDGED:
        return Outcome.NOTHING
    return Outcome.BAD if status >= HTTPStatus.INTERNAL_SERVER_ERROR else Outcome.GOOD


def no_store(message: str) -> RequestRefused:
    """Return a 503 for an operation that needs the encoder store."""
    return RequestRefused(503, message, slug="no_store")
