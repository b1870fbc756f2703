"""Encoder outputs of a request's items: from the store, or from an encode instance.

The steps for one item, each taken unless an earlier one has the output:

    method                   step                              source of the output
    Encoder._look_up         lookup, which claims misses       the store has it
    Encoder._leave_items     a fleet without encode instances  prefill or decode encodes it, or
                                                               another request's consumer does
    Placement.place_items    place, by the request's policy    prefill or decode encodes it
    Encoder._encode_item     run, shared by this process       another request encodes it
    Encoder._wait            claim, shared by all proxies      another proxy encodes it
    Encoder._try_instances   instance, and the next one        an encode instance encodes it
    Encoder._fall_back       after the last failure            prefill or decode encodes it
"""

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.aio import Flights, gather_first
from epd.api.items import MMItem, feature_count
from epd.encoder_cache.claims import WaitResult
from epd.encoder_cache.identity import Identifiers, OutputKey, output_key
from epd.errors import (
    NoInstance,
    ProxyError,
    UnknownMedia,
    UpstreamFailed,
    UpstreamTimeout,
    drop_tracebacks,
    no_store,
)
from epd.request.attempt import Attempt
from epd.request.encode_job import EncodeJob, MissingItem
from epd.request.encode_retries import (
    FETCH_AGAIN_S,
    MAX_ENCODES,
    EncodeFailure,
    encode_delay_s,
)
from epd.request.item_tokens import predict_tokens
from epd.request.placement import AT_CONSUMER, OVERLOADED, Placement
from epd.request.stages import Stages
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance, Role
from epd.routing.retries import Retries
from epd.routing.store_access import StoreAccess
from epd.routing.table import InstanceTable, Work
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem, OutputFacts, from_entry

if TYPE_CHECKING:
    from epd.spans import Span

