"""Encoder outputs of a request's items: from the store, or from an encode instance.

The steps for one item, each taken unless an earlier one has the output:

    method                   step                              source of the output
    Encoder._lookup          lookup, which claims misses       the store has it
    Encoder._leave_items     a fleet without encode instances  prefill or decode encodes it, or
                                                               another request's consumer does
    Encoder._missing_items   place, by the request's policy    prefill or decode encodes it
    Encoder._encode_item     flight, shared by this process    another request encodes it
    Encoder._encode_once     claim, shared by all proxies      another proxy encodes it
    Encoder._try_instances   instance, and the next one        an encode instance encodes it
    Encoder._fall_back       after the last failure            prefill or decode encodes it
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ec_store.keys import EntryKey
from epd.aio import Flights, gather_first
from epd.api.body import dump_json
from epd.api.chat import TEMPLATE, has_system_message
from epd.api.items import MMItem, feature_count
from epd.encoder_cache.claims import Claims, EncodeClaim
from epd.encoder_cache.consumer_claims import ConsumerClaims, ConsumerWrites
from epd.encoder_cache.identity import Identifiers, OutputKey, output_key
from epd.encoder_cache.lookup import Lookup
from epd.errors import (
    NoInstance,
    ProxyError,
    UnknownMedia,
    UpstreamFailed,
    UpstreamTimeout,
    drop_tracebacks,
    no_store,
)
from epd.request.encode_job import EncodeJob
from epd.request.item_tokens import TokenCounts, media_tokens
from epd.request.placement import AT_CONSUMER, OVERLOADED, PendingItem, Placement
from epd.request.recovery import MAX_ENCODES, EncodeFailure, encode_delay_s
from epd.request.stages import Stages
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
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

MAX_RETRIES = 32
"""Maximum number of further tries of one request's items together. The death of an instance fails
at most the items that are sent at the same time."""


@dataclass(slots=True, eq=False)
class EncodeStage:
    """Encode stage of one request, with the limits of all its items and their tries.

    Attributes:
        job: the items.
        lookup: the items in the store; None if there is no store, or if it did not answer.
        until_s: deadline, on the event loop's clock.
        choice: choice among the instances that encode.
        sharing: what requests with the same output must have in common to share its encode.
        falls_back: whether prefill or decode may encode items after failures.
        fits: predicate of the instances with the consumer's namespace; None for all.
        retries: number of further tries that are left.
    """

    job: EncodeJob
    lookup: Lookup | None
    until_s: float
    choice: Choice
    sharing: Hashable
    falls_back: bool
    fits: Callable[[Instance], bool] | None
    retries: int = MAX_RETRIES

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.until_s - asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Provider of the encoder outputs of requests. Belongs to one event loop.

    `_choice` is among the encode instances, and `_consumers` among those that prefill. If there are
    no encode instances, consumers that write to the store get encode requests for items that must
    not be sent with their media.
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
    _writes: ConsumerWrites | None
    _identifiers: Identifiers = field(default_factory=Identifiers)
    _flights: Flights[Hashable, "tuple[EncodedItem, Span | None]"] = field(default_factory=Flights)
    _retries: Retries = field(default_factory=Retries)

    def consumer_claims(self) -> ConsumerClaims | None:
        """Return the claims of a request, none yet, for `encode`; None without a store."""
        return None if self._writes is None else ConsumerClaims(self._writes)

    async def encode(
        self, job: EncodeJob, claims: ConsumerClaims | None = None
    ) -> list[EncodedItem]:
        """Return the source and the known facts of each item's output; encode missing ones.

        At most `AT_ONCE` encodes of one request run in parallel, and all of them end within
        `--encode-timeout-s`. `claims` get those of the entries that the request's consumer will
        encode; without a consumer it is None.

        Raises:
            ProxyError: an item failed; encodes of the others that no request shares are cancelled.
        """
        items, record = job.request.items, job.request.record
        if self._placement.skips_encode(job):
            return [EncodedItem(item, OutputFacts(), "local") for item in items]
        record.begin_encode()
        pending = [PendingItem(item, output_key(job.request.body, item)) for item in items]
        encoded = list[EncodedItem]()
        async with self._lookup(job, pending) as lookup:
            record.wait_for("encode")
            if any(item.stored is None for item in pending):
                stage = self._begin_stage(job, lookup)
                if job.course.local and job.has_all_media and claims is not None:
                    await self._leave_items(stage, pending, claims)
                missing = self._missing_items(stage, pending)
                encode_item = partial(self._encode_item, stage)
                if len(missing) > 1:
                    encoded = await gather_first(encode_item, missing, AT_ONCE)
                else:
                    encoded = [await encode_item(item) for item in missing]
        others = iter(encoded)
        encoded_items = [item.known_output or next(others) for item in pending]
        record.add_items([(known.result, known.item.modality) for known in encoded_items])
        return encoded_items

    @asynccontextmanager
    async def _lookup(
        self, job: EncodeJob, items: Sequence[PendingItem]
    ) -> AsyncIterator[Lookup | None]:
        """Look up the items in the store, and hold the claims of missing ones until the exit.

        None means that there is no store, or that it did not answer.
        """
        if self._claims is None:
            yield None
            return
        namespace = job.namespace or self._claims.cache.namespace(job.request.body.get("model"))
        for pending in items:
            skipped = job.reencode and pending.item.has_media
            if skipped or namespace is None or pending.output_key is None:
                continue
            if identifier := self._identifiers.identifier_of(pending.output_key):
                pending.entry_key = EntryKey(namespace, identifier)
        keys = [*dict.fromkeys(pending.entry_key for pending in items if pending.entry_key)]
        if not keys:
            yield Lookup([])
            return
        with job.request.record.time_stage("store", "lookup"):
            lookup = await self._claims.look_up(keys, patient=not job.has_all_media)
        for pending in items:
            info = lookup.found and pending.entry_key and lookup.found.get(pending.entry_key)
            if info and info.modality == pending.item.modality:
                pending.stored = from_entry(info)
        try:
            yield None if lookup.found is None else lookup
        finally:
            self._claims.end_lookup(lookup)

    def _begin_stage(self, job: EncodeJob, lookup: Lookup | None) -> EncodeStage:
        """Return the encode stage of a request. Its time begins now.

        Only requests with the same Authorization and the same template share an encode, all of them
        with a system message or none: a 401, or a refusal by a template, must not fail the others.
        """
        body, authorization = job.request.body, job.request.headers.get("Authorization")
        fields = {name: body[name] for name in TEMPLATE if name in body}
        template = dump_json(fields) if fields else None
        ignores_claims = job.reencode or lookup is None
        fits = self._placement.fits(job)
        by_consumers = not self._table.has(Role.ENCODE) and self._namespaces.any_consumer_writes()
        if by_consumers:
            fits = partial(self._namespaces.writes_to, namespace=job.namespace)
        return EncodeStage(
            job,
            lookup,
            until_s=asyncio.get_running_loop().time() + job.request.config.encode_timeout_s,
            choice=self._consumers if by_consumers else self._choice,
            sharing=(
                job.namespace,
                authorization,
                template,
                has_system_message(body),
                ignores_claims,
            ),
            falls_back=self._placement.may_leave(job),
            fits=fits,
        )

    async def _leave_items(
        self, stage: EncodeStage, items: Sequence[PendingItem], claims: ConsumerClaims
    ) -> None:
        """Leave the missing items to the consumer, or wait for other requests' consumers.

        A request waits only if its own consumer has to encode none of its items: otherwise it is
        sent with all its media anyway, and two requests must not wait for each other.
        """
        missing = [pending for pending in items if pending.stored is None]
        keys = [pending.entry_key for pending in missing if pending.entry_key is not None]
        claims.keep_only(keys)
        shares = stage.lookup is not None and self._namespaces.consumers_share()
        late = [claims.is_late(key) for key in keys]
        claimed = [claims.take(key) for key in keys if shares and not claims.is_late(key)]
        waits = shares and len(keys) == len(missing) and not any(claimed) and not any(late)
        # Half of the time is left for the encodes of this request.
        until_s = asyncio.get_running_loop().time() + min(claims.wait_s, stage.left_s / 2)
        # First those that no other request encodes: this one gets their claim at once.
        for pending in sorted(missing, key=partial(self._is_under_way, stage)):
            found = None
            if waits and pending.entry_key is not None:
                left_s = max(0.0, until_s - asyncio.get_running_loop().time())
                with stage.job.request.record.wait_span(pending.item):
                    found = await claims.wait_for_entry(pending.entry_key, left_s)
                # Meanwhile the item may have ended the instances of other requests.
                self._fatal.check(stage.job.request.watched, [pending.item.identity])
                waits = found is not None
            if found is not None and found.modality == pending.item.modality:
                pending.stored = from_entry(found)
                stage.job.request.record.add_wait()
            else:
                pending.place = AT_CONSUMER

    def _missing_items(self, stage: EncodeStage, items: Sequence[PendingItem]) -> list[PendingItem]:
        """Place the items that are not stored. Return those that encode instances encode.

        Raises:
            ProxyError: one of them has no media.
        """
        record = stage.job.request.record
        self._placement.place_items(stage.job, items, partial(self._is_under_way, stage))
        if places := [pending.place for pending in items if pending.place is not None]:
            record.add_places([place.labels for place in places])
            if OVERLOADED in places:
                record.add_degraded("encode-local")
        missing = [pending for pending in items if pending.known_output is None]
        for pending in missing:
            if not pending.item.has_media:
                raise _unknown(pending.item, stage.lookup)
        return missing

    def _is_under_way(self, stage: EncodeStage, pending: PendingItem) -> bool:
        """Return whether this or another proxy on the same store is encoding an item."""
        if (pending.output_key, stage.sharing) in self._flights:
            return True
        key, lookup = pending.entry_key, stage.lookup
        if self._claims is None or key is None or lookup is None:
            return False
        return self._claims.is_encoded_elsewhere(key, lookup)

    async def _encode_item(self, stage: EncodeStage, pending: PendingItem) -> EncodedItem:
        """Return an item that is not stored, after its encode.

        Requests that need an output at the same time share its encode. Two kinds of output are not
        shared: one that is pushed to a consumer, and one with a key that an engine makes.

        Raises:
            ProxyError: the encode failed, and prefill or decode may not encode the item either.
        """
        item, request = pending.item, stage.job.request
        try:
            if pending.output_key is None or self._transfer.pushed:
                return EncodedItem(item, await self._try_instances(stage, pending), "encoded")
            flight = pending.output_key, stage.sharing
            waits = flight in self._flights
            with request.record.wait_span(item) if waits else nullcontext() as waiting:
                work = partial(self._encode_once, stage, pending, pending.output_key, waiting)
                encoded_item, span = await self._flights.try_join(flight, work)
                if waiting is not None and span is not None:
                    waiting.link(span)
        except ProxyError as failure:
            return self._fall_back(stage, pending, failure)
        if encoded_item.item is not item:  # the result of another request
            encoded_item = EncodedItem(item, encoded_item.encoded, "hit")
        if encoded_item.result == "hit":
            request.record.add_wait()
        return encoded_item

    async def _encode_once(
        self,
        stage: EncodeStage,
        pending: PendingItem,
        output: OutputKey,
        earlier_wait: "Span | None",
    ) -> "tuple[EncodedItem, Span | None]":
        """Return an item after its encode, which is skipped if another proxy already encodes it.

        The second value is the span of the request to an encode instance, if it is traced. The span
        of the wait for another request's encode that failed ends here.
        """
        if earlier_wait is not None:
            earlier_wait.end_span()
        item, request, key = pending.item, stage.job.request, pending.entry_key
        if self._claims is None or key is None or stage.lookup is None or stage.job.reencode:
            encoded = await self._try_instances(stage, pending)
        else:
            with EncodeClaim(self._claims, key) as claim:
                if not claim.is_held:
                    with request.record.wait_span(item):
                        # Half of the time is left for an encode of this proxy.
                        found = await claim.wait_for_turn(stage.left_s / 2)
                    if found is not None and found.modality == item.modality:
                        return EncodedItem(item, from_entry(found), "hit"), None
                encoded = await self._try_instances(stage, pending)
                claim.entry_coming = encoded.identifier is not None
        if self._claims is not None and encoded.namespace is not None:
            self._claims.cache.learn_namespace(output.model, encoded.namespace)
        if encoded.identifier is not None:
            self._identifiers.learn_identifier(output, encoded.identifier)
        span = (
            None
            if request.record.span is None
            else request.record.span.latest_child("encode", item)
        )
        return EncodedItem(item, encoded, "encoded"), span

    async def _try_instances(self, stage: EncodeStage, pending: PendingItem) -> OutputFacts:
        """Return the output of an item from an encode instance, or from the next after a failure.

        Raises:
            UpstreamTimeout: the deadline of the request's encode stage has passed.
            ProxyError: all tries failed, or the item itself is invalid.
        """
        item, request = pending.item, stage.job.request
        tried: list[Instance] = []
        server_errors = 0
        started_s = asyncio.get_running_loop().time()
        with self._retries.tries(MAX_ENCODES) as tries:
            while True:
                if not stage.left_s:
                    raise UpstreamTimeout(
                        "the encode stage of the request did not end in time",
                        slug="encode_timeout",
                        stage="encode",
                    )
                try:
                    instance = request.watched.choose_instance(
                        "encode",
                        lambda fits: stage.choice.best_instance(
                            tried,
                            balance=request.config.encode_balance,
                            item=item.identity,
                            session=request.session,
                            prefer=pending.instance,
                            fits=fits,
                        ),
                        stage.fits,
                    )
                    tried.append(instance)
                    return await self._send(stage, pending, tried)
                except ProxyError as error:
                    server_errors += error.engine_failed
                    if error.retryable:  # nor may prefill or decode encode such an item
                        self._fatal.check(request.watched, [item.identity])
                    failure = EncodeFailure(
                        error,
                        tries=len(tried),
                        server_errors=server_errors,
                        elapsed_s=asyncio.get_running_loop().time() - started_s,
                        others=request.watched.pins is None
                        and stage.choice.has_untried(tried, stage.fits),
                        falls_back=stage.falls_back,
                        patience_s=stage.left_s,
                    )
                    delay_s = None if request.is_spent else encode_delay_s(failure)
                    if delay_s is None or not stage.retries:
                        raise
                    stage.retries -= 1
                    await tries.next_try(error, delay_s, 0.0 if stage.falls_back else stage.left_s)

    async def _send(
        self,
        stage: EncodeStage,
        pending: PendingItem,
        tried: Sequence[Instance],
    ) -> OutputFacts:
        """Return the output of an item from one request to the last of the `tried` instances.

        Raises:
            ProxyError: the instance failed, or rejected the item; or instances have died of it.
        """
        job, item, instance = stage.job, pending.item, tried[-1]
        request, body = job.request, job.request.body
        self._fatal.check(request.watched, [item.identity])
        # New for each request: an instance that failed may still push its output later.
        params = self._transfer.encode_params(job.consumer_reservation, feature_count(body, item))
        using = self._table.track_request(instance, work=Work(0, pending.tokens))
        try:
            with using:
                timeout_s = self._timeout_s(stage, item, tried)
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

    def _timeout_s(self, stage: EncodeStage, item: MMItem, tried: Sequence[Instance]) -> float:
        """Return the time limit of a request: half of what is left while another one may follow.

        An instance that has to fetch media may need all of it.
        """
        may_follow = (
            not item.is_remote
            and len(tried) < MAX_ENCODES
            and stage.retries
            and stage.job.request.watched.pins is None
            and any(
                candidate.instance not in tried
                and (stage.fits is None or stage.fits(candidate.instance))
                for candidate in self._table.usable_candidates(*stage.choice.roles)
            )
        )
        return stage.left_s / 2 if may_follow else stage.left_s

    def _fall_back(
        self, stage: EncodeStage, pending: PendingItem, failure: ProxyError
    ) -> EncodedItem:
        """Return an item that prefill or decode encodes after a failure.

        Raises:
            ProxyError: they may not encode it.
        """
        # `gather_first` replaces the context of what is raised below, which leads to this failure.
        drop_tracebacks(failure)
        error, failed = failure, isinstance(failure, UpstreamFailed | UpstreamTimeout)
        if failed and not self._table.any_serving(*stage.choice.roles):
            error = NoInstance("no encode instance is reachable", slug="no_encoder", stage="encode")
            error.__cause__ = failure.__cause__ or failure
        request = stage.job.request
        if request.is_spent or not (error.retryable and stage.falls_back):
            raise error.at_param(pending.item.param_path) from error.__cause__
        request.record.add_degraded("encode-local")
        return EncodedItem(pending.item, OutputFacts(), "local", pending.tokens)


def _unknown(item: MMItem, lookup: Lookup | None) -> ProxyError:
    if lookup is None:
        return no_store("the encoder store did not answer; retry later, or send the media")
    return UnknownMedia(
        "no media are stored under this uuid; send them again", param=item.param_path
    )
