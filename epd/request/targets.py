"""Where a request runs: its stages, by the policies, and its decode instance.

The decode instance is chosen by the instance table, by the client or by an endpoint picker. A
picker is an HTTP service. The proxy sends it `{"model", "request_id", "endpoint", "prompt_tokens",
"items", "prefill", "candidates", "tried"}` by `POST`. The answer is `{"url": "http://host:port"}`
(docs/guides/policies.md).
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import orjson

from epd.api.items import Body
from epd.api.prompts import prompt_tokens
from epd.errors import (
    BadRequest,
    NoInstance,
    ProxyError,
    RequestRefused,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from epd.policies.plan import Course, Facts
from epd.request.context import RequestContext
from epd.request.recovery import Attempt
from epd.routing.balance import Choice
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.table import InstanceTable
from epd.routing.urls import is_allowed, service_url
from epd.state_log import StateLog
from epd.upstream import Upstream

Coordinate = Callable[[Facts], tuple[str, Course] | None]
"""Returns the deciding policy and the course of a request; None if no policy decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Courses:
    """Choice of the stages that serve a request, by the coordination policies."""

    _table: InstanceTable
    _coordinate: Coordinate

    def choose_course(
        self, body: Body, item_count: int, context: RequestContext
    ) -> tuple[Facts, Course]:
        """Return the facts of a request, and the course that the policies decide by them.

        The deciding policy is recorded in the context.

        Raises:
            NoInstance: no policy applies to the request.
        """
        facts = Facts(
            context.endpoint.path,
            context.endpoint.can_prefill(body),
            item_count,
            self._table.roles,
            partial(prompt_tokens, body),
            context.client_headers,
        )
        if (decided := self._coordinate(facts)) is not None:
            context.record.policy, course = decided
            return facts, course
        if facts.roles.isdisjoint(ANSWERING):
            raise NoInstance("there is no decode instance: register one", slug="no_decode")
        raise NoInstance("no policy decides where this request runs", slug="no_policy")


@dataclass(frozen=True, slots=True, eq=False)
class Picker:
    """Client of the configured endpoint picker."""

    _upstream: Upstream

    async def ask_picker(
        self,
        facts: Facts,
        context: RequestContext,
        prefill: Instance | None,
        candidates: Iterable[Instance],
        tried: Iterable[Instance],
    ) -> str:
        """Return the picker's choice: the base URL of an instance, or its `host:port`.

        `candidates` are the decode instances among which the proxy would choose; the `tried` ones
        have failed. The picker receives none of the client's headers.

        Raises:
            ProxyError: the picker failed, or its answer names no instance.
        """
        question = {
            "model": context.model,
            "request_id": context.request_id,
            "endpoint": facts.path,
            "prompt_tokens": facts.prompt_tokens,
            "items": facts.items,
            "prefill": None if prefill is None else prefill.url,
            "candidates": [instance.url for instance in candidates],
            "tried": [instance.url for instance in tried],
        }
        try:
            answer = await self._upstream.fetch(
                str(context.config.decode_picker_url),
                stage="decode",
                headers={"Content-Type": "application/json", "X-Request-Id": context.request_id},
                body=(orjson.dumps(question),),
                timeout_s=context.config.decode_picker_timeout_s,
            )
        # The messages of these errors name an instance.
        except UpstreamTimeout as error:
            raise _picker_failed("the endpoint picker did not answer in time") from error
        except UpstreamUnreachable as error:
            raise _picker_failed("the endpoint picker is unreachable") from error
        except UpstreamFailed as error:
            fault = "was cut off, is too large or has an unsupported encoding"
            raise _picker_failed(f"the endpoint picker's answer {fault}") from error
        if not answer.ok:
            raise _picker_failed(f"it answered {answer.status}")
        try:
            match orjson.loads(answer.body):
                case {"url": str() as url}:
                    return url
                case _:
                    raise _picker_failed("its answer has no url")
        except orjson.JSONDecodeError:
            raise _picker_failed("its answer is not JSON") from None


def _picker_failed(reason: str) -> ProxyError:
    return UpstreamFailed(reason, slug="decode_picker", stage="decode")


NAMED = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
"""Valid URLs of an instance outside the table. A URL with a path is rejected, and so is a host that
parsers could read in two ways."""


class Decoders:
    """Choice of the decode instance of each request.

    An instance that a client or a picker names must be in the table, or on a host of
    `--decode-hosts`: a client must not make the proxy connect to an arbitrary host.
    """

    def __init__(self, table: InstanceTable, picker: Picker) -> None:
        self._table = table
        self._picker = picker
        self._choice = Choice(table, *ANSWERING)
        self._complaint = StateLog("the endpoint picker cannot be used", "the proxy chooses")

    def resolve_header(self, course: Course, context: RequestContext) -> Course:
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

    async def pick_instance(
        self,
        attempt: Attempt,
        context: RequestContext,
        prefill: Instance | None = None,
        *,
        prefix: Prefix = NO_PREFIX,
    ) -> Instance:
        """Return the decode instance, if possible one that has not been tried.

        Raises:
            NoInstance: there is no decode instance.
            ProxyError: see `resolve_header`.
        """
        named: Instance | None = None
        if attempt.course.decode_from == "header":
            named = self._asked_for(context)
        elif attempt.course.decode_from == "picker":
            named = await self._picked(attempt, context, prefill)
        if named is not None:
            return named
        return context.watched.choose_instance(
            "decode",
            lambda fits: self._choice.best_instance(
                attempt.avoided_decodes,
                balance=context.config.decode_balance,
                session=context.session,
                prefix=prefix,
                prefer=None if context.turn is None else context.turn.prefers_decode,
                fits=fits,
            ),
        )

    def has_untried(self, course: Course, tried: Collection[Instance]) -> bool:
        """Return whether there is an eligible instance that has not been tried.

        A client's choice is not replaced. A picker may name instances outside the table.
        """
        if course.decode_from == "header":
            return False
        return course.decode_from == "picker" or self._choice.has_untried(tried)

    def choose_release_instance(
        self, tried: Collection[Instance], context: RequestContext
    ) -> Instance | None:
        """Return an untried instance of the table to release KV blocks; None if there is none."""
        if not self._choice.has_untried(tried):
            return None
        return self._choice.best_instance(tried, balance=context.config.decode_balance)

    def _asked_for(self, context: RequestContext) -> Instance | None:
        """Return the instance that the client names; None without the header."""
        header = context.config.decode_header
        value = context.client_headers.get(header)
        if value is None:
            if self._table.of_roles(*ANSWERING):
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
        usable = [candidate.instance for candidate in self._table.usable_candidates(*ANSWERING)]
        tried = attempt.avoided_decodes
        try:
            named = await self._picker.ask_picker(attempt.facts, context, prefill, usable, tried)
            found = self._at(named, context.config.decode_hosts)
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
