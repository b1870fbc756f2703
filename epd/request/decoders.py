"""Choice of the decode instance: by the instance table, the client's header, or a picker."""

import re
from collections.abc import Collection, Sequence

from epd.errors import BadRequest, NoInstance, ProxyError, RequestRefused
from epd.policies.plan import Course
from epd.request.picker import Picker
from epd.request.recovery import Attempt
from epd.request.request import Request
from epd.routing.balance import Choice
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.recent_items import BY_CONTENT, RecentItems
from epd.routing.table import InstanceTable
from epd.routing.urls import is_allowed, service_url
from epd.state_log import StateLog

NAMED = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
"""Valid URLs of an instance outside the table. A URL with a path is rejected, and so is a host that
parsers could read in two ways."""


class Decoders:
    """Choice of the decode instance of each request.

    An instance that a client or a picker names must be in the table, or on a host of
    `--decode-hosts`: a client must not make the proxy connect to an arbitrary host.
    """

    def __init__(self, table: InstanceTable, picker: Picker, recent: RecentItems) -> None:
        """Choose from the table, or by the picker. `recent` tells where items were used last."""
        self._table = table
        self._picker = picker
        self._recent = recent
        self._choice = Choice(table, *ANSWERING)
        self._complaint = StateLog("the endpoint picker cannot be used", "the proxy chooses")

    def named_by_client(self, request: Request) -> Instance | None:
        """Return the decode instance that the client's header names; None without the header.

        Raises:
            BadRequest: the header's value is invalid.
            RequestRefused: 403, the named instance is not allowed.
        """
        header = request.config.decode_header
        value = request.client_headers.get(header)
        if value is None:
            if self._table.of_roles(*ANSWERING):
                return None
            raise BadRequest(
                f"the proxy has no decode instance; name one in the header {header}: host:port",
                slug="decode_not_named",
            )
        try:
            found = self._at(value, request.config.decode_hosts)
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

    async def pick_instance(
        self,
        request: Request,
        attempt: Attempt,
        prefix: Prefix = NO_PREFIX,
        prefill: Instance | None = None,
    ) -> Instance:
        """Return the decode instance, if possible one that has not been tried.

        `prefix` is the content of the prompt; without a prefill instance, decode computes it.

        Raises:
            NoInstance: there is no decode instance.
            ProxyError: as `named_by_client`.
        """
        named: Instance | None = None
        if attempt.course.decode_from == "header":
            named = self.named_by_client(request)
        elif attempt.course.decode_from == "picker":
            named = await self._picked(request, attempt, prefill)
        if named is not None:
            return named
        prefer = None if request.turn is None else request.turn.prefers_decode
        encodes = attempt.course.local and prefill is None
        attracted = encodes and request.config.decode_balance not in BY_CONTENT
        items = [item.identity for item in request.items] if attracted else []
        if items:
            prefer = prefer or self._recent.nearest_url(items)
        instance = request.watched.choose_instance(
            "decode",
            lambda fits: self._choice.best_instance(
                attempt.avoided_decodes,
                balance=request.config.decode_balance,
                session=request.session,
                prefix=prefix if request.config.decode_balance == "content" else NO_PREFIX,
                prefer=prefer,
                fits=fits,
            ),
        )
        if items:
            self._recent.record(items, instance.url)
        return instance

    def has_untried(self, course: Course, tried: Collection[Instance]) -> bool:
        """Return whether there is an eligible instance that has not been tried.

        A client's choice is not replaced. A picker may name instances outside the table.
        """
        if course.decode_from == "header":
            return False
        return course.decode_from == "picker" or self._choice.has_untried(tried)

    def choose_release_instance(
        self, tried: Collection[Instance], request: Request
    ) -> Instance | None:
        """Return an untried instance of the table to release KV blocks; None if there is none."""
        if not self._choice.has_untried(tried):
            return None
        return self._choice.best_instance(tried, balance=request.config.decode_balance)

    async def _picked(
        self, request: Request, attempt: Attempt, prefill: Instance | None
    ) -> Instance | None:
        """Return the picker's choice; None if it is unusable and the table has an instance.

        Raises:
            NoInstance: neither the picker nor the table has one.
        """
        usable = [candidate.instance for candidate in self._table.usable_candidates(*ANSWERING)]
        tried = attempt.avoided_decodes
        try:
            named = await self._picker.ask_picker(attempt.facts, request, prefill, usable, tried)
            found = self._at(named, request.config.decode_hosts)
        except ProxyError as error:
            reason = error.message
        except ValueError:
            reason = "its answer has no valid URL of an instance"
        else:
            if found is not None:
                self._complaint.record_success()
                return None if found in tried and self._choice.has_untried(tried) else found
            reason = "it names neither a decode instance of this proxy nor a host of --decode-hosts"
        self._complaint.record_failure(reason)
        if usable:
            return None
        raise NoInstance(
            "the endpoint picker names no decode instance, and the proxy has none", slug="no_decode"
        )

    def _at(self, named: str, hosts: Sequence[str]) -> Instance | None:
        """Return the decode instance at `host:port` or a URL; None if it is not allowed.

        Raises:
            ValueError: `named` is neither.
        """
        url = service_url(named)
        found = self._table.find_instance(url, *ANSWERING)
        if found is None and "://" not in named:
            found = self._table.find_instance(url.replace("http:", "https:", 1), *ANSWERING)
        if found is None and hosts and NAMED.fullmatch(url) and is_allowed(url, hosts):
            found = Instance(Role.DECODE, url)
        return found
