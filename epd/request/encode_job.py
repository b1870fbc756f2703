"""Encode stage of an attempt: its items, and the limits of all their tries."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ec_store.keys import EntryKey
from epd.api.body import dump_json
from epd.api.chat import TEMPLATE, has_system_message
from epd.api.items import MMItem
from epd.encoder_cache.identity import OutputKey
from epd.policies.policy import ItemPlace
from epd.request.attempt import Attempt

MAX_RETRIES = 32
"""Maximum number of further tries of one request's items together. The death of an instance fails
at most the items that are sent at the same time."""


@dataclass(eq=False)
class EncodeJob:
    """Items of one attempt, each of which needs an encoder output.

    The time of the stage begins with this object.

    Attributes:
        retries: number of further tries that are left.
    """

    attempt: Attempt
    retries: int = MAX_RETRIES
    _started_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline (`--encode-timeout-s`)."""
        limit_s = self.attempt.request.config.encode_timeout_s
        return max(0.0, self._started_s + limit_s - time.monotonic())

    @cached_property
    def has_all_media(self) -> bool:
        """Whether the request contains the media of all its items, so that all can be sent raw."""
        return all(item.has_media for item in self.attempt.request.items)

    @cached_property
    def may_leave(self) -> bool:
        """Whether prefill or decode may encode an item that no encode instance encodes.

        A consumer waits for all outputs that are pushed.
        """
        local = self.attempt.request.config.on_encode_failure == "local"
        return local and not self.attempt.target.pushed and self.has_all_media

    @cached_property
    def sharing(self) -> Hashable:
        """What requests must have in common to share an encode.

        They have the same Authorization and the same template, and all have a system message or
        none: a 401, or a refusal by a template, must not fail the others.
        """
        request, target = self.attempt.request, self.attempt.target
        body, authorization = request.body, request.headers.get("Authorization")
        fields = {name: body[name] for name in TEMPLATE if name in body}
        template = dump_json(fields) if fields else None
        system, reencode = has_system_message(body), self.attempt.reencode
        return target.place, authorization, template, system, reencode


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
