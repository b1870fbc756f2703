"""Where the items of a request are encoded: on encode instances, or by its consumer. No I/O.

It is decided in three steps: for the whole request (`Placement.skips_encode`), for each item that
is not in the store (`Placement.plan_items`), and after the encode of an item has failed
(`Placement.may_fall_back`). In the second step the policy decides by the items' sizes, by the load
and by the speeds of the instances (`epd.policies.plan.ItemRule`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from epd.api.items import MMItem
from epd.errors import ProxyError
from epd.policies.plan import ItemFacts, ItemPlace, ItemRule
from epd.request.item_tokens import TokenCounts
from epd.request.stage_inputs import EncodeJob, ItemPlan, StoreLookup
from epd.routing.forecast import Forecast
from epd.routing.namespaces import Namespaces
from epd.routing.table import InstanceTable

REQUIRED = ItemPlace(local=False, reason="required")
"""Place of an item that a consumer must not encode: outputs are pushed, entries of the request may
be lost, or an item of the request has no media, so that no item may be sent with its media."""

BESIDE_STORED = ItemPlace(local=False, reason="beside_stored")
"""Place of an item beside one that is in the store. A consumer gets metadata only of all items of a
request or of none: it would have to preprocess the stored ones too."""

UNDER_WAY = ItemPlace(local=False, reason="under_way")
"""Place of an item that is being encoded for another request."""


OVERLOADED = ItemPlace(local=True, reason="overloaded")
"""Place of an item that no encode instance is expected to encode in time."""


FITS_SHARE = 0.75
"""Share of the time of an item's first try within which its encode must be predicted to end."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Decisions about where the items of requests are encoded.

    If outputs are pushed, consumers wait for the encoder output of every item.
    """

    _table: InstanceTable
    _namespaces: Namespaces
    _token_counts: TokenCounts
    _pushed: bool

    def skips_encode(self, job: EncodeJob) -> bool:
        """Return whether all items go to their consumer with their media.

        They do if the policies or the endpoint have no encode stage, or if outputs are pushed but
        no consumer can receive them.
        """
        no_receiver = self._pushed and job.consumer_reservation is None
        return not (job.course.encode and job.request.endpoint.encodes) or no_receiver

    def plan_items(
        self,
        job: EncodeJob,
        lookup: StoreLookup,
        under_way: Callable[[MMItem], bool],
    ) -> dict[MMItem, ItemPlan]:
        """Return plans for the items that are not in the store.

        `under_way` tells whether an item is being encoded for another request.
        """
        items, rule = job.request.items, job.course.items
        plans = {item: self._sized(job, item) for item in items if item not in lookup.found}
        if rule is None or not plans:
            return self._shed(job, plans, under_way)
        if (place := self._forced_place(job, lookup)) is not None:
            return {item: plan._replace(place=place) for item, plan in plans.items()}
        forecast = self._forecast(job)
        consumers_write = self._namespaces.consumers_write()
        for item, plan in plans.items():
            if under_way(item):
                plans[item] = plan._replace(place=UNDER_WAY)
            else:
                stored = consumers_write and item in lookup.identifiers
                plans[item] = _placed(rule, forecast, item, plan, stored=stored)
        return self._shed(job, plans, under_way)

    def _shed(
        self, job: EncodeJob, plans: dict[MMItem, ItemPlan], under_way: Callable[[MMItem], bool]
    ) -> dict[MMItem, ItemPlan]:
        """Leave the items to the consumer that no encode instance is expected to encode in time.

        A first try has half of `--encode-timeout-s` if there are several instances. Predictions
        err: a queue that just fits would be cut off again and again.
        """
        config = job.request.config
        waiting = [item for item, plan in plans.items() if not plan.at_consumer]
        allowed = config.on_encode_failure == "local" and not (self._pushed or job.reencode)
        if not (waiting and allowed and job.has_all_media):
            return plans
        forecast = self._forecast(job)
        limit_s = FITS_SHARE * config.encode_timeout_s / (2 if forecast.several else 1)
        if forecast.longest_s(sum(plans[item].tokens for item in waiting)) <= limit_s:
            return plans
        for item in waiting:
            plan = plans[item]
            queue = forecast.best_queue(plan.tokens, item.identity)
            if queue is None or under_way(item):
                continue
            if queue.finish_s(plan.tokens) > limit_s:
                plans[item] = plan._replace(place=OVERLOADED)
            else:
                queue.add_item(plan.tokens)
        return plans

    def may_fall_back(self, job: EncodeJob, error: ProxyError) -> bool:
        """Return whether prefill or decode may encode an item after all tries have failed.

        They may only if all items of the request have media.
        """
        allowed = job.request.config.on_encode_failure == "local" and not self._pushed
        spent = job.request.is_spent
        return allowed and error.retryable and job.has_all_media and not spent

    def _forced_place(self, job: EncodeJob, lookup: StoreLookup) -> ItemPlace | None:
        """Return the place of all items of a request that gives the policy no choice."""
        if self._pushed or job.reencode or not job.has_all_media:
            return REQUIRED
        shrinks = job.request.config.decode_media == "metadata"
        if shrinks and any(encoded.metadata for encoded in lookup.found.values()):
            return BESIDE_STORED
        return None

    def _forecast(self, job: EncodeJob) -> Forecast:
        fits = None
        consumer = None if job.consumer_reservation is None else job.consumer_reservation.instance
        if job.namespace is not None:
            fits = partial(self._namespaces.shares_namespace, namespace=job.namespace)
        return Forecast(self._table, consumer, fits)

    def _sized(self, job: EncodeJob, item: MMItem) -> ItemPlan:
        model = job.request.body.get("model")
        return ItemPlan(self._token_counts.predict_tokens(model, item.modality, item.pixels))


def _placed(
    rule: ItemRule, forecast: Forecast, item: MMItem, plan: ItemPlan, *, stored: bool
) -> ItemPlan:
    """Return the plan of an item with its place, which counts in the forecast of the next item."""
    queue = forecast.best_queue(plan.tokens, item.identity)
    measured = queue is not None and forecast.speed is not None
    token_s = queue.speed.token_s if queue is not None else 0.0
    place = rule.place_item(
        ItemFacts(
            modality=item.modality,
            pixels=item.pixels,
            tokens=plan.tokens,
            stored=stored,
            encode_s=queue.finish_s(plan.tokens) if queue is not None and measured else None,
            own_s=plan.tokens * token_s,
            local_queue_s=forecast.local.tokens * token_s,
            local_requests=forecast.local.requests,
        )
    )
    plan = plan._replace(place=place)
    if place.local:
        forecast.leave_item(plan.tokens)
    elif queue is not None:
        queue.add_item(plan.tokens)
        if measured and place.soonest:
            plan = plan._replace(instance=queue.instance.url)
    return plan
