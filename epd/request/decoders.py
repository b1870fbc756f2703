"""Who decodes a request: found in the table of instances, or named by somebody else."""

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
"""All that is taken of a URL of an instance that the table does not have: no path of somebody's
choice, and no host that could be read in two ways."""


class Decoders:
    """Names the decode instance of each request.

    Whoever else names one, it is an instance of the table, or on a host of `--decode-hosts`: a
    client must not choose whom the proxy speaks to.
    """

    def __init__(self, table: InstanceTable, picker: Picker) -> None:
        self._table = table
        self._picker = picker
        self._choice = Choice(table, *ANSWERING)
        self._complaint = Complaint("the endpoint picker cannot be used", "the proxy chooses")

    def settled(self, course: Course, context: RequestContext) -> Course:
        """The course, once it is clear whether the client has anything to say of it.

        A choice that is none is refused, before anything is done for its request.

        Raises:
            BadRequest: it names nothing that could be one.
            RequestRefused: 403, it names whom it may not.
        """
        if course.decode_from == "header" and self._asked_for(context) is None:
            return course._replace(decode_from="table")
        return course

    async def pick(
        self, attempt: Attempt, context: RequestContext, prefill: Instance | None = None
    ) -> Instance:
        """Who decodes, one that was not tried where there is one.

        Args:
            attempt: the request's.
            context: the request's.
            prefill: who has prefilled it, or will; None: nobody.

        Raises:
            NoInstance: there is none.
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
        """Whether there is one that was not tried, and may be.

        Whom a client names is not replaced; a picker may know others than the table has.
        """
        if course.decode_from == "header":
            return False
        return course.decode_from == "picker" or self._choice.others(tried)

    def another(self, tried: Collection[Instance], context: RequestContext) -> Instance | None:
        """One of the table that was not tried, to be told of something; None: there is none."""
        if not self._choice.others(tried):
            return None
        return self._choice.best(tried, balance=context.config.decode_balance)

    def _asked_for(self, context: RequestContext) -> Instance | None:
        """Whom a client names; None where it leaves that to the proxy."""
        header = context.config.decode_header
        value = context.client_headers.get(header)
        if value is None:
            if self._table.of(*ANSWERING):
                return None
            raise BadRequest(
                f"the proxy knows no decode instance: name one, {header}: host:port",
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
        """Whom the picker names; None where it names none that can be used.

        Raises:
            NoInstance: nor does the table.
        """
        usable = [one.instance for one in self._table.usable(*ANSWERING)]
        tried = attempt.decodes
        try:
            named = await self._picker.ask(attempt.facts, context, prefill, usable, tried)
            found = self._at(named, context.config.decode_hosts)
        except ProxyError as error:
            reason = error.message
        except ValueError:
            reason = "its answer has no URL that could be one"
        else:
            if found is not None:
                self._complaint.well()
                return None if found in tried and self._choice.others(tried) else found
            reason = "it names neither a decode instance of this proxy nor a host of --decode-hosts"
        self._complaint.failed(reason)
        if usable:
            return None
        raise NoInstance(
            "the endpoint picker names no decode instance, and the proxy knows none",
            slug="no_decode",
        )

    def _at(self, named: str, hosts: Sequence[str]) -> Instance | None:
        """The decode instance that somebody names; None: it must not be one.

        Args:
            named: `host:port`, or a URL.
            hosts: those of `--decode-hosts`.

        Raises:
            ValueError: it is neither.
        """
        url = service_url(named)
        found = self._table.find(url, *ANSWERING)
        if found is None and "://" not in named:
            found = self._table.find(url.replace("http:", "https:", 1), *ANSWERING)
        if found is None and hosts and NAMED.fullmatch(url) and is_allowed(url, hosts):
            found = Instance(Role.DECODE, url)
        return found
