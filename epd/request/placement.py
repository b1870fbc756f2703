"""Where the items of a request are encoded: on encode instances, or by its consumer. No I/O.

Only items that are not in the store have a choice. The policy decides by their sizes, by the load
and by the speeds of the instances (`epd.policies.plan.ItemRule`).
"""

from collections.abc import Callable
from functools import partial

from epd.api.items import MMItem
from epd.policies.plan import ItemFacts, ItemPlace, ItemRule
from epd.request.attempts import EncodeJob, ItemPlan, StoreLookup, item_key
from epd.request.item_tokens import TokenCounts, media_tokens
from epd.routing.forecast import Forecast
from epd.routing.namespaces import Namespaces
from epd.routing.table import InstanceTable
from epd.transfer.encoded import Encoded

REQUIRED = ItemPlace(local=False, reason="required")
"""Place of an item that a consumer must not encode: outputs are pushed, entries of the request may
be lost, or an item of the request has no media, so that no item may be sent with its media."""

BESIDE_STORED = ItemPlace(local=False, reason="beside_stored")
"""Place of an item beside one that is in the store. A consumer gets metadata only of all items of a
request or of none: it would have to preprocess the stored ones too."""

UNDER_WAY = ItemPlace(local=False, reason="under_way")
"""Place of an item that is being encoded for another request."""


class Placement:
    """Plans for the items of requests. It learns their tokens from replies of encode instances."""

    def __init__(self, table: InstanceTable, namespaces: Namespaces, *, pushed: bool) -> None:
        """Create without learned counts.

        Args:
            table: instances with their load.
            namespaces: which consumers write to the store.
            pushed: whether consumers wait for the encoder output of every item.
        """
        self._table = table
        self._namespaces = namespaces
        self._pushed = pushed
        self._counts = TokenCounts()

    def plan_items(
        self,
        job: EncodeJob,
        lookup: StoreLookup,
        keyed: Callable[[MMItem], bool],
        under_way: Callable[[MMItem], bool],
    ) -> dict[MMItem, ItemPlan]:
        """Return plans for the items that are not in the store.

        Args:
            job: the items.
            lookup: result of their lookup.
            keyed: returns whether the proxy knows the item's key in the store.
            under_way: returns whether the item is being encoded for another request.
        """
        plans = {item: self._sized(job, item) for item in job.uuids if item not in lookup.found}
        rule = job.rule
        if rule is None or not plans:
            return plans
        if (place := self._forced_place(job, lookup)) is not None:
            return {item: plan._replace(place=place) for item, plan in plans.items()}
        forecast = self._forecast(job)
        stored = self._namespaces.consumers_write()
        for item, plan in plans.items():
            if under_way(item):
                plans[item] = plan._replace(place=UNDER_WAY)
            else:
                key = item_key(item, job.uuids[item])
                plans[item] = _placed(
                    rule, forecast, item, plan, key, stored=stored and keyed(item)
                )
        return plans

    def _forced_place(self, job: EncodeJob, lookup: StoreLookup) -> ItemPlace | None:
        """Return the place of all items of a request that gives the policy no choice."""
        if self._pushed or job.reencode or not job.has_all_media:
            return REQUIRED
        shrinks = job.context.config.decode_media == "metadata"
        if shrinks and any(encoded.metadata for encoded in lookup.found.values()):
            return BESIDE_STORED
        return None

    def _forecast(self, job: EncodeJob) -> Forecast:
        fits, consumer = None, None if job.consumer is None else job.consumer.instance
        if job.namespace is not None:
            fits = partial(self._namespaces.shares_namespace, namespace=job.namespace)
        return Forecast(self._table, consumer, fits)

    def learn_reply(self, job: EncodeJob, item: MMItem, encoded: Encoded) -> None:
        """Learn the number of an item's tokens from the reply of an encode instance."""
        model, tokens = job.body.get("model"), media_tokens(encoded.metadata)
        self._counts.learn_tokens(model, item.modality, job.pixels.get(item, 0), tokens)

    def _sized(self, job: EncodeJob, item: MMItem) -> ItemPlan:
        pixels = job.pixels.get(item, 0)
        model = job.body.get("model")
        return ItemPlan(pixels, self._counts.predict_tokens(model, item.modality, pixels))


def _placed(  # noqa: PLR0913 - the inputs of a decision
    rule: ItemRule, forecast: Forecast, item: MMItem, plan: ItemPlan, key: str, *, stored: bool
) -> ItemPlan:
    """Return the plan of an item with its place, which counts in the forecast of the next item."""
    queue = forecast.best_queue(plan.tokens, key)
    measured = queue is not None and forecast.speed is not None
    token_s = queue.speed.token_s if queue is not None else 0.0
    place = rule.place_item(
        ItemFacts(
            modality=item.modality,
            pixels=plan.pixels,
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
