"""Encoder outputs of a request's items: from the store, or from an encode instance.

The steps for one item: a lookup in the store (`encode`); a shared encode with other requests of
this process (`_encode_item`); a wait for another proxy on the same store (`_encode_once`); a
request to an encode instance, and to the next one after a failure (`_ask_instances`). The first
request may carry several items (`epd.request.encode_groups`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

from epd.aio import Flights, gather_first
from epd.api.items import MMItem, feature_count
from epd.encoder_cache.claims import Claims, LookupContext
from epd.errors import (
    NoInstance,
    ProxyError,
    UnknownMedia,
    UpstreamDied,
    UpstreamFailed,
    UpstreamTimeout,
    drop_tracebacks,
    no_store,
)
from epd.request.attempts import (
    EncodeJob,
    FirstTry,
    Identifiers,
    OutputKey,
    Outputs,
    PlannedJob,
    StoreLookup,
    item_key,
    sent_as,
)
from epd.request.encode_groups import EncodeGroup, GroupPlanner
from epd.request.placement import Placement
from epd.request.recovery import MAX_ENCODES, EncodeFailure, encode_delay_s
from epd.request.stages import Stages
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance, Role
from epd.routing.namespaces import Namespaces
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable, Work
from epd.spans import Span
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Encoded, EncodedItem, from_entry

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

    encoded: Encoded
    item: MMItem | None = None
    span: Span | None = None


class Encoder:
    """Provider of the encoder outputs of requests. Belongs to one event loop."""

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        stages: Stages,
        namespaces: Namespaces,
        table: InstanceTable,
        claims: Claims | None,
        transfer: ECTransfer,
        fatal: FatalRequests,
    ) -> None:
        self._stages = stages
        self._namespaces = namespaces
        self._table = table
        self._claims = claims
        self._transfer = transfer
        self._fatal = fatal
        self._identifiers = Identifiers()
        self._placement = Placement(table, namespaces, pushed=transfer.pushed)
        self._flights: Flights[object, SharedOutput] = Flights()
        self._choice = Choice(table, Role.ENCODE)
        self._planner = GroupPlanner(self._choice, fatal)
        self._retries = Retries()

    async def encode(self, job: EncodeJob) -> list[EncodedItem]:
        """Return the encoder outputs of all items; encode those that are not stored.

        At most `AT_ONCE` encodes of one request run in parallel.

        Raises:
            ProxyError: an item failed; the encodes of the others are cancelled.
        """
        context, uuids = job.context, job.uuids
        unpushed = self._transfer.pushed and job.consumer is None
        if not uuids or unpushed or not context.endpoint.encodes:
            return raw_items(uuids)
        record = context.record
        record.hits, record.waits = {}, 0
        outputs = {item: job.output(item) for item in uuids}
        identifiers = self._lookup_keys(job, outputs)
        with self._start_lookup(job, identifiers) as pending:
            lookup = await self._lookup(job, pending, identifiers)
            record.at = "encode"
            planned = self._planned(job, outputs, lookup, identifiers)
            missing = [item for item, plan in planned.plans.items() if not plan.local]
            if len(missing) == 1:
                encoded_now = [await self._encode_item(planned, None, missing[0])]
            else:
                first_try = self._first_try(planned)
                encode_item = partial(self._encode_item, planned, first_try)
                encoded_now = await gather_first(encode_item, missing, AT_ONCE)
        all_now = len(encoded_now) == len(uuids)
        encoded = encoded_now if all_now else _in_order(planned, encoded_now)
        results = [item.result for item in encoded]
        record.items = {result: results.count(result) for result in results}
        if "hit" in record.items:
            hits = [item.item.modality for item in encoded if item.result == "hit"]
            record.hits = Counter(hits)
        return encoded

    def _lookup_keys(self, job: EncodeJob, outputs: Outputs) -> Mapping[MMItem, str]:
        """Return the store keys to look up, by item."""
        if self._claims is None:
            return {}
        return {
            item: identifier
            for item, output in outputs.items()
            if not (job.reencode and item.has_media)
            and output is not None
            and (identifier := self._identifiers.identifier_of(output))
        }

    def _start_lookup(
        self, job: EncodeJob, identifiers: Mapping[MMItem, str]
    ) -> AbstractContextManager[LookupContext | None]:
        """Return a lookup in the store. It holds its claims until the items are encoded."""
        if self._claims is None or not identifiers:
            return nullcontext()
        return self._claims.start_lookup(
            job.body.get("model"),
            list({*identifiers.values()}),
            patient=not job.has_all_media,
            namespace=job.namespace,
        )

    async def _lookup(
        self, job: EncodeJob, pending: LookupContext | None, identifiers: Mapping[MMItem, str]
    ) -> StoreLookup:
        """Return the outputs that are stored."""
        if pending is None:
            return StoreLookup(answered=self._claims is not None)
        with job.context.time_stage("store", "lookup"):
            result = await pending.lookup_result()
        if result is None:
            return StoreLookup()
        infos = {key.identifier: info for key, info in (result.found or {}).items()}
        found = {
            item: from_entry(infos[identifier])
            for item, identifier in identifiers.items()
            if identifier in infos and infos[identifier].modality == item.modality
        }
        return StoreLookup(answered=True, found=found)

    def _planned(
        self,
        job: EncodeJob,
        outputs: Outputs,
        lookup: StoreLookup,
        identifiers: Mapping[MMItem, str],
    ) -> PlannedJob:
        """Return the job with a plan for each item that is not stored."""
        under_way = partial(self._under_way, PlannedJob(job, outputs, lookup, {}), identifiers)
        plans = self._placement.plan_items(job, lookup, identifiers.__contains__, under_way)
        if job.rule is not None:
            places = [plan.place.labels for plan in plans.values() if plan.place]
            job.context.record.places = Counter(places)
        return PlannedJob(job, outputs, lookup, plans)

    def _under_way(
        self, planned: PlannedJob, identifiers: Mapping[MMItem, str], item: MMItem
    ) -> bool:
        """Return whether this or another proxy on the same store is encoding an item."""
        if (output := planned.outputs[item]) is None:
            return False
        if planned.flight_key(output) in self._flights:
            return True
        if self._claims is None or not planned.lookup.answered or item not in identifiers:
            return False
        namespace = planned.job.namespace
        return not self._claims.queue_claim(output.model, identifiers[item], 0.0, namespace).first

    async def _encode_item(
        self, planned: PlannedJob, first_try: FirstTry | None, item: MMItem
    ) -> EncodedItem:
        """Return the output of an item that is not stored.

        All requests of this process that need an output at the same time share its encode. Two
        kinds of output are not shared: one that is pushed to a consumer, and one with a key that
        an engine makes.

        Args:
            planned: all items of the request.
            first_try: common first try of the items; None if each is sent by itself.
            item: the item.

        Raises:
            ProxyError: the encode failed, and prefill or decode may not encode the item either.
        """
        job = planned.job
        context, output = job.context, planned.outputs[item]
        if not item.has_media:
            raise _unknown(item, planned.lookup)
        try:
            if output is None or self._transfer.pushed:
                shared = SharedOutput(await self._ask_instances(planned, first_try, item), item)
            else:
                flight = planned.flight_key(output)
                under_way = flight in self._flights
                with context.wait_span(item) if under_way else nullcontext() as waiting:
                    work = partial(self._encode_once, planned, first_try, item, output, waiting)
                    shared = await self._flights.try_join(flight, work)
                    if waiting is not None and shared.span is not None:
                        waiting.link(shared.span)
        except ProxyError as failure:
            error = self._error_after_last_try(failure)
            if not self._may_be_local(job, error):
                raise error.at_param(item.param_path) from error.__cause__
            drop_tracebacks(failure)
            context.record.degraded.add("encode-local")
            return _local(item, job.uuids[item], planned.plan_of(item).tokens)
        own = shared.item is item  # and not the result of another request
        context.record.waits += not own
        name = sent_as(item, job.uuids[item])
        return EncodedItem(item, name, shared.encoded, "encoded" if own else "hit")

    async def _encode_once(
        self,
        planned: PlannedJob,
        first_try: FirstTry | None,
        item: MMItem,
        output: OutputKey,
        waiting: Span | None,
    ) -> SharedOutput:
        """Return the output of an item: encode it, unless another proxy already does.

        Args:
            planned: all items of the request.
            first_try: common first try of the items; None if each is sent by itself.
            item: the item.
            output: identity of the output.
            waiting: span of the wait for an encode that failed.
        """
        if waiting is not None:
            waiting.end_span()
        job = planned.job
        identifier = None if planned.skips_claims else self._identifiers.identifier_of(output)
        if self._claims is None or identifier is None:
            encoded = await self._ask_instances(planned, first_try, item)
        else:
            wait_s = job.context.config.encode_timeout_s
            with self._claims.queue_claim(output.model, identifier, wait_s, job.namespace) as turn:
                with nullcontext() if turn.first else job.context.wait_span(item):
                    found = await turn.wait_turn()
                if found is not None and found.modality == item.modality:
                    return SharedOutput(from_entry(found))
                encoded = await self._ask_instances(planned, first_try, item)
                turn.made = encoded.identifier is not None
        if self._claims is not None and encoded.namespace is not None:
            self._claims.cache.learn_namespace(output.model, encoded.namespace)
        if encoded.identifier is not None:
            self._identifiers.learn_identifier(output, encoded.identifier)
        span = job.context.span
        return SharedOutput(
            encoded, item, None if span is None else span.latest_child("encode", item)
        )

    async def _ask_instances(
        self, planned: PlannedJob, first_try: FirstTry | None, item: MMItem
    ) -> Encoded:
        """Return the output from an encode instance, or from the next one after a failure.

        Items of one request may share their first try. Further ones are the item's own.

        Raises:
            ProxyError: all tries failed, or the item itself is invalid.
        """
        job, context = planned.job, planned.job.context
        key, watched, fits = item_key(item, job.uuids[item]), context.watched, self._fits(job)
        clock = asyncio.get_running_loop().time
        tried: list[Instance] = []
        started_s = clock()
        with self._retries.tries(MAX_ENCODES) as tries:
            while True:
                try:
                    self._fatal.check(watched, [key])
                    if first_try is None:
                        [encoded] = await self._send(job, self._next_try(planned, item, tried))
                        return encoded
                    shared, first_try = first_try, None
                    if (output := await shared(item, tried)) is not None:
                        return output
                except ProxyError as error:
                    others, elapsed_s = self._choice.has_untried(tried, fits), clock() - started_s
                    local = context.config.on_encode_failure == "local"
                    patience_s = context.config.encode_timeout_s
                    ended = EncodeFailure(error, len(tried), elapsed_s, others, local, patience_s)
                    delay_s = None if watched.is_spent else encode_delay_s(ended)
                    if delay_s is None:
                        raise
                    await tries.next_try(error, delay_s)

    def _next_try(self, planned: PlannedJob, item: MMItem, tried: list[Instance]) -> EncodeGroup:
        """Return the item with its next encode instance, which is added to the tried ones."""
        job, plan = planned.job, planned.plan_of(item)
        config, key = job.context.config, item_key(item, job.uuids[item])
        instance = self._choice.best_instance(
            tried,
            balance=config.encode_balance,
            item=key,
            session=job.context.session,
            prefer=plan.instance,
            fits=self._fits(job),
        )
        tried.append(instance)
        return EncodeGroup(instance, (item,), plan.tokens)

    async def _send(self, job: EncodeJob, group: EncodeGroup) -> Sequence[Encoded]:
        """Return the outputs of the items of one request to an encode instance.

        Raises:
            ProxyError: the instance failed, or rejected an item.
        """
        instance, items, context = group.instance, group.items, job.context
        keys = [item_key(item, job.uuids[item]) for item in items]
        named = {item: sent_as(item, job.uuids[item]) for item in items}
        # New for each request: an instance that failed may still push its output later.
        asked = [
            self._transfer.encode_params(job.consumer, feature_count(job.body, item))
            for item in items
        ]
        params = asked[0] if len(items) == 1 else self._transfer.group_params(asked)
        try:
            with self._table.track_request(instance, work=Work(0, group.tokens)):
                replied = await self._stages.encode(instance, job.body, named, params, context)
                encoded = list(map(self._transfer.encoded, replied, asked))
        except UpstreamDied as failure:
            blamed = keys if len(keys) == 1 else ()
            error = self._fatal.after(failure, instance, context.watched, blamed)
            raise error from failure.__cause__
        self._fatal.record_survival(context.watched, keys, body=False)
        for item, output in zip(items, encoded, strict=True):
            self._placement.learn_reply(job, item, output)
        return [self._if_in_namespace(output, instance, job.namespace) for output in encoded]

    def _if_in_namespace(
        self, encoded: Encoded, instance: Instance, namespace: str | None
    ) -> Encoded:
        """Return an output if the consumer can find it; an empty one if its namespace differs."""
        written_to = encoded.namespace
        if written_to is not None:
            self._namespaces.record_namespace(instance, written_to)
        return encoded if namespace is None or written_to in {None, namespace} else Encoded()

    def _error_after_last_try(self, error: ProxyError) -> ProxyError:
        """Return the final error of an item's encode, after the last try."""
        failed = isinstance(error, UpstreamFailed | UpstreamTimeout)
        if not failed or self._table.any_serving(Role.ENCODE):
            return error
        nothing = NoInstance("no encode instance is reachable", slug="no_encoder", stage="encode")
        nothing.__cause__ = error
        return nothing

    def _may_be_local(self, job: EncodeJob, error: ProxyError) -> bool:
        """Return whether prefill or decode may encode an item: only if all items have media."""
        local = job.context.config.on_encode_failure == "local" and not self._transfer.pushed
        return local and error.retryable and job.has_all_media and not job.context.watched.is_spent

    def _first_try(self, planned: PlannedJob) -> FirstTry | None:
        """Return the common first try of a job's items, if there is one."""
        send = partial(self._send, planned.job)
        return self._planner.first_try(planned, self._fits(planned.job), send)

    def _fits(self, job: EncodeJob) -> Callable[[Instance], bool] | None:
        """Return the predicate of instances with the consumer's namespace; None for all."""
        return None if job.namespace is None else partial(self._shares, job.namespace)

    def _shares(self, namespace: str, instance: Instance) -> bool:
        return self._namespaces.shares_namespace(instance, namespace)


def _in_order(planned: PlannedJob, encoded_now: Sequence[EncodedItem]) -> list[EncodedItem]:
    """Return the stored and the encoded outputs in the order of the items."""
    others, found = iter(encoded_now), planned.lookup.found
    return [
        EncodedItem(item, sent_as(item, uuid), found[item], "hit")
        if item in found
        else _local(item, uuid, planned.plan_of(item).tokens)
        if planned.plan_of(item).local
        else next(others)
        for item, uuid in planned.job.uuids.items()
    ]


def _unknown(item: MMItem, lookup: StoreLookup) -> ProxyError:
    if not lookup.answered:
        return no_store("the encoder store did not answer; retry later, or send the media")
    return UnknownMedia(
        "no media are stored under this uuid; send them again", param=item.param_path
    )


def raw_items(uuids: Mapping[MMItem, str | None]) -> list[EncodedItem]:
    """Return all items as raw media, without encoder outputs."""
    return [_local(item, uuid) for item, uuid in uuids.items()]


def _local(item: MMItem, uuid: str | None, tokens: int = 0) -> EncodedItem:
    """Return an item that prefill or decode encodes, with its predicted tokens."""
    return EncodedItem(item, sent_as(item, uuid), Encoded(), "local", tokens)
