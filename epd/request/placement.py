"""Where the items of a request are encoded: on encode instances, or by its consumer. No I/O.

It is decided in three steps: for the whole request (`Placement.skips_encode`), for each item that
is not in the store (`Placement.place_items`), and after the encode of an item has failed
(`Placement.may_leave`). In the second step the policy decides by the items' sizes, by the load
and by the speeds of the instances (`epd.policies.policy.ItemRule`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from epd.api.items import MMItem
from epd.policies.policy import ItemFacts, ItemPlace, ItemRule
from epd.request.encode_job import EncodeJob, PlacedItem
from epd.request.item_tokens import TokenCounts
from epd.routing.forecast import Forecast
from epd.routing.host_report import Host
from epd.routing.hosts import InstanceHosts
from epd.routing.instances import Instance, Role
from epd.routing.namespaces import Namespaces
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
"""Place of an item that no encode instance is expected to encode in time."""

AT_CONSUMER = ItemPlace(at_consumer=True, reason="no_encoder")
"""Place of an item if consumers encode all that is not in the store."""

OUT_OF_REACH = ItemPlace(at_consumer=True, reason="out_of_reach")
"""Place of an item that no encode instance in reach of its consumer's host could encode."""

FITS_SHARE = 0.75
"""Share of the time of an item's first try within which its encode must be predicted to end."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Decisions about where the items of requests are encoded.

    If outputs are pushed, consumers wait for the encoder output of every item. `_hosts` is None if
    all instances have one store.
    """

    _table: InstanceTable
    _namespaces: Namespaces
    _token_counts: TokenCounts
    _pushed: bool
    _hosts: InstanceHosts | None = None

    def skips_encode(self, job: EncodeJob) -> bool:
        """Return whether all items go to their consumer with their media.

        They do if the policies or the endpoint have no encode stage, or if outputs are pushed but
        no consumer can receive them.
        """
        no_receiver = self._pushed and job.consumer_reservation is None
        return not (job.course.encode and job.request.endpoint.encodes) or no_receiver

    def may_leave(self, job: EncodeJob) -> bool:
        """Return whether prefill or decode may encode an item that no encode instance encodes.

        They may only if all items of the request have media.
        """
        allowed = job.request.config.on_encode_failure == "local" and not self._pushed
        return allowed and job.has_all_media

    def fits(self, job: EncodeJob) -> Callable[[Instance], bool] | None:
        """Return the predicate of the instances with the consumer's namespace and within its reach.

        None: all instances are.
        """
        if self._hosts is not None and self._by_host(job):
            return partial(self.reaches, job)
        if job.namespace is None:
            return None
        return partial(self._namespaces.shares_namespace, namespace=job.namespace)

    def _by_host(self, job: EncodeJob) -> bool:
        """Return whether the consumer reads the outputs of some instances alone."""
        return self._hosts is not None and job.consumer_reservation is not None

    def reaches(self, job: EncodeJob, instance: Instance) -> bool:
        """Return whether the consumer can read what an instance writes: at its host, or by a tier.

        An instance or a consumer without a known server is out of reach: the consumer would wait
        for an entry that does not come.
        """
        if not self._namespaces.shares_namespace(instance, job.namespace):
            return False
        if self._hosts is None or not self._by_host(job):
            return True
        return self._hosts.reaches(instance, job.host)

    def is_at(self, host: Host, instance: Instance) -> bool:
        """Return whether an instance is on a host: a consumer there needs no tier."""
        own = None if self._hosts is None else self._hosts.host_of(instance)
        return own is not None and own.address == host.address

    def place_items(
        self, job: EncodeJob, items: Sequence[PlacedItem], hits: Iterable[EncodedItem] = ()
    ) -> Sequence[PlacedItem]:
        """Return the missing items of a request in their places; `hits` are its other items."""
        by_host = self._hosts is not None and not job.course.consumer_encodes
        if by_host and self._is_out_of_reach(job):
            return [each._replace(place=OUT_OF_REACH) for each in items]
        rule = job.course.items
        if rule is not None and (forced := self._forced_place(job, hits)) is not None:
            items = [each._replace(place=forced) for each in items]
        elif rule is not None:
            items = self._apply_rule(job, rule, items)
        if not job.course.consumer_encodes and self.may_leave(job) and not job.reencode:
            return self._shed(job, items)
        return items

    def predict_tokens(self, job: EncodeJob, item: MMItem) -> int:
        model = job.request.body.get("model")
        return self._token_counts.predict_tokens(model, item.modality, item.pixels)

    def _is_out_of_reach(self, job: EncodeJob) -> bool:
        """Return whether there are encode instances, but none that writes where the consumer reads.

        Then it gets the media, if it may encode them.
        """
        encoders = self._table.all(Role.ENCODE)
        return bool(
            self._by_host(job)
            and encoders
            and self.may_leave(job)
            and not any(self.reaches(job, candidate.instance) for candidate in encoders)
        )

    def _apply_rule(
        self, job: EncodeJob, rule: ItemRule, items: Sequence[PlacedItem]
    ) -> list[PlacedItem]:
        """Place items by a rule. Each one then counts in the forecast of the next."""
        forecast = self._forecast(job)
        consumers_write = self._namespaces.consumers_write()
        placed: list[PlacedItem] = []
        for each in items:
            (item, _, entry_key), tokens = each.missing, each.tokens
            if each.under_way:
                placed.append(each._replace(place=UNDER_WAY))
                continue
            queue = forecast.best_queue(tokens, item.identity)
            measured = queue is not None and forecast.speed is not None
            token_s = queue.speed.token_s if queue is not None else 0.0
            place = rule.place_item(
                ItemFacts(
                    modality=item.modality,
                    pixels=item.pixels,
                    tokens=tokens,
                    stored=consumers_write and entry_key is not None,
                    encode_s=queue.finish_s(tokens) if queue is not None and measured else None,
                    own_s=tokens * token_s,
                    consumer_queue_s=forecast.consumer_tokens * token_s,
                    consumer_requests=forecast.consumer_requests,
                )
            )
            first_url = None
            if place.at_consumer:
                forecast.leave_item(tokens)
            elif queue is not None:
                queue.add_item(tokens)
                if measured and place.soonest:
                    first_url = queue.instance.url
            placed.append(each._replace(place=place, first_url=first_url))
        return placed

    def _forced_place(self, job: EncodeJob, hits: Iterable[EncodedItem]) -> ItemPlace | None:
        """Return the place of all items of a request that gives the policy no choice."""
        if self._pushed or job.reencode or not job.has_all_media:
            return REQUIRED
        shrinks = job.request.config.decode_media == "metadata"
        if shrinks and any(hit.facts.metadata for hit in hits):
            return BESIDE_STORED
        return None

    def _shed(self, job: EncodeJob, items: Sequence[PlacedItem]) -> Sequence[PlacedItem]:
        """Leave the items to the consumer that no encode instance is expected to encode in time.

        A first try has half of `--encode-timeout-s` if there are several instances. Predictions
        err: a queue that just fits would be cut off again and again.
        """
        tokens = sum([each.tokens for each in items if not each.at_consumer])
        if not tokens:
            return items
        forecast = self._forecast(job)
        timeout_s = job.request.config.encode_timeout_s
        limit_s = FITS_SHARE * timeout_s / (2 if forecast.several else 1)
        if forecast.longest_s(tokens) <= limit_s:
            return items
        placed: list[PlacedItem] = []
        for each in items:
            place = each.place
            queue = forecast.best_queue(each.tokens, each.missing.item.identity)
            if queue is not None and not (each.at_consumer or each.under_way):
                if queue.finish_s(each.tokens) > limit_s:
                    place = OVERLOADED
                else:
                    queue.add_item(each.tokens)
            placed.append(each._replace(place=place))
        return placed

    def _forecast(self, job: EncodeJob) -> Forecast:
        consumer = None if job.consumer_reservation is None else job.consumer_reservation.instance
        return Forecast(self._table, consumer, self.fits(job))