AT_ONCE = 16
"""Maximum number of concurrent encodes of one request. Connections are shared with all other
requests, and few fleets have more encode instances."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Provider of the encoder outputs of requests. Belongs to one event loop.

    `_choice` is among the encode instances, and `_consumers` among those that prefill.
    """

    _table: InstanceTable
    _choice: Choice
    _consumers: Choice
    _stages: Stages
    _access: StoreAccess
    _transfer: ECTransfer
    _fatal: FatalRequests
    _placement: Placement
    _identifiers: Identifiers
    _flights: Flights[Hashable, "tuple[EncodedItem, Span | None]"] = field(default_factory=Flights)
    _retries: Retries = field(default_factory=Retries)
    _fetch_again_s: float = FETCH_AGAIN_S

    async def encode(self, attempt: Attempt) -> list[EncodedItem]:
        """Return the source and the known facts of each item's output; encode missing ones.

        At most `AT_ONCE` encodes of one request run in parallel, and all of them end within
        `--encode-timeout-s`. All items go to their consumer with their media if the policies or
        the endpoint have no encode stage, or if no consumer can receive pushed outputs.

        The claims of the entries that the request's consumer will make are added to those of the
        attempt.

        Raises:
            ProxyError: an item failed; encodes of the others that no request shares are cancelled.
        """
        request, course, target = attempt.request, attempt.course, attempt.target
        job, record = EncodeJob(attempt), request.record
        no_receiver = target.pushed and target.consumer is None
        if no_receiver or not (course.encode and request.endpoint.encodes):
            return [_consumer_item(item) for item in request.items]
        record.begin_encode()
        outputs, missing_items, claimed_keys = await self._look_up(job)
        try:
            record.wait_for("encode")
            if missing_items and course.consumer_encodes and job.has_all_media:
                outputs |= await self._leave_items(job, missing_items)
            elif missing_items:
                items = self._place_items(job, missing_items, outputs.values())
                if len(items) > 1:
                    results = await gather_first(partial(self._encode_item, job), items, AT_ONCE)
                else:
                    results = [await self._encode_item(job, items[0])]
                outputs |= {each.item: each for each in results}
        finally:
            if target.claims is not None:
                target.claims.give_back(claimed_keys)
        # Meanwhile an item may have ended the instances of other requests.
        self._fatal.check(request.watched, [item.identity for item in request.items])
        encoded_items = [outputs[item] for item in request.items]
        record.add_items([(each.result, each.item.modality) for each in encoded_items])
        return encoded_items

    async def _look_up(
        self, job: EncodeJob
    ) -> tuple[dict[MMItem, EncodedItem], list[MissingItem], Sequence[EntryKey]]:
        """Look up the items in the store, and claim missing ones.

        Return the stored outputs, the other items, and the keys for `Claims.give_back`.

        Raises:
            RequestRefused: 503, the store did not answer, and an item has no media.
        """
        items, request, target = self._keyed_items(job), job.attempt.request, job.attempt.target
        claims = target.claims
        keys = [*dict.fromkeys([each.entry_key for each in items if each.entry_key is not None])]
        if claims is None or not keys:
            return {}, items, ()
        with request.record.time_stage("store", "lookup"):
            lookup = await claims.look_up(
                keys, patient=not job.has_all_media, host_entries=target.host_entries
            )
        if lookup.entries is None and not job.has_all_media:
            raise no_store("the encoder store did not answer; retry later, or send the media")
        entries, hits, missing_items = lookup.entries or {}, dict[MMItem, EncodedItem](), []
        for each in items:
            info = None if each.entry_key is None else entries.get(each.entry_key)
            if (hit := _hit(each.item, info)) is not None:
                hits[each.item] = hit
            else:
                missing_items.append(
                    each if lookup.claimed_keys is not None else each._replace(entry_key=None)
                )
        return hits, missing_items, lookup.claimed_keys or ()

    def _keyed_items(self, job: EncodeJob) -> list[MissingItem]:
        """Return the items with their keys; without that of an entry that is not looked up."""
        attempt, namespace = job.attempt, None
        body, target = attempt.request.body, attempt.target
        if target.claims is not None:
            namespace = target.namespace or target.claims.cache.namespace(body.get("model"))
        items: list[MissingItem] = []
        for item in attempt.request.items:
            key, entry_key = output_key(body, item), None
            is_skipped = attempt.reencode and item.has_media
            if namespace is not None and key is not None and not is_skipped:
                identifier = self._identifiers.identifier_of(key)
                entry_key = EntryKey(namespace, identifier) if identifier else None
            items.append(MissingItem(item, key, entry_key))
        return items

    async def _leave_items(
        self, job: EncodeJob, missing_items: Sequence[MissingItem]
    ) -> dict[MMItem, EncodedItem]:
        """Leave the missing items to the consumer, or wait for other requests' consumers.

        A request waits only if its own consumer has to encode none of its items: otherwise it is
        sent with all its media anyway, and two requests must not wait for each other.
        """
        attempt, claims = job.attempt, job.attempt.target.claims
        record, consumer_claims = attempt.request.record, attempt.consumer_claims
        clock = asyncio.get_running_loop().time
        waits, until_s = False, 0.0
        if claims is not None and self._access.consumers_share():
            keys = [each.entry_key for each in missing_items]
            wait_keys = [key for key in keys if key is not None and not claims.is_late(key)]
            own_claims = [claim for key in wait_keys if (claim := claims.use(key)) is not None]
            consumer_claims.extend(own_claims)
            waits = not own_claims and len(wait_keys) == len(keys)
            # Half of the time is left for items that must be encoded by a request of their own.
            until_s = clock() + min(claims.consumer_wait_s, job.left_s / 2)
        outputs, local = dict[MMItem, EncodedItem](), 0
        for each in missing_items:
            result = await self._wait(job, each, until_s - clock()) if waits else WaitResult()
            if result.claim is not None:
                consumer_claims.append(result.claim)
            if (hit := _hit(each.item, result.entry)) is not None:
                outputs[each.item] = hit
                record.add_wait()
            else:
                waits = False
                local += 1
                outputs[each.item] = _consumer_item(each.item, predict_tokens(each.item))
        if local:
            record.add_placements([AT_CONSUMER.labels] * local)
        return outputs

    def _place_items(
        self, job: EncodeJob, missing_items: Sequence[MissingItem], hits: Iterable[EncodedItem]
    ) -> Sequence[MissingItem]:
        """Return the missing items with their places.

        Raises:
            UnknownMedia: one of them has no media.
        """
        record, under_way = job.attempt.request.record, self._is_under_way
        items = [
            each._replace(tokens=predict_tokens(each.item), under_way=under_way(job, each))
            for each in missing_items
        ]
        placed_items = self._placement.place_items(job, items, hits)
        if places := [each.place for each in placed_items if each.place is not None]:
            record.add_placements([place.labels for place in places])
            if OVERLOADED in places:
                record.add_degraded("encode-local")
        for each in placed_items:
            if not (each.at_consumer or each.item.has_media):
                raise UnknownMedia(
                    "no media are stored under this uuid; send them again",
                    param=each.item.param_path,
                )
        return placed_items

    def _is_under_way(self, job: EncodeJob, missing_item: MissingItem) -> bool:
        """Return whether another request or another proxy is making an item's output."""
        if (missing_item.output_key, job.sharing) in self._flights:
            return True
        claims, key = job.attempt.target.claims, missing_item.entry_key
        return claims is not None and key is not None and not claims.is_unused(key)

    async def _encode_item(self, job: EncodeJob, missing_item: MissingItem) -> EncodedItem:
        """Return an item after its encode, or leave it to prefill or decode if its place is there.

        Requests that need an output at the same time share its encode. Two kinds of output are not
        shared: one that is pushed to a consumer, and one with a key that an engine makes.

        Raises:
            ProxyError: the encode failed, and prefill or decode may not encode the item either.
        """
        attempt, item, key = job.attempt, missing_item.item, missing_item.output_key
        record = attempt.request.record
        if missing_item.at_consumer:
            return _consumer_item(item, missing_item.tokens)
        try:
            if key is None or attempt.target.pushed:
                return EncodedItem(item, await self._try_instances(job, missing_item), "encoded")
            flight = key, job.sharing
            work = partial(self._encode_once, job, missing_item, key)
            for may_repeat in (True, False):
                joins = flight in self._flights
                try:
                    with record.wait_span(item) if joins else nullcontext() as wait_span:
                        encoded_item, encode_span = await self._flights.join(flight, work)
                        if wait_span is not None and encode_span is not None:
                            wait_span.link(encode_span)
                    break
                except ProxyError:
                    if not (joins and may_repeat):  # another request had begun the encode
                        raise
        except ProxyError as failure:
            return self._fall_back(job, missing_item, failure)
        if encoded_item.item is not item:  # the result of another request
            encoded_item = EncodedItem(item, encoded_item.facts, "hit")
        if encoded_item.result == "hit":
            record.add_wait()
        return encoded_item

    async def _encode_once(
        self, job: EncodeJob, missing_item: MissingItem, key: OutputKey
    ) -> "tuple[EncodedItem, Span | None]":
        """Return an item after its encode, or after that of another proxy on the store.

        The second value is the span of the request to an encode instance, if it is traced.
        """
        item, trace = missing_item.item, job.attempt.request.record.span
        claims = job.attempt.target.claims
        # Half of the time is left for an encode of this proxy.
        result = await self._wait(job, missing_item, job.left_s / 2)
        if (hit := _hit(item, result.entry)) is not None:
            return hit, None
        with result.claim or nullcontext() as claim:
            facts = await self._try_instances(job, missing_item)
            if claim is not None:
                claim.end(entry_coming=facts.identifier is not None)
        if claims is not None and facts.namespace is not None:
            claims.cache.learn_namespace(key.model, facts.namespace)
        if facts.identifier is not None:
            self._identifiers.learn_identifier(key, facts.identifier)
        span = None if trace is None else trace.latest_child("encode", item)
        return EncodedItem(item, facts, "encoded"), span

    async def _wait(self, job: EncodeJob, missing_item: MissingItem, limit_s: float) -> WaitResult:
        """Wait for the entry of an item, unless this request can use its claim to make it."""
        claims, key = job.attempt.target.claims, missing_item.entry_key
        if claims is None or key is None:
            return WaitResult()
        if (claim := claims.use(key)) is not None:
            return WaitResult(claim=claim)
        with job.attempt.request.record.wait_span(missing_item.item):
            return await claims.wait(key, limit_s)

    async def _try_instances(self, job: EncodeJob, missing_item: MissingItem) -> OutputFacts:
        """Return the output of an item from an encode instance, or from the next after a failure.

        Raises:
            UpstreamTimeout: the deadline of the request's encode stage has passed.
            ProxyError: all tries failed, or the item itself is invalid.
        """
        item, request, candidates = missing_item.item, job.attempt.request, self._candidates(job)
        host = job.attempt.target.host
        worth = None if host is None else partial(self._access.is_at, host=host)
        tried: list[Instance] = []
        server_errors = 0
        started_s = asyncio.get_running_loop().time()
        with self._retries.tries(MAX_ENCODES) as tries:
            while True:
                if not job.left_s:
                    raise UpstreamTimeout(
                        "the encode stage of the request did not end in time",
                        slug="encode_timeout",
                        stage="encode",
                    )
                try:
                    instance = request.watched.choose_instance(
                        "encode",
                        lambda fits: candidates.among(fits).best_instance(
                            tried,
                            balance=request.config.encode_balance,
                            item=item.identity,
                            session=request.session,
                            prefer=missing_item.first_url,
                            worth=worth,
                        ),
                    )
                    tried.append(instance)
                    # Half of what is left, while another try may follow. An instance that has to
                    # fetch media may need all of it.
                    may_follow = (
                        not item.is_remote
                        and len(tried) < MAX_ENCODES
                        and job.retries
                        and request.watched.pins is None
                        and candidates.has_untried_usable(tried)
                    )
                    timeout_s = job.left_s / 2 if may_follow else job.left_s
                    return await self._send(job, missing_item, instance, timeout_s)
                except ProxyError as error:
                    server_errors += error.engine_failed
                    failure = EncodeFailure(
                        error,
                        tries=len(tried),
                        server_errors=server_errors,
                        elapsed_s=asyncio.get_running_loop().time() - started_s,
                        others=request.watched.pins is None and candidates.has_untried(tried),
                        falls_back=job.may_leave,
                        patience_s=job.left_s,
                        fetch_again_s=self._fetch_again_s,
                    )
                    delay_s = None if request.is_spent else encode_delay_s(failure)
                    if delay_s is None or not job.retries:
                        raise
                    job.retries -= 1
                    await tries.next_try(error, delay_s, 0.0 if job.may_leave else job.left_s)

    def _candidates(self, job: EncodeJob) -> Choice:
        """Return the choice among the instances that write where the consumer reads.

        If there are no encode instances, consumers that write to the store get encode requests for
        items that must not be sent with their media.
        """
        access, fits = self._access, job.attempt.target.fits
        if self._table.has(Role.ENCODE) or not access.any_consumer_writes():
            return self._choice.among(fits)
        return self._consumers.among(access.writes).among(fits)

    async def _send(
        self, job: EncodeJob, missing_item: MissingItem, instance: Instance, timeout_s: float
    ) -> OutputFacts:
        """Return the output of an item from one request to an instance.

        Raises:
            ProxyError: the instance failed, or rejected the item; or instances have died of it.
        """
        item, request, target = missing_item.item, job.attempt.request, job.attempt.target
        body = request.body
        self._fatal.check(request.watched, [item.identity])
        # New for each request: an instance that failed may still push its output later.
        params = self._transfer.encode_params(target.consumer, feature_count(body, item))
        in_flight = self._table.track_request(instance, work=Work(0, missing_item.tokens))
        try:
            with in_flight:
                reply = await self._stages.encode(instance, body, item, params, request, timeout_s)
                output = self._transfer.output_facts(reply, params)
        except UpstreamFailed as failure:
            request.doubts.add(failure, in_flight, item)
            watched = request.watched
            error = self._fatal.count_death(failure, instance, watched, (item.identity,))
            raise error from failure.__cause__
        request.doubts.settle(instance, item)
        self._fatal.record_survival(request.watched, (item.identity,), body=False)
        if output.namespace is not None:
            self._access.record_namespace(instance, output.namespace)
        # The consumer cannot find an output that is written to another namespace.
        findable = target.namespace is None or output.namespace in {None, target.namespace}
        return output if findable else OutputFacts()

    def _fall_back(
        self, job: EncodeJob, missing_item: MissingItem, failure: ProxyError
    ) -> EncodedItem:
        """Return an item that prefill or decode encodes after a failure.

        Raises:
            ProxyError: they may not encode it.
        """
        # `gather_first` replaces the context of what is raised below, which leads to this failure.
        drop_tracebacks(failure)
        error, failed = failure, isinstance(failure, UpstreamFailed | UpstreamTimeout)
        if failed and not self._table.any_serving(*self._candidates(job).roles):
            error = NoInstance("no encode instance is reachable", slug="no_encoder", stage="encode")
            error.__cause__ = failure.__cause__ or failure
        request = job.attempt.request
        if request.is_spent or not (error.retryable and job.may_leave):
            raise error.at_param(missing_item.item.param_path) from error.__cause__
        request.record.add_degraded("encode-local")
        return _consumer_item(missing_item.item, missing_item.tokens)


def _consumer_item(item: MMItem, tokens: int = 0) -> EncodedItem:
    """Return an item that prefill or decode encodes."""
    return EncodedItem(item, OutputFacts(), "local", tokens)


def _hit(item: MMItem, info: EntryInfo | None) -> EncodedItem | None:
    """Return an item with its entry; None without one, or if it is of another modality."""
    if info is None or info.modality != item.modality:
        return None
    return EncodedItem(item, from_entry(info), "hit")
