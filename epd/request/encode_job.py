"""Encode stage of a request: its items, and the limits of all their tries."""

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.api.body import dump_json
from epd.api.chat import TEMPLATE, has_system_message
from epd.api.items import MMItem
from epd.encoder_cache.identity import OutputKey
from epd.policies.policy import Course, ItemPlace
from epd.request.request import Request
from epd.routing.host_report import Host
from epd.routing.table import Reservation

MAX_RETRIES = 32
"""Maximum number of further tries of one request's items together. The death of an instance fails
at most the items that are sent at the same time."""


@dataclass(eq=False)
class EncodeJob:
    """Items of one request, each of which needs an encoder output.

    The time of the stage begins with this object.

    Attributes:
        consumer_reservation: reservation of the instance that gets the outputs, if chosen early.
        namespace: namespace of the consumer, if known.
        host: server of the consumer's host, if each host has a memory and it is known.
        found: entries that the memory of that host has; None if it was not asked.
        reencode: whether to ignore stored outputs, because a consumer could not load them.
        repeated: whether the items were encoded for an earlier attempt. The request still has the
            claims of that attempt, so it must not wait for a request that may need them.
        retries: number of further tries that are left.
    """

    request: Request
    course: Course = field(default_factory=Course)
    consumer_reservation: Reservation | None = None
    namespace: str | None = None
    reencode: bool = False
    repeated: bool = False
    host: Host | None = None
    found: Mapping[EntryKey, EntryInfo] | None = None
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
    def sharing(self) -> Hashable:
        """What requests must have in common to share an encode.

        They have the same Authorization and the same template, and all have a system message or
        none: a 401, or a refusal by a template, must not fail the others.
        """
        body, authorization = self.request.body, self.request.headers.get("Authorization")
        fields = {name: body[name] for name in TEMPLATE if name in body}
        template = dump_json(fields) if fields else None
        place = self.namespace, None if self.host is None else self.host.address
        return place, authorization, template, has_system_message(body), self.reencode


class MissingItem(NamedTuple):
    """Item of a request without an output in the store.

    Attributes:
        output_key: the output that it needs; None if an engine makes the item's key.
        entry_key: key of its entry; None if requests cannot wait for it in the store.
    """

    item: MMItem
    output_key: OutputKey | None = None
    entry_key: EntryKey | None = None


class PlacedItem(NamedTuple):
    """Missing item, with the place where it is encoded.

    Attributes:
        tokens: predicted number of its encoder tokens.
        under_way: whether another request or another proxy is making its output.
        place: where it is encoded; None without a policy that decides.
        first_url: URL of the encode instance that should encode it; None for any.
    """

    missing: MissingItem
    tokens: int
    under_way: bool = False
    place: ItemPlace | None = None
    first_url: str | None = None

    @property
    def at_consumer(self) -> bool:
        """Whether prefill or decode encodes it."""
        return self.place is not None and self.place.at_consumer
