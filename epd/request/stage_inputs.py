"""Inputs of the encode stage of a request. No I/O."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from epd.api.body import dump_json
from epd.api.items import MM_KWARGS, MMItem
from epd.encoder_cache.identity import OutputKey
from epd.policies.plan import Course, ItemPlace
from epd.request.request import Request
from epd.routing.table import Reservation
from epd.transfer.encoded import OutputFacts


class ItemPlan(NamedTuple):
    """Plan for one item that is not in the store.

    Attributes:
        tokens: predicted number of its encoder tokens.
        place: where it is encoded; None without a policy that decides.
        instance: URL of the encode instance that is expected to encode it first; None if unknown.
    """

    tokens: int
    place: ItemPlace | None = None
    instance: str | None = None

    @property
    def at_consumer(self) -> bool:
        """Whether prefill or decode encodes it."""
        return self.place is not None and self.place.local


class StoreLookup(NamedTuple):
    """Lookup of a request's items in the store.

    Attributes:
        output_keys: the output that each item needs; None if an engine makes the item's key.
        identifiers: store keys of the items, as far as they are known and looked up.
        answered: False if there is no store, or if it failed to answer.
        found: stored outputs, by item.
        is_encoded_elsewhere: returns whether another request or proxy encodes the item with this
            store key, as far as known.
    """

    output_keys: Mapping[MMItem, OutputKey | None] = {}
    identifiers: Mapping[MMItem, str] = {}
    answered: bool = False
    found: Mapping[MMItem, OutputFacts] = {}
    is_encoded_elsewhere: Callable[[str], bool] = lambda _: False


class EncodeJob(NamedTuple):
    """Items of one request, each of which needs an encoder output.

    Attributes:
        consumer_reservation: reservation of the instance that gets the outputs, if chosen early.
        namespace: namespace of the consumer, if known.
        reencode: whether to ignore stored outputs, because a consumer could not load them.
    """

    request: Request
    course: Course = Course()
    consumer_reservation: Reservation | None = None
    namespace: str | None = None
    reencode: bool = False

    @property
    def has_all_media(self) -> bool:
        """Whether the request contains the media of all its items, so that all can be sent raw."""
        return all(item.has_media for item in self.request.items)

    def output_key(self, item: MMItem) -> OutputKey | None:
        """Return the output that an item needs; None if an engine makes the item's key."""
        body = self.request.body
        if item.content_key is None:
            return None
        kwargs = {name: body[name] for name in MM_KWARGS if body.get(name)}
        encoded = dump_json(kwargs, sort_keys=True) if kwargs else b""
        model = body.get("model")
        model = model if isinstance(model, str) else None
        return OutputKey(model, item.content_key, item.is_named, encoded)

    def skips_claims(self, lookup: StoreLookup) -> bool:
        """Return whether to ignore claims: outputs are unusable, or the store does not answer."""
        return self.reencode or not lookup.answered
