"""Where the missing items of a request are encoded: on instances, or by its consumer. No I/O.

The policy decides by the items' sizes, by the load and by the speeds of the instances
(`epd.policies.policy.ItemRule`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epd.policies.policy import ItemFacts, ItemPlace, ItemRule
from epd.request.encode_job import EncodeJob, MissingItem
from epd.routing.forecast import Forecast, consumer_load
from epd.routing.instances import Role
from epd.routing.store_access import StoreAccess
from epd.routing.table import InstanceTable
from epd.transfer.encoded import EncodedItem

REQUIRED = ItemPlace(at_consumer=False, reason="required")
"""Place of an item that a consumer must not encode: outputs are pushed, entries of the request may
be lost, or an item of the request has no media, so that no item may be sent with its media."""

BESIDE_STORED = ItemPlace(at_consumer=False, reason="beside_stored")
"""Place of an item beside one that is in the store. A consumer gets metadata only of all items of a
request or of none: it would have to preprocess the stored ones too."""

UNDER_WAY = ItemPlace(at_consumer=False, reason="under_way")
"""Place of an item that is being encoded for another request."""

OVERLOADED = ItemPlace(at_consumer=True, reason="overloaded")
"""Place of an item that no encode instance is expected to begin in time."""

AT_CONSUMER = ItemPlace(at_consumer=True, reason="no_encoder")
"""Place of an item if consumers encode all that is not in the store."""

OUT_OF_REACH = ItemPlace(at_consumer=True, reason="out_of_reach")
"""Place of an item that no encode instance could write where its consumer reads."""

FITS_SHARE = 0.75
"""Share of the time of an item's first try within which its encode must be predicted to begin."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Decisions about where the missing items of requests are encoded."""

    _table: InstanceTable
    _access: StoreAccess

    def place_items(
        self, job: EncodeJob, items: Sequence[MissingItem], hits: Iterable[EncodedItem] = ()
    ) -> Sequence[MissingItem]:
        """Return the missing items of a request in their places; `hits` are its other items."""
        if job.may_leave and self._is_out_of_reach(job):
            return [each._replace(place=OUT_OF_REACH) for each in items]
        course = job.attempt.course
        rule = course.items
        if rule is not None and (place := _forced_place(job, hits)) is not None:
            items = [each._replace(place=place) for each in items]
        elif rule is not None:
            items = self._apply_rule(job, rule, items)
        if not course.consumer_encodes and job.may_leave and not job.attempt.reencode:
            return self._shed(job, items)
        return items

    def _is_out_of_reach(self, job: EncodeJob) -> bool:
        """Return whether there are encode instances, but none that writes where the consumer reads.

        Then it gets the media, if it may encode them.
        """
        target, encoders = job.attempt.target, self._table.all(Role.ENCODE)
        fits, consumer_encodes = target.fits, job.attempt.course.consumer_encodes
        if target.consumer is None or fits is None or consumer_encodes:
            return False
        return bool(encoders) and not any(fits(encoder.instance) for encoder in encoders)

    def _apply_rule(
        self, job: EncodeJob, rule: ItemRule, items: Sequence[MissingItem]
    ) -> list[MissingItem]:
        """Place items by a rule. Each one then counts in the forecast of the next."""
        target = job.attempt.target
        forecast = Forecast(self._table, target.fits)
        consumer = None if target.consumer is None else target.consumer.instance
        requests, left_tokens = consumer_load(self._table, consumer)
        consumers_write = self._access.consumers_write()
        placed_items: list[MissingItem] = []
        for each in items:
            item, tokens = each.item, each.tokens
            if each.under_way:
                placed_items.append(each._replace(place=UNDER_WAY))
                continue
            queue = forecast.best_queue(tokens, item.identity)
            measured = queue is not None and forecast.token_s is not None
            token_s = queue.token_s if queue is not None else 0.0
            place = rule.place_item(
                ItemFacts(
                    modality=item.modality,
                    pixels=item.pixels,
                    tokens=tokens,
                    stored=consumers_write and each.entry_key is not None,
                    encode_s=queue.finish_s(tokens) if queue is not None and measured else None,
                    own_s=tokens * token_s,
                    consumer_queue_s=left_tokens * token_s,
                    consumer_requests=requests,
                )
            )
            first_url = None
            if place.at_consumer:
                left_tokens += tokens
            elif queue is not None:
                queue.add_item(tokens)
                if measured and place.soonest:
                    first_url = queue.instance.url
            placed_items.append(each._replace(place=place, first_url=first_url))
        return placed_items

    def _shed(self, job: EncodeJob, items: Sequence[MissingItem]) -> Sequence[MissingItem]:
        """Leave the items to the consumer for which the queue of every encode instance is too long.

        A first try has half of `--encode-timeout-s` if there are several instances. Predictions
        err: a queue that just fits would be cut off again and again. The item's own time does not
        count: by the speed of icons no photo is encoded in time, and an instance without photos
        never teaches a better one.
        """
        tokens = sum([each.tokens for each in items if not each.at_consumer])
        if not tokens:
            return items
        forecast = Forecast(self._table, job.attempt.target.fits)
        timeout_s = job.attempt.request.config.encode_timeout_s
        limit_s = FITS_SHARE * timeout_s / (2 if forecast.several else 1)
        if forecast.longest_s(tokens) <= limit_s:
            return items
        placed_items: list[MissingItem] = []
        for each in items:
            place = each.place
            queue = forecast.best_queue(each.tokens, each.item.identity)
            if queue is not None and not (each.at_consumer or each.under_way):
                if queue.finish_s(0) > limit_s:  # the items before it
                    place = OVERLOADED
                else:
                    queue.add_item(each.tokens)
            placed_items.append(each._replace(place=place))
        return placed_items


def _forced_place(job: EncodeJob, hits: Iterable[EncodedItem]) -> ItemPlace | None:
    """Return the place of all items of a request that gives the policy no choice."""
    attempt = job.attempt
    if attempt.target.pushed or attempt.reencode or not job.has_all_media:
        return REQUIRED
    shrinks = attempt.request.config.decode_media == "metadata"
    if shrinks and any(hit.facts.metadata for hit in hits):
        return BESIDE_STORED
    return None
