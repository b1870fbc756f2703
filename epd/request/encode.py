"""Encoder outputs of a request's items: from the store, or from an encode instance.

The steps for one item, each taken unless an earlier one has the output:

    method                   step                              source of the output
    Encoder._look_up         lookup, which claims misses       the store has it
    Encoder._leave_items     a fleet without encode instances  prefill or decode encodes it, or
                                                               another request's consumer does
    Placement.place_items    place, by the request's policy    prefill or decode encodes it
    Encoder._encode_item     run, shared by this process       another request encodes it
    Encoder._take_or_wait    claim, shared by all proxies      another proxy encodes it
    Encoder._try_instances   instance, and the next one        an encode instance encodes it
    Encoder._fall_back       after the last failure            prefill or decode encodes it
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.aio import Flights, gather_first
from epd.api.items import MMItem, feature_count
from epd.encoder_cache.claims import Claim, Claims
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
from epd.request.encode_job import EncodeJob, PendingItem
from epd.request.item_tokens import TokenCounts, media_tokens
from epd.request.placement import AT_CONSUMER, OVERLOADED, Placement
from epd.request.recovery import MAX_ENCODES, EncodeFailure, encode_delay_s
from epd.request.stages import Stages
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.host_report import Host
from epd.routing.instances import Instance, Role
from epd.routing.namespaces import Namespaces
from epd.routing.retries import Retries
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

    `_choice` is among the encode instances, and `_consumers` among those that prefill. `_claims_at`
    returns the claims at the server of a consumer's host; None if all instances have one store.
    """

    _table: InstanceTable
    _choice: Choice
    _consumers: Choice
    _stages: Stages
    _namespaces: Namespaces
    _transfer: ECTransfer
    _fatal: FatalRequests
    _token_counts: TokenCounts
    _placement: Placement
    _claims: Claims | None
    _claims_at: Callable[[Host | None], Claims | None] | None = None
    identifiers: Identifiers = field(default_factory=Identifiers)
    _flights: Flights[Hashable, "tuple[EncodedItem, Span | None]"] = field(default_factory=Flights)
    _retries: Retries = field(default_factory=Retries)

    async def encode(
        self, job: EncodeJob, consumer_claims: ExitStack | None = None
    ) -> list[EncodedItem]:
        """Return the source and the known facts of each item's output; encode missing ones.

        At most `AT_ONCE` encodes of one request run in parallel, and all of them end within
        `--encode-timeout-s`. The claims of the entries that the request's consumer will encode are
        entered into `consumer_claims`; without a consumer it is None.

        Raises:
            ProxyError: an item failed; encodes of the others that no request shares are cancelled.
        """
        if self._claims_at is not None:  # one store for the whole job, whatever instances name
            at_host = replace(self, _claims=self._claims_at(job.host), _claims_at=None)
            return await at_host.encode(job, consumer_claims)
        request, record = job.request, job.request.record
        if self._placement.skips_encode(job):
            return [EncodedItem(item, OutputFacts(), "local") for item in request.items]
        record.begin_encode()
        items = [PendingItem(item, output_key(request.body, item)) for item in request.items]
        claimed_keys = await self._look_up(job, items)
        try:
            record.wait_for("encode")
            if any(pending.output is None for pending in items):
                if consumer_claims is not None and job.course.local and job.has_all_media:
                    await self._leave_items(job, items, consumer_claims)
                self._place_items(job, items)
            missing = [pending for pending in items if pending.output is None]
            if len(missing) > 1:
                await gather_first(partial(self._encode_item, job), missing, AT_ONCE)
            elif missing:
                await self._encode_item(job, missing[0])
        finally:
            if self._claims is not None:
                self._claims.give_back(claimed_keys)
        outputs = [pending.output for pending in items if pending.output is not None]
        record.add_items([(output.result, output.item.modality) for output in outputs])
        return outputs

    async def _look_up(self, job: EncodeJob, items: Sequence[PendingItem]) -> Sequence[EntryKey]:
        """Look up the items in the store. Return the keys of missing ones that were claimed.

        Raises:
            RequestRefused: 503, the store did not answer, and an item has no media.
        """
        claims, model = self._claims, job.request.body.get("model")
        if claims is None or not (namespace := job.namespace or claims.cache.namespace(model)):
            return ()
        for pending in items:
            skipped = job.reencode and pending.item.has_media
            if pending.output_key is None or skipped:
                continue
            if identifier := self.identifiers.identifier_of(pending.output_key):
                pending.entry_key = EntryKey(namespace, identifier)
        keys = [*dict.fromkeys(pending.entry_key for pending in items if pending.entry_key)]
        if not keys:
            return ()
        with job.request.record.time_stage("store", "lookup"):
            lookup = await claims.look_up(keys, patient=not job.has_all_media, known=job.found)
        if lookup.found is None and not job.has_all_media:
            raise no_store("the encoder store did not answer; retry later, or send the media")
        for pending in items:
            if pending.entry_key is None:
                continue
            pending.output = _hit(pending.item, (lookup.found or {}).get(pending.entry_key))
            if pending.output is None and lookup.claimed_keys is None:
                pending.entry_key = None
        return lookup.claimed_keys or ()

    async def _leave_items(
        self, job: EncodeJob, items: Sequence[PendingItem], consumer_claims: ExitStack
    ) -> None:
        """Leave the missing items to the consumer, or wait for other requests' consumers.

        A request waits only if its own consumer has to encode none of its items: otherwise it is
        sent with all its media anyway, and two requests must not wait for each other.
        """
        claims, clock = self._claims, asyncio.get_running_loop().time
        if claims is None:
            return
        missing = [pending for pending in items if pending.output is None]
        waits = False
        if self._namespaces.consumers_share():
            keys = [pending.entry_key for pending in missing]
            shared = [key for key in keys if key is not None and not claims.is_late(key)]
            free = [claim for key in shared if (claim := claims.take(key)) is not None]
            for claim in free:
                consumer_claims.enter_context(claim)
            waits = not (free or job.repeated) and len(shared) == len(keys)
        # Half of the time is left for items that must be encoded by a request of their own.
        until_s = clock() + min(claims.consumer_wait_s, job.left_s / 2)
        for pending in missing:
            if waits:
                entry = await self._take_or_wait(job, pending, until_s - clock())
                if isinstance(entry, Claim):
                    consumer_claims.enter_context(entry)
                else:
                    pending.output = _hit(pending.item, entry)
                # Meanwhile the item may have ended the instances of other requests.
                self._fatal.check(job.request.watched, [pending.item.identity])
            if pending.output is None:
                pending.place, waits = AT_CONSUMER, False
            else:
                job.request.record.add_wait()

    def _place_items(self, job: EncodeJob, items: Sequence[PendingItem]) -> None:
        """Place the items without an output. Those with a place at the consumer are left to it.

        Raises:
            UnknownMedia: one of them has no media.
        """
        record = job.request.record
        for pending in items:
            pending.under_way = pending.output is None and self._is_under_way(job, pending)
        self._placement.place_items(job, items)
        if places := [pending.place for pending in items if pending.place is not None]:
            record.add_places([place.labels for place in places])
            if OVERLOADED in places:
                record.add_degraded("encode-local")
        for pending in items:
            if pending.output is not None:
                continue
            if pending.at_consumer:
                pending.output = _local(pending)
            elif not pending.item.has_media:
                raise UnknownMedia(
                    "no media are stored under this uuid; send them again",
                    param=pending.item.param_path,
                )

    def _is_under_way(self, job: EncodeJob, pending: PendingItem) -> bool:
        """Return whether another request or another proxy is making an item's output."""
        if (pending.output_key, job.sharing) in self._flights:
            return True
        key = pending.entry_key
        return self._claims is not None and key is not None and not self._claims.is_free(key)

    async def _encode_item(self, job: EncodeJob, pending: PendingItem) -> None:
        """Set the output of an item by an encode, or leave it to prefill or decode.

        Requests that need an output at the same time share its encode. Two kinds of output are not
        shared: one that is pushed to a consumer, and one with a key that an engine makes.

        Raises:
            ProxyError: the encode failed, and prefill or decode may not encode the item either.
        """
        item, record = pending.item, job.request.record
        try:
            if pending.output_key is None or self._transfer.pushed:
                encoded = await self._try_instances(job, pending)
                pending.output = EncodedItem(item, encoded, "encoded")
                return
            flight = pending.output_key, job.sharing
            work = partial(self._encode_once, job, pending, pending.output_key)
            for may_repeat in (True, False):
                joins = flight in self._flights
                try:
                    with record.wait_span(item) if joins else nullcontext() as waiting:
                        output, span = await self._flights.join(flight, work)
                        if waiting is not None and span is not None:
                            waiting.link(span)
                    break
                except ProxyError:
                    if not (joins and may_repeat):  # another request had begun the encode
                        raise
        except ProxyError as failure:
            pending.output = self._fall_back(job, pending, failure)
            return
        if output.item is not item:  # the result of another request
            output = EncodedItem(item, output.encoded, "hit")
        if output.result == "hit":
            record.add_wait()
        pending.output = output

    async def _encode_once(
        self, job: EncodeJob, pending: PendingItem, output: OutputKey
    ) -> "tuple[EncodedItem, Span | None]":
        """Return an item after its encode, or after that of another proxy on the store.

        The second value is the span of the request to an encode instance, if it is traced.
        """
        item, request = pending.item, job.request
        # Half of the time is left for an encode of this proxy.
        entry = await self._take_or_wait(job, pending, job.left_s / 2)
        with entry if isinstance(entry, Claim) else nullcontext() as claim:
            if isinstance(entry, EntryInfo):
                # Meanwhile the item may have ended the instances of other requests.
                self._fatal.check(request.watched, [item.identity])
                if (hit := _hit(item, entry)) is not None:
                    return hit, None
            encoded = await self._try_instances(job, pending)
            if claim is not None:
                claim.end(entry_coming=encoded.identifier is not None)
        if self._claims is not None and encoded.namespace is not None:
            self._claims.cache.learn_namespace(output.model, encoded.namespace)
        if encoded.identifier is not None:
            self.identifiers.learn_identifier(output, encoded.identifier)
        trace = request.record.span
        span = None if trace is None else trace.latest_child("encode", item)
        return EncodedItem(item, encoded, "encoded"), span

    async def _take_or_wait(
        self, job: EncodeJob, pending: PendingItem, limit_s: float
    ) -> EntryInfo | Claim | None:
        """Return the claim of an item, or wait for the entry that others make (`Claims.wait`).

        None: this request makes the entry without a claim.
        """
        claims, key = self._claims, pending.entry_key
        if claims is None or key is None:
            return None
        if (claim := claims.take(key)) is not None:
            return claim
        with job.request.record.wait_span(pending.item):
            return await claims.wait(key, limit_s)

    async def _try_instances(self, job: EncodeJob, pending: PendingItem) -> OutputFacts:
        """Return the output of an item from an encode instance, or from the next after a failure.

        Raises:
            UpstreamTimeout: the deadline of the request's encode stage has passed.
            ProxyError: all tries failed, or the item itself is invalid.
        """
        item, request = pending.item, job.request
        choice, fits = self._instances(job)
        worth = None if job.host is None else partial(self._placement.is_at, job.host)
        falls_back = self._placement.may_leave(job)
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
                        lambda fitting: choice.best_instance(
                            tried,
                            balance=request.config.encode_balance,
                            item=item.identity,
                            session=request.session,
                            prefer=pending.instance,
                            worth=worth,
                            fits=fitting,
                        ),
                        fits,
                    )
                    tried.append(instance)
                    timeout_s = self._timeout_s(job, item, tried)
                    return await self._send(job, pending, instance, timeout_s)
                except ProxyError as error:
                    server_errors += error.engine_failed
                    if error.retryable:  # nor may prefill or decode encode such an item
                        self._fatal.check(request.watched, [item.identity])
                    failure = EncodeFailure(
                        error,
                        tries=len(tried),
                        server_errors=server_errors,
                        elapsed_s=asyncio.get_running_loop().time() - started_s,
                        others=request.watched.pins is None and choice.has_untried(tried, fits),
                        falls_back=falls_back,
                        patience_s=job.left_s,
                    )
                    delay_s = None if request.is_spent else encode_delay_s(failure)
                    if delay_s is None or not job.retries:
                        raise
                    job.retries -= 1
                    await tries.next_try(error, delay_s, 0.0 if falls_back else job.left_s)

    def _instances(self, job: EncodeJob) -> tuple[Choice, Callable[[Instance], bool] | None]:
        """Return the choice among the instances that encode, and the predicate of those that fit.

        If there are no encode instances, consumers that write to the store get encode requests for
        items that must not be sent with their media.
        """
        if self._table.has(Role.ENCODE) or not self._namespaces.any_consumer_writes():
            return self._choice, self._placement.fits(job)

        def writes(instance: Instance) -> bool:
            writes = self._namespaces.writes_to(instance, job.namespace)
            return writes and self._placement.reaches(job, instance)

        return self._consumers, writes

    def _timeout_s(self, job: EncodeJob, item: MMItem, tried: Sequence[Instance]) -> float:
        """Return the time limit of a request: half of what is left while another one may follow.

        An instance that has to fetch media may need all of it.
        """
        choice, fits = self._instances(job)
        may_follow = (
            not item.is_remote
            and len(tried) < MAX_ENCODES
            and job.retries
            and job.request.watched.pins is None
            and any(
                candidate.instance not in tried and (fits is None or fits(candidate.instance))
                for candidate in self._table.usable_candidates(*choice.roles)
            )
        )
        return job.left_s / 2 if may_follow else job.left_s

    async def _send(
        self, job: EncodeJob, pending: PendingItem, instance: Instance, timeout_s: float
    ) -> OutputFacts:
        """Return the output of an item from one request to an instance.

        Raises:
            ProxyError: the instance failed, or rejected the item; or instances have died of it.
        """
        item, request, body = pending.item, job.request, job.request.body
        self._fatal.check(request.watched, [item.identity])
        # New for each request: an instance that failed may still push its output later.
        params = self._transfer.encode_params(job.consumer_reservation, feature_count(body, item))
        using = self._table.track_request(instance, work=Work(0, pending.tokens))
        try:
            with using:
                replied = await self._stages.encode(
                    instance, body, item, params, request, timeout_s
                )
                output = self._transfer.encoded(replied, params)
        except UpstreamFailed as failure:
            request.doubts.add(failure, using, item)
            blamed = (item.identity,)
            error = self._fatal.final_error(failure, instance, request.watched, blamed)
            raise error from failure.__cause__
        request.doubts.settle(instance, item)
        self._fatal.record_survival(request.watched, (item.identity,), body=False)
        reported = media_tokens(output.metadata)
        self._token_counts.learn_tokens(body.get("model"), item.modality, item.pixels, reported)
        if output.namespace is not None:
            self._namespaces.record_namespace(instance, output.namespace)
        # The consumer cannot find an output that is written to another namespace.
        findable = job.namespace is None or output.namespace in {None, job.namespace}
        return output if findable else OutputFacts()

    def _fall_back(self, job: EncodeJob, pending: PendingItem, failure: ProxyError) -> EncodedItem:
        """Return an item that prefill or decode encodes after a failure.

        Raises:
            ProxyError: they may not encode it.
        """
        # `gather_first` replaces the context of what is raised below, which leads to this failure.
        drop_tracebacks(failure)
        error, failed = failure, isinstance(failure, UpstreamFailed | UpstreamTimeout)
        if failed and not self._table.any_serving(*self._instances(job)[0].roles):
            error = NoInstance("no encode instance is reachable", slug="no_encoder", stage="encode")
            error.__cause__ = failure.__cause__ or failure
        request = job.request
        if request.is_spent or not (error.retryable and self._placement.may_leave(job)):
            raise error.at_param(pending.item.param_path) from error.__cause__
        request.record.add_degraded("encode-local")
        return _local(pending)


def _local(pending: PendingItem) -> EncodedItem:
    return EncodedItem(pending.item, OutputFacts(), "local", pending.tokens)


def _hit(item: MMItem, info: EntryInfo | None) -> EncodedItem | None:
    """Return an item with its entry; None without one, or if it is of another modality."""
    if info is None or info.modality != item.modality:
        return None
    return EncodedItem(item, from_entry(info), "hit")
