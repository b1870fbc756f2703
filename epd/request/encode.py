"""Encoder outputs of a request's items: from the store, or from an encode instance.

The steps for one item, each taken unless an earlier one has the output:

    method                   step                              source of the output
    Encoder._lookup          lookup, which claims misses       the store has it
    Encoder._plan_items      place, by the request's policy    prefill or decode encodes it
    Encoder._encode_item     flight, shared by this process    another request encodes it
    Encoder._encode_once     claim, shared by all proxies      another proxy encodes it
    EncodeTries.encode_item  instance, and the next one        an encode instance encodes it
    Encoder._fall_back       after the last failure            prefill or decode encodes it
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from epd.aio import Flights, gather_first
from epd.api.items import MMItem
from epd.encoder_cache.claims import Claims
from epd.encoder_cache.identity import Identifiers, OutputKey
from epd.errors import ProxyError, UnknownMedia, drop_tracebacks, no_store
from epd.request.encode_tries import (
    EncodeLimits,
    EncodeTask,
    EncodeTries,
    flight_key,
)
from epd.request.placement import OVERLOADED, Placement
from epd.request.stage_inputs import EncodeJob, ItemPlan, StoreLookup
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem, OutputFacts, from_entry

if TYPE_CHECKING:
    from epd.spans import Span

AT_ONCE = 16
"""Maximum number of concurrent encodes of one request. Connections are shared with all other
requests, and few fleets have more encode instances."""


class SharedOutput(NamedTuple):
    """Encoder output of one item, shared by all requests that need it.

    Attributes:
        encoded: the output.
        item: the item that was sent to an encode instance; None if the store has the output.
        span: span of the request to that instance; None without tracing.
    """

    encoded: OutputFacts
    item: MMItem | None = None
    span: "Span | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Provider of the encoder outputs of requests. Belongs to one event loop."""

    _claims: Claims | None
    _transfer: ECTransfer
    _placement: Placement
    _tries: EncodeTries
    _identifiers: Identifiers = field(default_factory=Identifiers)
    _flights: Flights[object, SharedOutput] = field(default_factory=Flights)

    async def encode(self, job: EncodeJob) -> list[EncodedItem]:
        """Return the source and the known facts of each item's output; encode missing ones.

        At most `AT_ONCE` encodes of one request run in parallel, and all of them end within
        `--encode-timeout-s`.

        Raises:
            ProxyError: an item failed; encodes of the others that no request shares are cancelled.
        """
        items, record = job.request.items, job.request.record
        if self._placement.skips_encode(job):
            return [EncodedItem(item, OutputFacts(), "local") for item in items]
        record.begin_encode()
        async with self._lookup(job) as lookup:
            record.wait_for("encode")
            plans = self._plan_items(job, lookup)
            tasks = self._encode_tasks(job, lookup, plans)
            if len(tasks) == 1:
                encoded_now = [await self._encode_item(tasks[0])]
            else:
                encoded_now = await gather_first(self._encode_item, tasks, AT_ONCE)
        encoded_items = _in_order(items, encoded_now, lookup, plans)
        record.add_items([(known.result, known.item.modality) for known in encoded_items])
        return encoded_items

    @asynccontextmanager
    async def _lookup(self, job: EncodeJob) -> AsyncIterator[StoreLookup]:
        """Look up the items in the store, and hold the claims of missing ones until the exit."""
        output_keys = {item: job.output_key(item) for item in job.request.items}
        if self._claims is None:
            yield StoreLookup(output_keys)
            return
        identifiers = {
            item: identifier
            for item, output_key in output_keys.items()
            if not (job.reencode and item.has_media)
            and output_key is not None
            and (identifier := self._identifiers.identifier_of(output_key))
        }
        if not identifiers:
            yield StoreLookup(output_keys, answered=True)
            return
        with self._claims.start_lookup(
            job.request.body.get("model"),
            list({*identifiers.values()}),
            patient=not job.has_all_media,
            namespace=job.namespace,
        ) as pending:
            with job.request.record.time_stage("store", "lookup"):
                result = await pending.lookup_result()
            if result is None:
                yield StoreLookup(output_keys, identifiers)
                return
            infos = {key.identifier: info for key, info in (result.found or {}).items()}
            found = {
                item: from_entry(infos[identifier])
                for item, identifier in identifiers.items()
                if identifier in infos and infos[identifier].modality == item.modality
            }
            yield StoreLookup(
                output_keys,
                identifiers,
                answered=True,
                found=found,
                is_encoded_elsewhere=pending.is_encoded_elsewhere,
            )

    def _plan_items(self, job: EncodeJob, lookup: StoreLookup) -> Mapping[MMItem, ItemPlan]:
        under_way = partial(self._is_under_way, job, lookup)
        plans = self._placement.plan_items(job, lookup, under_way)
        record = job.request.record
        record.add_places([plan.place.labels for plan in plans.values() if plan.place])
        if any(plan.place is OVERLOADED for plan in plans.values()):
            record.add_degraded("encode-local")
        return plans

    def _is_under_way(self, job: EncodeJob, lookup: StoreLookup, item: MMItem) -> bool:
        """Return whether this or another proxy on the same store is encoding an item."""
        if (output_key := lookup.output_keys[item]) is None:
            return False
        if flight_key(job, output_key, skips_claims=job.skips_claims(lookup)) in self._flights:
            return True
        identifier = lookup.identifiers.get(item)
        return identifier is not None and lookup.is_encoded_elsewhere(identifier)

    def _encode_tasks(
        self, job: EncodeJob, lookup: StoreLookup, plans: Mapping[MMItem, ItemPlan]
    ) -> list[EncodeTask]:
        """Return the tasks for the items that an encode instance encodes.

        Raises:
            ProxyError: an item has no media.
        """
        loop, config = asyncio.get_running_loop(), job.request.config
        limits = EncodeLimits(loop.time() + config.encode_timeout_s)
        missing = [item for item, plan in plans.items() if not plan.at_consumer]
        if (unknown := next((item for item in missing if not item.has_media), None)) is not None:
            raise _unknown(unknown, lookup)
        return [
            EncodeTask(
                job,
                item,
                lookup.output_keys[item],
                plans[item],
                skips_claims=job.skips_claims(lookup),
                limits=limits,
            )
            for item in missing
        ]

    async def _encode_item(self, task: EncodeTask) -> EncodedItem:
        """Return the output of an item that is not stored.

        Requests that need an output at the same time share its encode. Two kinds of output are not
        shared: one that is pushed to a consumer, and one with a key that an engine makes.

        Raises:
            ProxyError: the encode failed, and prefill or decode may not encode the item either.
        """
        item, output_key, request = task.item, task.output_key, task.job.request
        try:
            if output_key is None or self._transfer.pushed:
                encoded = await self._tries.encode_item(task)
                shared = SharedOutput(encoded, item)
            else:
                flight = flight_key(task.job, output_key, skips_claims=task.skips_claims)
                under_way = flight in self._flights
                with request.record.wait_span(item) if under_way else nullcontext() as waiting:
                    work = partial(self._encode_once, task, output_key, waiting)
                    shared = await self._flights.try_join(flight, work)
                    if waiting is not None and shared.span is not None:
                        waiting.link(shared.span)
        except ProxyError as failure:
            return self._fall_back(task, failure)
        own = shared.item is item  # and not the result of another request
        if not own:
            request.record.add_wait()
        return EncodedItem(item, shared.encoded, "encoded" if own else "hit")

    def _fall_back(self, task: EncodeTask, failure: ProxyError) -> EncodedItem:
        """Return an item that prefill or decode encodes after a failure.

        Raises:
            ProxyError: they may not encode it.
        """
        # `gather_first` replaces the context of what is raised below, which leads to this failure.
        drop_tracebacks(failure)
        error = self._tries.error_after_last_try(failure)
        if not self._placement.may_fall_back(task.job, error):
            raise error.at_param(task.item.param_path) from error.__cause__
        task.job.request.record.add_degraded("encode-local")
        return EncodedItem(task.item, OutputFacts(), "local", task.plan.tokens)

    async def _encode_once(
        self,
        task: EncodeTask,
        output_key: OutputKey,
        earlier_wait: "Span | None",
    ) -> SharedOutput:
        """Return the output of an item: encode it, unless another proxy already does.

        The span of the wait for another request's encode that failed ends here.
        """
        if earlier_wait is not None:
            earlier_wait.end_span()
        item, request = task.item, task.job.request
        identifier = self._identifiers.identifier_of(output_key)
        if self._claims is None or identifier is None or task.skips_claims:
            encoded = await self._tries.encode_item(task)
            return self._learn_output(task, output_key, encoded)
        # Half of the time is left for an encode of this proxy.
        wait_s, namespace = task.limits.left_s / 2, task.job.namespace
        with self._claims.queue_claim(output_key.model, identifier, wait_s, namespace) as claim:
            with request.record.wait_span(item) if claim.must_ask else nullcontext():
                found = await claim.wait_turn()
            if found is not None and found.modality == item.modality:
                return SharedOutput(from_entry(found))
            encoded = await self._tries.encode_item(task)
            claim.entry_coming = encoded.identifier is not None
            return self._learn_output(task, output_key, encoded)

    def _learn_output(
        self, task: EncodeTask, output_key: OutputKey, encoded: OutputFacts
    ) -> SharedOutput:
        """Remember the names in the output of an encode instance, and return the output."""
        if self._claims is not None and encoded.namespace is not None:
            self._claims.cache.learn_namespace(output_key.model, encoded.namespace)
        if encoded.identifier is not None:
            self._identifiers.learn_identifier(output_key, encoded.identifier)
        span = task.job.request.record.span
        latest = None if span is None else span.latest_child("encode", task.item)
        return SharedOutput(encoded, task.item, latest)


def _in_order(
    items: Sequence[MMItem],
    encoded_now: Sequence[EncodedItem],
    lookup: StoreLookup,
    plans: Mapping[MMItem, ItemPlan],
) -> list[EncodedItem]:
    """Return the stored, the encoded and the remaining items in the order of the request."""
    if len(encoded_now) == len(items):
        return [*encoded_now]
    others, found = iter(encoded_now), lookup.found
    return [
        EncodedItem(item, found[item], "hit")
        if item in found
        else EncodedItem(item, OutputFacts(), "local", plans[item].tokens)
        if plans[item].at_consumer
        else next(others)
        for item in items
    ]


def _unknown(item: MMItem, lookup: StoreLookup) -> ProxyError:
    if not lookup.answered:
        return no_store("the encoder store did not answer; retry later, or send the media")
    return UnknownMedia(
        "no media are stored under this uuid; send them again", param=item.param_path
    )
