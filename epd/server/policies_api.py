"""Coordination policies in force, and their changes at `/policies`."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypedDict

import orjson
import structlog

from epd.api.body import parse_object
from epd.config import ProxyConfig
from epd.config.proxy_config import active_policies
from epd.config.sections import ConfigFields
from epd.errors import Overloaded, RequestRefused
from epd.observe.worker_metrics import SharedPage
from epd.policies.plan import Course, Facts
from epd.policies.registry import Active, choose_policy, known_names

UNREAD = -1
"""Number that no page has."""

Written = Sequence[str]
"""Policies in text form (`name?option=value`), in order of priority."""

_Change = Callable[[Written], Written | None]
"""Function from the policies in force to the new ones; None stands for the configured ones."""


class PolicyRow(TypedDict):
    """One policy in force."""

    policy: str
    """The policy in text form: `name?option=value`."""
    name: str
    options: Mapping[str, Any]


_Source = TypedDict("_Source", {"from": Literal["configuration", "api"]})


class PoliciesPage(_Source):
    """Policies in force, in order of priority, their source, and the known policies."""

    policies: list[PolicyRow]
    known: list[str]


class OwnPage:
    """Page of a process that shares it with no other."""

    def __init__(self) -> None:
        self._number = 0
        self._content = b""

    def write_count(self) -> int:
        return self._number

    def read(self) -> bytes | None:
        return self._content

    def write(self, page: bytes) -> None:
        self._number += 1
        self._content = page

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        yield


class Policies:
    """Policies in force: the configured ones, until others are set through the API."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._page: OwnPage | SharedPage = OwnPage()
        self._number = UNREAD
        self._set: Written | None = None
        self._active: Sequence[Active] = ()
        # Courses by kind of request, which cannot differ until the policies change.
        self._courses: dict[Hashable, tuple[str, Course] | None] | None = None

    def share_page(self, page: SharedPage) -> None:
        """Use the policies of this page from now on, which any process may write."""
        self._page, self._number = page, UNREAD

    def choose_policy(self, facts: Facts) -> tuple[str, Course] | None:
        """Return the deciding policy and the course of a request; None if no policy decides.

        A request is decided once: policies that are set later do not change its course.
        """
        active, courses = self._current(), self._courses
        if courses is None:
            return choose_policy(active, facts)
        if (kind := facts.kind) not in courses:
            courses[kind] = choose_policy(active, facts)
        return courses[kind]

    @property
    def decodes_elsewhere(self) -> bool:
        """Return whether a policy in force may name decode instances outside the table."""
        policies = self._current()
        return any(policy.common.decode_from != "table" for policy in policies)

    @property
    def compares_costs(self) -> bool:
        """Return whether a policy in force compares the load of instances of different roles."""
        policies = self._current()
        return any(hasattr(policy.policy, "place_item") for policy in policies)

    def policies_page(self) -> PoliciesPage:
        rows = [
            PolicyRow(policy=policy.written, name=policy.name, options=policy.options)
            for policy in self._current()
        ]
        return {
            "policies": rows,
            "from": "configuration" if self._set is None else "api",
            "known": known_names(),
        }

    def replace(self, body: bytes) -> PoliciesPage:
        """Replace all policies by `{"policies": [...]}`; errors as in `set_policies`."""
        match parse_object(body):
            case {"policies": [*written], **rest} if not rest and all(
                isinstance(text, str) for text in written
            ):
                return self._write(lambda _: written)
        raise _invalid('the body must be {"policies": ["name?option=value", ...]}')

    def add(self, body: bytes) -> PoliciesPage:
        """Add one policy, or change its options; errors as in `add_policy`.

        The body is `{"policy": ..., "priority": 1}`. Without a priority, a new policy becomes the
        first, and one with other options keeps its place.
        """
        match parse_object(body):
            case {"policy": str() as written, **rest} if rest.keys() <= {"priority"}:
                priority = rest.get("priority")
                if priority is None or (type(priority) is int and priority > 0):
                    return self._write(lambda current: _with(current, written, priority))
                raise _invalid("priority must be a whole number from 1, which is the first")
        raise _invalid('the body must be {"policy": "name?option=value", "priority": 1}')

    def remove(self, name: str | None) -> PoliciesPage:
        """Remove one policy, or without a name all that were set; errors as in `remove_policy`."""
        if name is None:
            return self._write(lambda _: None)

        def without(current: Written) -> Written:
            left = [policy for policy in current if _name(policy) != name]
            if len(left) == len(current):
                raise RequestRefused(404, "this policy is not in force", slug="unknown_policy")
            return left

        return self._write(without)

    def _write(self, change: _Change) -> PoliciesPage:
        try:
            with self._page.hold_lock():
                written = change([policy.written for policy in self._current()])
                if written is not None:
                    _check(self._config, written)
                self._page.write(b"" if written is None else orjson.dumps(written))
        except OSError as error:
            raise Overloaded(
                "the policies cannot be changed at the moment; nothing was changed: retry",
                slug="policies_busy",
            ) from error
        page = self.policies_page()
        structlog.get_logger("epd").info(
            "policies", policies=[row["policy"] for row in page["policies"]], said_by=page["from"]
        )
        return page

    def _current(self) -> Sequence[Active]:
        number = self._page.write_count()
        if number != self._number:
            content = self._page.read()
            self._set = orjson.loads(content) if content else None
            written = self._config.policies if self._set is None else self._set
            self._active = active_policies(self._config, written)
            self._courses = {} if all(policy.decides_by_kind for policy in self._active) else None
            self._number = number
        return self._active


def _with(current: Written, written: str, priority: int | None) -> Written:
    names = [_name(policy) for policy in current]
    with suppress(ValueError):
        at = names.index(_name(written))
        if priority is None:
            return [*current[:at], written, *current[at + 1 :]]
        current = [*current[:at], *current[at + 1 :]]
    at = (priority or 1) - 1
    return [*current[:at], written, *current[at:]]


def _check(config: ConfigFields, written: Written) -> None:
    try:
        active_policies(config, written)
    except ValueError as invalid:
        raise _invalid(str(invalid)) from None


def _name(written: str) -> str:
    return written.partition("?")[0]


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(422, message, slug="invalid_policy")
