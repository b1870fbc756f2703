"""The choice of the decode instance, by the instance table, the client or an endpoint picker."""

import re
from collections.abc import Collection, Sequence

from epd.discovery.complaint import Complaint
from epd.errors import BadRequest, NoInstance, ProxyError, RequestRefused
from epd.policies.course import Course
from epd.request.context import RequestContext
from epd.request.picker import Picker
from epd.request.sending import Attempt
from epd.routing.allowed import is_allowed
from epd.routing.balance import Choice
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.table import InstanceTable
from epd.routing.urls import service_url

NAMED = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
"""Valid URLs of an instance outside the table. A URL with a path is rejected, and so is a host that
parsers could read in two ways."""


class Decoders:
    """Chooses the decode instance of each request.

    An instance that a client or a picker names must be in the table, or on a host of
    `--decode-hosts`: a client must not make the proxy connect to an arbitrary host.
    """

    def __init__(self, table: InstanceTable, picker: Picker) -> None:
        self._table = table
        self._picker = picker
        self._choice = Choice(table, *ANSWERING)
        self._complaint = Complaint("the endpoint picker cannot be used", "the proxy chooses")

    def settled(self, course: Course, context: RequestContext) -> Course:
        """Return the course with a resolved choice of decode.

        It stays `header` only if the client sent the header. An invalid choice is rejected before
        any work for the request starts.

        Raises:
            BadRequest: the header's value is invalid.
            RequestRefused: 403, the named instance is not allowed.
        """
        if course.decode_from == "header" and self._asked_for(context) is None:
            return course._replace(decode_from="table")
        return course

    async def pick(
        self, attempt: Attempt, context: RequestContext, prefill: Instance | None = None
    ) -> Instance:
        """Return the decode instance, if possible one that has not been tried.

        Args:
            attempt: the current attempt of the request.
            context: context of the request.
            prefill: the instance of its prefill; None without prefill.

        Raises:
            NoInstance: there is no decode instance.
            ProxyError: see `settled`.
        """
        named: Instance | None = None
        if attempt.course.decode_from == "header":
            named = self._asked_for(context)
        elif attempt.course.decode_from == "picker":
            named = await self._picked(attempt, context, prefill)
        prefers = None if context.turn is None else context.turn.prefers_decode
        return named or self._choice.best(
            attempt.decodes,
            balance=context.config.decode_balance,
            session=context.session,
            prefer=prefers,
        )

    def others(self, course: Course, tried: Collection[Instance]) -> bool:
        """Return whether there is an eligible instance that has not been tried.

        A client's choice is not replaced. A picker may name instances outside the table.
        """
        if course.decode_from == "header":
            return False
        return course.decode_from == "picker" or self._choice.others(tried)

    def another(self, tried: Collection[Instance], context: RequestContext) -> Instance | None:
        """Return an instance of the table that has not been tried; None if there is none."""
        if not self._choice.others(tried):
            return None
        return self._choice.best(tried, balance=context.config.decode_balance)

    def _asked_for(self, context: RequestContext) -> Instance | None:
        """Return the instance that the client names; None without the header."""
        header = context.config.decode_header
        value = context.client_headers.get(header)
        if value is None:
            if self._table.of(*ANSWERING):
                return None
            raise BadRequest(
                f"the proxy has no decode instance; name one in the header {header}: host:port",
                slug="decode_not_named",
            )
        try:
            found = self._at(value, context.config.decode_hosts)
        except ValueError:
            raise BadRequest(
                f"{header} must be host:port, or a URL such as http://host:port",
                slug="invalid_decode",
            ) from None
        if found is None:
            raise RequestRefused(
                403,
                f"{header} names neither a decode instance of this proxy nor a host of "
                "--decode-hosts",
                slug="host_not_allowed",
            )
        return found

    async def _picked(
        self, attempt: Attempt, context: RequestContext, prefill: Instance | None
    ) -> Instance | None:
        """Return the picker's choice; None if it is unusable and the table has an instance.

        Raises:
            NoInstance: neither the picker nor the table has one.
        """
        usable = [one.instance for one in self._table.usable(*ANSWERING)]
        tried = attempt.decodes
        try:
            named = await self._picker.ask(attempt.facts, context, prefill, usable, tried)
            found = self._at(named, context.config.decode_hosts)
        except ProxyError as error:
            reason = error.message
        except ValueError:
            reason = "its answer has no valid URL of an instance"
        else:
            if found is not None:
                self._complaint.well()
                return None if found in tried and self._choice.others(tried) else found
            reason = "it names neither a decode instance of this proxy nor a host of --decode-hosts"
        self._complaint.failed(reason)
        if usable:
            return None
        raise NoInstance(
            "the endpoint picker names no decode instance, and the proxy has none",
            slug="no_decode",
        )

    def _at(self, named: str, hosts: Sequence[str]) -> Instance | None:
        """Return the decode instance at an address; None if it is not allowed.

        Args:
            named: `host:port`, or a URL.
            hosts: hosts of `--decode-hosts`.

        Raises:
            ValueError: `named` is neither.
        """
        url = service_url(named)
        found = self._table.find(url, *ANSWERING)
        if found is None and "://" not in named:
            found = self._table.find(url.replace("http:", "https:", 1), *ANSWERING)
        if found is None and hosts and NAMED.fullmatch(url) and is_allowed(url, hosts):
            found = Instance(Role.DECODE, url)
        return found
