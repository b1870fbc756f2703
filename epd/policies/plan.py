"""Interface of a coordination policy, and the policies of this project.

A policy gets `Facts` and returns a `Course`. Most policies select the stages by the roles of the
fleet. Of the others, one is for requests that are cheaper on one instance (conditional
disaggregation), one for a proxy beside a prefill instance, such as a sidecar of its pod, and one
for media items that are cheaper to encode where they are consumed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from epd.routing.instances import ANSWERING, Role

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

    @property
    def kind(self) -> tuple[bool, bool, frozenset[Role]]:
        """Whether prefill can serve it, whether it has media, and the roles with instances."""
        return self.prefills, self.items > 0, self.roles

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


@dataclass(frozen=True, slots=True)
class EncodePrefillDecode:
    """Sends media to encode instances, then prefills, then decodes (E+P+D).

    A request that prefill cannot serve goes to decode alone, with its media: decode reads no
    encoder outputs.
    """

    def course(self, facts: Facts) -> Course | None:
        if Role.DECODE not in facts.roles:
            return None
        return Course(encode=facts.prefills, prefill=facts.prefills)


@dataclass(frozen=True, slots=True)
class EncodePD:
    """Sends media to encode instances; one instance prefills and decodes (E+PD)."""

    def course(self, facts: Facts) -> Course | None:
        return Course(prefill=False) if Role.PREFILL_DECODE in facts.roles else None


def _usual_course(facts: Facts) -> Course | None:
    return EncodePrefillDecode().course(facts) or EncodePD().course(facts)


@dataclass(frozen=True, slots=True)
class PrefillDecode:
    """Skips the encode stage: prefill gets the media as received (P+D), or the PD instance does."""

    def course(self, facts: Facts) -> Course | None:
        if facts.roles.isdisjoint(ANSWERING):
            return None
        return Course(encode=False, prefill=facts.prefills and Role.DECODE in facts.roles)


@dataclass(frozen=True, slots=True)
class EncodeLocal:
    """Leaves media that are not in the store to prefill or PD, which writes them to the store.

    It is for fleets without encode instances, of engines with `ec_role` `ec_both`.
    """

    def course(self, facts: Facts) -> Course | None:
        usual = _usual_course(facts)
        return usual and usual._replace(consumer_encodes=True)


@dataclass(frozen=True, slots=True)
class PrefillLocalDecodeRemote:
    """Prefills on the instance beside the proxy, and decodes on another host.

    A request that prefill cannot serve goes to decode alone, with its media.

    Attributes:
        local_prefill_url: URL of the instance beside the proxy.

    Raises:
        ValueError: the URL is missing.
    """

    local_prefill_url: str | None = None

    def __post_init__(self) -> None:
        if not self.local_prefill_url:
            raise ValueError("needs local_prefill_url, or a prefill instance in the configuration")

    def course(self, facts: Facts) -> Course | None:
        if Role.DECODE not in facts.roles:
            return None
        encode = facts.prefills and Role.ENCODE in facts.roles
        return Course(encode, prefill=facts.prefills, prefill_url=self.local_prefill_url)


@dataclass(frozen=True, slots=True)
class PDOnly:
    """Serves a request on one instance if its prompt is short or has only text.

    It does not apply to requests with media, which need more work before decode.

    Attributes:
        skip_prefill_below_tokens: number of tokens below which a prompt is short; 0 for never.
        skip_prefill_for_text: whether it applies to all prompts of text, regardless of length.

    Raises:
        ValueError: no request could match the options.
    """

    skip_prefill_below_tokens: int = 0
    skip_prefill_for_text: bool = False

    def __post_init__(self) -> None:
        if not self.skip_prefill_below_tokens and not self.skip_prefill_for_text:
            raise ValueError(
                "does nothing without skip_prefill_below_tokens or skip_prefill_for_text"
            )

    def course(self, facts: Facts) -> Course | None:
        if facts.items or facts.roles.isdisjoint(ANSWERING):
            return None
        if self.skip_prefill_for_text or facts.prompt_tokens < self.skip_prefill_below_tokens:
            return Course(encode=False, prefill=False)
        return None


@dataclass(frozen=True, slots=True)
class Cost:
    """Leaves a media item to prefill or PD if that costs less than an encode instance.

    The stages are those of `encode_prefill_decode` or `encode_pd`. The cost is the sum of the
    delays of all requests: on an encode instance, the time until the item is encoded. At a
    consumer, the time of the encode there, once for the request and once for each other request at
    that instance, because an engine's step with an encode delays all of them.

    Attributes:
        encode_below_pixels: number of pixels below which a picture is left to prefill or PD; all
            other items are encoded by encode instances. 0 to compare the costs.
    """

    encode_below_pixels: int = 0

    def course(self, facts: Facts) -> Course | None:
        usual = _usual_course(facts)
        return usual and usual._replace(items=self)

    def place_item(self, facts: ItemFacts) -> ItemPlace:
        if not facts.stored:
            return ItemPlace(at_consumer=False, reason="unsaved")
        if self.encode_below_pixels:
            if not facts.pixels:
                return ItemPlace(at_consumer=False, reason="unknown_size")
            small = facts.pixels < self.encode_below_pixels
            return ItemPlace(small, "below_pixels" if small else "above_pixels")
        if facts.encode_s is None:
            return ItemPlace(at_consumer=False, reason="unmeasured")
        consumer_s = facts.consumer_queue_s + facts.own_s * (1 + facts.consumer_requests)
        return ItemPlace(consumer_s <= facts.encode_s, "cheaper", soonest=True)
