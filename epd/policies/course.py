"""The input and the result of a coordination policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from epd.routing.instances import Role

DecodeChoice = Literal["late", "early"]
"""When the decode instance is chosen: after prefill has answered, or before it is asked."""

DecodeFrom = Literal["table", "header", "picker"]
"""The origin of the decode instance's choice: the proxy's own table, the client's header, or an
endpoint picker over HTTP."""


@dataclass(frozen=True)
class Facts:
    """The known facts about a request and the fleet before any sending.

    Attributes:
        path: route of the endpoint.
        prefills: whether a prefill instance can serve its part of the request.
        items: number of media items.
        roles: roles with at least one instance.
        measure: estimates the number of tokens in its text; called at most once.
        headers: headers of the client, case-insensitive.
    """

    path: str
    prefills: bool
    items: int
    roles: frozenset[Role]
    measure: Callable[[], int] = lambda: 0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def prompt_tokens(self) -> int:
        """The estimated number of tokens in its text (`epd.bodies.prompt`)."""
        return self.measure()


class Course(NamedTuple):
    """The stages of one request.

    Attributes:
        encode: whether its media go through the encode stage; else prefill or decode encode them.
        prefill: whether a prefill instance does prefill's part; else decode does both.
        prefill_url: URL of the only eligible prefill instance; None for any.
        decode_from: origin of the decode instance's choice; None for the policy's option.
        decode_choice: when decode is chosen; None for the policy's option.
    """

    encode: bool = True
    prefill: bool = True
    prefill_url: str | None = None
    decode_from: DecodeFrom | None = None
    decode_choice: DecodeChoice | None = None


class Policy(Protocol):
    """Decides the course of the requests to which it applies.

    A policy is a dataclass. Its fields are its options.
    """

    def course(self, facts: Facts) -> Course | None:
        """Return the stages of a request; None if the policy does not apply to it.

        It is called for each request, on the event loop: it must return at once. It is also called
        when it takes effect, with sample requests (`epd.policies.suited`).
        """
