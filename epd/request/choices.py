"""Choice of the prefill and the decode instance: by the table, or by the client's header."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from ec_store.bounded import BoundedDict
from epd.errors import BadRequest, NoInstance, RequestRefused, Stage
from epd.request.attempt import Attempt
from epd.request.request import Request
from epd.routing.balance import Choice
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.table import InstanceTable
from epd.routing.urls import is_allowed, service_url

CLIENT_URL = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
"""Valid URLs of an instance outside the table. A URL with a path is rejected, and so is a host that
parsers could read in two ways."""


BY_CONTENT = ("content", "session")
"""Balances that already send related requests to one instance."""

Worth = Callable[[Instance], float]
"""Returns what an instance saves of a request that it prefills."""

MAX_ITEMS = 65536
"""Upper bound of the items that are remembered."""


class RecentItems:
    """The last instance of each item, which may have its encoder output. Of one event loop."""

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._urls: BoundedDict[str, str] = BoundedDict(max_items)

    def nearest_url(self, identities: Sequence[str]) -> str | None:
        """Return the URL of the instance with the most of these items; None if none is known."""
        urls = [url for name in identities if (url := self._urls.get(name)) is not None]
        return Counter(urls).most_common(1)[0][0] if urls else None

    def record(self, identities: Sequence[str], url: str) -> None:
        """Remember that a request with these items goes to an instance."""
        for name in identities:
            self._urls[name] = url


class Choices:
    """Choice of the prefill and the decode instance of each attempt.

    An instance that a client names must be in the table, or on a host of
    `--decode-hosts`: a client must not make the proxy connect to an arbitrary host.
    """

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
        self._recent = RecentItems()
        self._prefills = Choice(table, Role.PREFILL)
        self._decodes = Choice(table, *ANSWERING)

    def has_untried(
        self, attempt: Attempt, stage: Stage, prefill: Instance | None, decode: Instance | None
    ) -> bool:
        """Return whether an instance of a failed stage has had the request in no attempt.

        `prefill` and `decode` had it in this one. Neither a client's choice nor the prefill
        instance beside the proxy is replaced.
        """
        if stage == "prefill":
            beside = attempt.course.prefill_url is not None
            return not beside and self._prefills.has_untried(attempt.tried_prefills(prefill))
        by_client = attempt.client_decode is not None
        return not by_client and self._decodes.has_untried(attempt.tried_decodes(decode))

    def choose_prefill(self, attempt: Attempt, worth: Worth | None) -> Instance:
        """Return the prefill instance beside the proxy, or the best one of the table.

        Without `worth`, all instances save the same.

        Raises:
            NoInstance: there is none.
        """
        if (url := attempt.course.prefill_url) is None:
            return self._best("prefill", attempt, worth)
        if (local := self._table.find_instance(url, Role.PREFILL)) is not None:
            return local
        raise NoInstance(
            "the prefill instance beside the proxy is not in the instance table; register it",
            slug="no_prefill",
            stage="prefill",
        )

    def choose_decode(self, attempt: Attempt, worth: Worth | None = None) -> Instance:
        """Return the decode instance, if possible one that has not been tried.

        Raises:
            NoInstance: there is no decode instance.
        """
        return attempt.client_decode or self._best("decode", attempt, worth)

    def client_decode(self, request: Request) -> Instance | None:
        """Return the decode instance that the client's header names; None if it names none.

        Raises:
            BadRequest: the header's value is invalid.
            RequestRefused: 403, the named instance is not allowed.
        """
        if request.config.decode_from != "header":
            return None
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
            instance = self._at(value, request.config.decode_hosts)
        except ValueError:
            raise BadRequest(
                f"{header} must be host:port, or a URL such as http://host:port",
                slug="invalid_decode",
            ) from None
        if instance is None:
            raise RequestRefused(
                403,
                f"{header} names neither a decode instance of this proxy nor a host of "
                "--decode-hosts",
                slug="host_not_allowed",
            )
        return instance

    def choose_release_instance(
        self, avoided: Sequence[Instance], request: Request
    ) -> Instance | None:
        """Return an untried instance of the table to release KV blocks; None if there is none."""
        if not self._decodes.has_untried(avoided):
            return None
        return self._decodes.best_instance(avoided, balance=request.config.decode_balance)

    def _best(
        self, stage: Literal["prefill", "decode"], attempt: Attempt, worth: Worth | None
    ) -> Instance:
        """Return the best instance of the table for a stage, which may encode the items too.

        It is preferably that of the previous turn, or else one that has used the same items.
        """
        request, config = attempt.request, attempt.request.config
        before = None if request.turn is None else request.turn.before
        if stage == "prefill":
            choice, avoided = self._prefills, attempt.avoided_prefills
            balance, prefer = config.prefill_balance, before.prefill if before else None
        else:
            choice, avoided = self._decodes, attempt.avoided_decodes
            balance, prefer = config.decode_balance, before.decode if before else None
        encodes = stage == "prefill" or not attempt.needs_prefill
        by_items = encodes and attempt.course.consumer_encodes and balance not in BY_CONTENT
        items = [item.identity for item in request.items] if by_items else []
        if items:
            prefer = prefer or self._recent.nearest_url(items)
        instance = request.watched.choose_instance(
            stage,
            lambda fits: choice.among(fits).best_instance(
                avoided,
                balance=balance,
                session=request.session,
                prefix=attempt.prefix(balance),
                prefer=prefer,
                worth=worth,
            ),
        )
        if items:
            self._recent.record(items, instance.url)
        return instance

    def _at(self, address: str, hosts: Sequence[str]) -> Instance | None:
        """Return the decode instance at `host:port` or a URL; None if it is not allowed.

        Raises:
            ValueError: `address` is neither.
        """
        url = service_url(address)
        instance = self._table.find_instance(url, *ANSWERING)
        if instance is None and "://" not in address:
            instance = self._table.find_instance(url.replace("http:", "https:", 1), *ANSWERING)
        if instance is None and hosts and CLIENT_URL.fullmatch(url) and is_allowed(url, hosts):
            instance = Instance(Role.DECODE, url)
        return instance
