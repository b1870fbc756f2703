"""Policies in force: the configured ones, until others are set. All workers have the same."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from typing import Literal

import orjson
import structlog

from epd.errors import Overloaded, RequestRefused
from epd.policies.plan import Course, Facts
from epd.policies.registry import Active, choose_policy
from epd.shared_page import SharedPage

UNREAD = -1
"""Number of writes that no page has."""

Written = Sequence[str]
"""Policies in text form (`name?option=value`), in order of priority."""

_Change = Callable[[Written], Written | None]
"""Function from the policies in force to the new ones; None stands for the configured ones."""


class Policies:
    """Policies in force, on a page that all workers of a proxy read and may write."""

    def __init__(
        self,
        configured: Written,
        activate: Callable[[Written], Sequence[Active]],
        page: SharedPage | None = None,
    ) -> None:
        """Start with the policies of the page, or the configured ones.

        Args:
            configured: policies of the configuration.
            activate: returns policies of their text forms, or raises `ValueError`.
            page: page of all workers with the policies that were set; None without others.
        """
        self._configured = configured
        self._activate = activate
        self._page = page
        self._number = UNREAD
        self._set: Written | None = None
        self._active: Sequence[Active] = ()
        # Courses by kind of request, which cannot differ until the policies change.
        self._courses: dict[Hashable, tuple[str, Course] | None] | None = None
        self._use(None)

    @property
    def active(self) -> Sequence[Active]:
        """The policies in force, in order of priority."""
        self._refresh()
        return self._active

    def _refresh(self) -> None:
        if self._page is not None and (number := self._page.write_count()) != self._number:
            content = self._page.read()
            self._use(orjson.loads(content) if content else None)
            self._number = number

    def _use(self, written: Written | None) -> None:
        self._active = self._activate(self._configured if written is None else written)
        self._courses = {} if all(policy.decides_by_kind for policy in self._active) else None
        self._set = written

    @property
    def source(self) -> Literal["configuration", "api"]:
        """The source of the policies in force."""
        self._refresh()
        return "configuration" if self._set is None else "api"

    def choose_policy(self, facts: Facts) -> tuple[str, Course] | None:
        """Return the deciding policy and the course of a request; None if no policy decides.

        A request is decided once: policies that are set later do not change its course.
        """
        active, courses = self.active, self._courses
        if courses is None:
            return choose_policy(active, facts)
        if (kind := facts.kind) not in courses:
            courses[kind] = choose_policy(active, facts)
        return courses[kind]

    @property
    def decodes_elsewhere(self) -> bool:
        """Return whether a policy in force may name decode instances outside the table."""
        return any(policy.common.decode_from != "table" for policy in self.active)

    @property
    def compares_costs(self) -> bool:
        """Return whether a policy in force compares the load of instances of different roles."""
        return any(hasattr(policy.policy, "place_item") for policy in self.active)

    def replace(self, written: Written) -> None:
        """Replace all policies.

        Raises:
            RequestRefused: a policy is invalid (422). Nothing was changed.
            Overloaded: another process is changing the policies.
        """
        self._write(lambda _: written)

    def add(self, written: str, priority: int | None) -> None:
        """Add one policy, or change its options; errors as in `replace`.

        Without a priority, from 1 for the first, a new policy becomes the first, and one with other
        options keeps its position.
        """
        self._write(lambda current: _with(current, written, priority))

    def remove(self, name: str) -> None:
        """Remove one policy; errors as in `replace`.

        Raises:
            RequestRefused: the policy is not in force (404).
        """

        def without(current: Written) -> Written:
            others = [policy for policy in current if _name(policy) != name]
            if len(others) == len(current):
                raise RequestRefused(404, "this policy is not in force", slug="unknown_policy")
            return others

        self._write(without)

    def reset(self) -> None:
        """Return to the configured policies; errors as in `replace`."""
        self._write(lambda _: None)

    def _write(self, change: _Change) -> None:
        try:
            with nullcontext() if self._page is None else self._page.hold_lock():
                written = change([policy.written for policy in self.active])
                if self._page is None:
                    self._use(written)
                else:
                    self._activate(self._configured if written is None else written)
                    self._page.write(b"" if written is None else orjson.dumps(written))
        except ValueError as invalid:
            raise RequestRefused(422, str(invalid), slug="invalid_policy") from None
        except OSError as error:
            raise Overloaded(
                "the policies cannot be changed at the moment; nothing was changed: retry",
                slug="policies_busy",
            ) from error
        structlog.get_logger("epd").info(
            "policies",
            policies=[policy.written for policy in self.active],
            said_by=self.source,
        )


def _with(current: Written, written: str, priority: int | None) -> Written:
    names = [_name(policy) for policy in current]
    with suppress(ValueError):
        at = names.index(_name(written))
        if priority is None:
            return [*current[:at], written, *current[at + 1 :]]
        current = [*current[:at], *current[at + 1 :]]
    at = (priority or 1) - 1
    return [*current[:at], written, *current[at:]]


def _name(written: str) -> str:
    return written.partition("?")[0]
