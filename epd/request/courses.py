"""Course of a request: its stages, as the coordination policies decide them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from epd.api.prompts import prompt_tokens
from epd.errors import NoInstance
from epd.policies.plan import Course, Facts
from epd.request.decoders import Decoders
from epd.request.recovery import Attempt
from epd.request.request import Request
from epd.routing.instances import ANSWERING
from epd.routing.table import InstanceTable

Coordinate = Callable[[Facts], tuple[str, Course] | None]
"""Returns the deciding policy and the course of a request; None if no policy decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Courses:
    """Choice of the stages that serve a request, by the coordination policies."""

    _table: InstanceTable
    _coordinate: Coordinate
    _decoders: Decoders

    def first_attempt(self, request: Request) -> Attempt:
        """Return the first attempt of a request, as the policies decide it.

        Its decode instance comes from the client's header only if the client sent it. An invalid
        header is rejected before any work for the request starts.

        Raises:
            NoInstance: no policy applies to the request.
            BadRequest: the header's value is invalid.
            RequestRefused: 403, the instance in the header is not allowed.
        """
        facts = Facts(
            request.endpoint.path,
            request.endpoint.can_prefill(request.body),
            len(request.items),
            self._table.roles,
            partial(prompt_tokens, request.body),
            request.client_headers,
        )
        if (decided := self._coordinate(facts)) is None:
            if facts.roles.isdisjoint(ANSWERING):
                raise NoInstance("there is no decode instance: register one", slug="no_decode")
            raise NoInstance("no policy decides where this request runs", slug="no_policy")
        policy, course = decided
        request.record.add_policy(policy)
        if course.decode_from == "header" and self._decoders.named_by_client(request) is None:
            course = course._replace(decode_from="table")
        return Attempt(course, facts)
