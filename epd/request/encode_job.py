"""Encode stage of a request: where its outputs go, its items, and the limits of all their tries."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.api.body import dump_json
from epd.api.chat import TEMPLATE, has_system_message
from epd.api.items import MMItem
from epd.encoder_cache.identity import OutputKey
from epd.policies.policy import Course, ItemPlace
from epd.request.attempt import Place
from epd.request.request import Request
from epd.routing.instances import CONSUMERS, Instance
from epd.routing.reports import Host
from epd.routing.table import Reservation

if TYPE_CHECKING:
    from epd.encoder_cache.claims import Claims

MAX_RETRIES = 32
"""Maximum number of further tries of one request's items together. The death of an instance fails
at most the items that are sent at the same time."""


class Target(NamedTuple):
    """Receiver of a request's encoder outputs, as far as it is known before the encode.

    Attributes:
        first: place at the instance that computes the prompt; None if it is chosen later.
        namespace: namespace in which the consumer looks up outputs; None if unknown.
        host: server of the consumer's host, if each host has a memory; None if unknown.
        fits: predicate of the instances that write where the consumer reads; None: all do.
        claims: claims in the store that the consumer reads; None without one.
        found: entries that the memory of that host has; None if it was not asked.
    """

    first: Reservation | None = None
    namespace: str | None = None
    host: Host | None = None
    fits: Callable[[Instance], bool] | None = None
    claims: "Claims | None" = None
    found: Mapping[EntryKey, EntryInfo] | None = None

    @property
    def consumer(self) -> Reservation | None:
        """The place at that instance, if it reads encoder outputs."""
        reads = self.first is not None and self.first.instance.role in CONSUMERS
        return self.first if reads else None

    @property
    def place(self) -> Place:
        return self.namespace, None if self.host is None else self.host.address

    def reads(self, place: Place | None) -> bool:
        """Return whether outputs made for a place are usable; on any host without a consumer."""
        if place is None or self.consumer is not None:
            return self.place == place
        return self.namespace == place[0]


@dataclass(eq=False)
class EncodeJob:
    """Items of one attempt, each of which needs an encoder output.

    The time of the stage begins with this object.

    Attributes:
        reencode: whether to ignore stored outputs, because a consumer could not load them.
        pushed: whether instances push outputs to the consumer, and do not store them.
        retries: number of further tries that are left.
    """

    request: Request
    course: Course
    target: Target = field(default_factory=Target)
    pushed: bool = False
    reencode: bool = False
    retries: int = MAX_RETRIES
    _started_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline (`--encode-timeout-s`)."""
        limit_s = self.request.config.encode_timeout_s
        return max(0.0, self._started_s + limit_s - time.monotonic())

    @cached_property
    def has_all_media(self) -> bool:
        """Whether the request contains the media of all its items, so that all can be sent raw."""
        return all(item.has_media for item in self.request.items)

    @cached_property
    def may_leave(self) -> bool:
        """Whether prefill or decode may encode an item that no encode instance encodes.

        A consumer waits for all outputs that are pushed.
        """
        allowed = self.request.config.on_encode_failure == "local" and not self.pushed
        return allowed and self.has_all_media

    @cached_property
    def sharing(self) -> Hashable:
        """What requests must have in common to share an encode.

        They have the same Authorization and the same template, and all have a system message or
        none: a 401, or a refusal by a template, must not fail the others.
        """
        body, authorization = self.request.body, self.request.headers.get("Authorization")
        fields = {name: body[name] for name in TEMPLATE if name in body}
        template = dump_json(fields) if fields else None
        place = self.target.place
        return place, authorization, template, has_system_message(body), self.reencode


class MissingItem(NamedTuple):
    """Item of a request without an output in the store, and the place where it is encoded.

    Attributes:
        output_key: the output that it needs; None if an engine makes the item's key.
        entry_key: key of its entry; None if requests cannot wait for it in the store.
        tokens: predicted number of its encoder tokens.
        under_way: whether another request or another proxy is making its output.
        place: where it is encoded; None without a policy that decides.
        first_url: URL of the encode instance that should encode it; None for any.
    """

    item: MMItem
    output_key: OutputKey | None = None
    entry_key: EntryKey | None = None
    tokens: int = 0
    under_way: bool = False
    place: ItemPlace | None = None
    first_url: str | None = None

    @property
    def at_consumer(self) -> bool:
        """Whether prefill or decode encodes it."""
        return self.place is not None and self.place.at_consumer
