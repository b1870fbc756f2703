"""What a coordination policy decides by, and what it decides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from epd.routing.instances import Role

DecodeChoice = Literal["late", "early"]
"""When the decode instance is chosen: once prefill has answered, or before it is asked."""

DecodeFrom = Literal["table", "header", "picker"]
"""Who names the decode instance: the proxy's own table, the client's header, or an endpoint picker
that is asked over HTTP."""


@dataclass(frozen=True)
class Facts:
    """What is known of a request, and of the fleet, before anything is sent.

    Attributes:
        path: the endpoint's route.
        prefills: whether prefill can do its part of it.
        items: how many media items it has.
        roles: of which there are instances.
        measure: estimates how many tokens its text is; asked at most once.
        headers: the client's headers, by name in any case.
    """

    path: str
    prefills: bool
    items: int
    roles: frozenset[Role]
    measure: Callable[[], int] = lambda: 0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def prompt_tokens(self) -> int:
        """About how many tokens its text is (`epd.bodies.prompt`)."""
        return self.measure()


class Course(NamedTuple):
    """What runs for one request.

    Attributes:
        encode: whether its media go through the encode stage; else prefill or decode encode them.
        prefill: whether a prefill instance does prefill's part; else decode does both.
        prefill_url: the one prefill instance that may; None: any.
        decode_from: who names the decode instance; None: whom the policy's options say.
        decode_choice: when it is chosen; None: when the policy's options say.
    """

    encode: bool = True
    prefill: bool = True
    prefill_url: str | None = None
    decode_from: DecodeFrom | None = None
    decode_choice: DecodeChoice | None = None


class Policy(Protocol):
    """Decides for the requests that are its own.

    A policy is a dataclass: its fields are its options.
    """

    def course(self, facts: Facts) -> Course | None:
        """What runs for a request; None: this policy has nothing to say of it.

        It is asked on each request's way, on the event loop: it must return at once. And when it
        comes into force, of requests that nobody has sent (`epd.policies.suited`).
        """
