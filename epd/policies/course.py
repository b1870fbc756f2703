"""What a coordination policy decides by, and what it decides."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from epd.routing.instances import Role

DecodeFrom = Literal["table", "header", "picker"]
"""Who names the decode instance: the proxy's own table, the client's header, or an endpoint picker
that is asked over HTTP."""


class Facts(NamedTuple):
    """What is known of a request, and of the fleet, before anything is sent.

    Attributes:
        path: the endpoint's route.
        prefills: whether prefill can do its part of it.
        items: how many media items it has.
        prompt_tokens: about how many tokens its text is.
        roles: of which there are instances.
        headers: the client's headers that policies may go by, names in lower case.
    """

    path: str
    prefills: bool
    items: int
    prompt_tokens: int
    roles: frozenset[Role]
    headers: Mapping[str, str] = {}


class Course(NamedTuple):
    """What runs for one request.

    Attributes:
        encode: whether its media go through the encode stage; else prefill or decode encode them.
        prefill: whether a prefill instance does prefill's part; else decode does both.
        prefill_url: the one prefill instance that may; None: any.
        decode_from: who names the decode instance.
        eager: whether decode is chosen before prefill is asked.
    """

    encode: bool = True
    prefill: bool = True
    prefill_url: str | None = None
    decode_from: DecodeFrom = "table"
    eager: bool = False


class Policy(Protocol):
    """Decides for the requests that are its own."""

    def course(self, facts: Facts) -> Course | None:
        """What runs for a request; None: this policy has nothing to say of it."""
