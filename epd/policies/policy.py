"""Interface of a coordination policy, which gets `Facts` and returns a `Course`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from epd.routing.instances import Role

DecodeFrom = Literal["table", "header"]
"""The origin of the decode instance's choice: the proxy's own table, or the client's header."""


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
        """The estimated number of tokens in its text (`epd.api.prompts`)."""
        return self.measure()


@dataclass(frozen=True, slots=True)
class ItemFacts:
    """The known facts about a media item that is not in the store.

    Attributes:
        modality: `image`, `audio` or `video`.
        pixels: number of a picture's pixels by its header; 0 if unknown.
        tokens: predicted number of its encoder tokens.
        stored: whether the store will have its encoder output if a consumer encodes it.
        encode_s: predicted seconds until an encode instance has encoded it, with its queue; None if
            the speed of all encode instances is unknown.
        own_s: the part of `encode_s` for the item's own tokens.
        consumer_queue_s: predicted seconds of the encodes before it at the consumer, at the same
            speed.
        consumer_requests: number of requests that wait or run at the consumer.
    """

    modality: str
    pixels: int
    tokens: int
    stored: bool
    encode_s: float | None
    own_s: float
    consumer_queue_s: float
    consumer_requests: float


class ItemPlace(NamedTuple):
    """The place where a media item is encoded.

    Attributes:
        at_consumer: whether prefill or decode encodes it, and not an encode instance.
        reason: reason, a label of metrics; one of few.
        soonest: whether it is encoded by the encode instance with the shortest predicted time, and
            not by the one that `--encode-balance` chooses.
    """

    at_consumer: bool
    reason: str
    soonest: bool = False

    @property
    def labels(self) -> tuple[str, str]:
        """The place, `local` or `encode`, and the reason, as metrics name them."""
        return "local" if self.at_consumer else "encode", self.reason


class ItemRule(Protocol):
    """Decides where the items of a request are encoded that are not in the store."""

    def place_item(self, facts: ItemFacts) -> ItemPlace:
        """Return the place of an item. It is called on the event loop: it must return at once."""


class Course(NamedTuple):
    """The stages of one request.

    Attributes:
        encode: whether its media go through the encode stage; else prefill or decode encode them.
        prefill: whether a prefill instance does prefill's part; else decode does both.
        prefill_url: URL of the only eligible prefill instance; None for any.
        items: decides which items the encode stage leaves to prefill or decode; None for none.
        consumer_encodes: whether prefill or decode encodes all items that are not in the store, and
            writes them to it.
    """

    encode: bool = True
    prefill: bool = True
    prefill_url: str | None = None
    items: ItemRule | None = None
    consumer_encodes: bool = False


class Policy(Protocol):
    """Decides the course of the requests to which it applies.

    A policy is a dataclass. Its fields have defaults; those with the name of a setting have its
    value.
    """

    def course(self, facts: Facts) -> Course | None:
        """Return the stages of a request; None if the policy does not apply to it.

        It is called for each request, on the event loop: it must return at once. It is also called
        when it takes effect, with sample requests (`epd.policies.registry`).
        """
