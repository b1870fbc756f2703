"""`/policies`: which coordination policies are in force, and which from now on."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import orjson
import structlog

from epd.bodies.parsing import parse_object
from epd.config import ProxyConfig
from epd.config.live import LiveConfig
from epd.errors import Overloaded, RequestRefused
from epd.policies.active import Active, decide
from epd.policies.catalogue import known
from epd.policies.course import Course, Facts

SETTINGS = (
    "policies",
    "skip_prefill_below_tokens",
    "skip_prefill_for_text",
    "local_prefill_url",
    "decode_choice",
    "decode_from",
)
"""What a reload says of policies. Where it says something else than before, that is the last word:
what was set by then is gone."""

UNREAD = -1
"""No page's number."""

Written = Sequence[str]
"""Policies as they are written, in order of priority."""


class Page(Protocol):
    """Where what has been set is kept, and shared (`epd.observe.shared_page`)."""

    def number(self) -> int:
        """Of what was written last; 0 where nothing was."""

    def read(self) -> bytes | None:
        """What was written last."""

    def write(self, page: bytes) -> None:
        """Have everyone read this from now on."""

    def locked(self) -> AbstractContextManager[None]:
        """Be the only one that writes.

        Raises:
            OSError: somebody else is.
        """


class OwnPage:
    """For a process that shares nothing."""

    def __init__(self) -> None:
        self._number = 0
        self._content = b""

    def number(self) -> int:
        """See `Page`."""
        return self._number

    def read(self) -> bytes | None:
        """See `Page`."""
        return self._content

    def write(self, page: bytes) -> None:
        """See `Page`."""
        self._number += 1
        self._content = page

    @contextmanager
    def locked(self) -> Iterator[None]:
        """See `Page`."""
        yield


class Policies:
    """The policies in force: the configuration's, until others have been set."""

    def __init__(self, live: LiveConfig) -> None:
        self._live = live
        self._page: Page = OwnPage()
        self._own = True
        self._active_for = (UNREAD, live.current)
        self._set: Written | None = None
        self._active: Sequence[Active] = ()

    def share(self, page: Page) -> None:
        """Go by what is set there from now on, in whichever process."""
        self._page, self._own = page, False
        self._active_for = (UNREAD, self._live.current)

    def follow(self, config: ProxyConfig, before: ProxyConfig) -> None:
        """Take over what a reload has changed. What is shared is for who reads it first to undo."""
        if self._own and said_otherwise(before, config):
            self._page.write(b"")

    def decide(self, config: ProxyConfig, facts: Facts) -> tuple[str, Course] | None:
        """What runs for a request, and by which policy; None: none says it.

        It is decided once for each request: what is set later does not change its course.

        Args:
            config: the request's. Policies that were set go before its own.
            facts: of the request.
        """
        return decide(self._in_force(config), facts)

    @property
    def decodes_elsewhere(self) -> bool:
        """Whether one of them may name decode instances that the proxy does not know."""
        return any(one.common.decode_from != "table" for one in self._in_force(self._live.current))

    def page(self) -> dict[str, Any]:
        """What is in force, the first one's word before the next one's, and what could be."""
        rows = [
            {"policy": one.written, "name": one.name, "options": one.options}
            for one in self._in_force(self._live.current)
        ]
        source = "configuration" if self._set is None else "api"
        return {"policies": rows, "from": source, "known": known()}

    def replace(self, body: bytes) -> dict[str, Any]:
        """Have these in force, and no others: `{"policies": [...]}`.

        Raises:
            BadRequest: the body is no JSON.
            RequestRefused: 422, they cannot be. Nothing has changed.
            Overloaded: somebody else is changing them.
        """
        match parse_object(body):
            case {"policies": [*written], **rest} if not rest and all(
                isinstance(one, str) for one in written
            ):
                return self._write(lambda _: written)
        raise _invalid('the body must be {"policies": ["name?option=value", ...]}')

    def add(self, body: bytes) -> dict[str, Any]:
        """Have one more in force, or one with other options: `{"policy": ..., "priority": 1}`.

        A new one is the first, where nothing else is said; one with other options stays where it
        is.

        Raises:
            BadRequest: the body is no JSON.
            RequestRefused: 422, it cannot be. Nothing has changed.
            Overloaded: somebody else is changing them.
        """
        match parse_object(body):
            case {"policy": str() as written, **rest} if rest.keys() <= {"priority"}:
                priority = rest.get("priority")
                if priority is None or (type(priority) is int and priority > 0):
                    return self._write(lambda there: _with(there, written, priority))
                raise _invalid("priority must be a whole number: 1 is the first")
        raise _invalid('the body must be {"policy": "name?option=value", "priority": 1}')

    def remove(self, name: str | None) -> dict[str, Any]:
        """Have one in force no longer; without a name, have the configuration's again.

        Raises:
            RequestRefused: 404, it is not in force; 422, it is the only one. Nothing has changed.
            Overloaded: somebody else is changing them.
        """
        if name is None:
            return self._write(lambda _: None)

        def without(there: Written) -> Written:
            left = [one for one in there if _name(one) != name]
            if len(left) == len(there):
                raise RequestRefused(404, "this policy is not in force", slug="unknown_policy")
            return left

        return self._write(without)

    def _write(self, change: "_Change") -> dict[str, Any]:
        try:
            with self._page.locked():
                config = self._live.current
                written = change([one.written for one in self._in_force(config)])
                if written is not None:
                    _check(config, written)
                self._page.write(b"" if written is None else orjson.dumps(written))
        except OSError as error:
            raise Overloaded(
                "the policies cannot be changed at the moment: nothing has changed",
                slug="policies_busy",
            ) from error
        page = self.page()
        structlog.get_logger("epd").info(
            "policies", policies=[row["policy"] for row in page["policies"]], said_by=page["from"]
        )
        return page

    def _in_force(self, config: ProxyConfig) -> Sequence[Active]:
        number = self._page.number()
        active_number, active_config = self._active_for
        if active_number != number or active_config is not config:
            self._activate(config)
            self._active_for = number, config
        return self._active

    def _activate(self, config: ProxyConfig) -> None:
        said = self._page.read()
        self._set = orjson.loads(said) if said else None
        if self._set is not None:
            try:
                self._active = config.activated(self._set)
            except ValueError as invalid:  # what they need is not configured any more
                self._set = None
                structlog.get_logger("epd").warning(
                    "the policies that were set cannot be used: those configured are",
                    reason=str(invalid),
                )
        if self._set is None:
            self._active = config.activated(config.policies)


class _Change(Protocol):
    """Says what is to be in force; None: what is configured."""

    def __call__(self, there: Written, /) -> Written | None: ...


def said_otherwise(before: ProxyConfig, after: ProxyConfig) -> bool:
    """Whether a reload has said something of policies that was not said before."""
    return any(getattr(before, name) != getattr(after, name) for name in SETTINGS)


def _with(there: Written, written: str, priority: int | None) -> Written:
    names = [_name(one) for one in there]
    with suppress(ValueError):
        at = names.index(_name(written))
        if priority is None:
            return [*there[:at], written, *there[at + 1 :]]
        there = [*there[:at], *there[at + 1 :]]
    at = (priority or 1) - 1
    return [*there[:at], written, *there[at:]]


def _check(config: ProxyConfig, written: Written) -> None:
    try:
        config.activated(written)
    except ValueError as invalid:
        raise _invalid(str(invalid)) from None


def _name(written: str) -> str:
    return written.partition("?")[0]


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(422, message, slug="invalid_policy")
