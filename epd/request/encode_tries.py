"""Tries of items at encode instances: their instances, groups of items, and further tries.

The items of a request that need an encode instance at the same moment are assigned to instances
together. Those with the same instance may share one request (`FirstTries`). If that is rejected,
each of its items is sent alone to the same instance. If it fails, each goes on alone, by the rules
for a failed try of its own.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from epd.aio import Flights
from epd.api.body import dump_json
from epd.api.chat import TEMPLATE, has_system_message
from epd.api.items import MMItem, feature_count
from epd.encoder_cache.identity import OutputKey
from epd.errors import (
    NoInstance,
    ProxyError,
    UpstreamDied,
    UpstreamFailed,
    UpstreamTimeout,
    drop_tracebacks,
)
from epd.request.item_tokens import TokenCounts, media_tokens
from epd.request.recovery import MAX_ENCODES, EncodeFailure, encode_delay_s
from epd.request.stage_inputs import EncodeJob, ItemPlan
from epd.request.stages import Stages
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance, Role
from epd.routing.namespaces import Namespaces
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable, Work
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import OutputFacts

GROUPED = frozenset({"image", "audio"})
"""Modalities of the items that may share a request. A video may have a second output, its sound."""


MAX_RETRIES = 32
"""Maximum number of further tries of one request's items together. The death of an instance fails
at most the items that are sent at the same time."""


@dataclass(slots=True, eq=False)
class EncodeLimits:
    """Limits of the encode stage of one request, over all its items and their tries.

    Attributes:
        until_s: deadline, on the event loop's clock.
        retries: number of further tries that are left.
    """

    until_s: float
    retries: int = MAX_RETRIES

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.until_s - asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True, eq=False)
class EncodeTask:
    """Encode of one item. Equal only to itself.

    Attributes:
        job: all items of the request.
        item: the item.
        output_key: the output that it needs; None if an engine makes the item's key.
        plan: plan for the item.
        skips_claims: whether to ignore other proxies' claims, because their outputs would be
            unusable.
        limits: limits of all items of the request.
    """

    job: EncodeJob
    item: MMItem
    output_key: OutputKey | None
    plan: ItemPlan
    skips_claims: bool
    limits: EncodeLimits


def flight_key(job: EncodeJob, output_key: OutputKey, *, skips_claims: bool) -> Hashable:
    """Return the key under which requests share the encode of an output.

    Only requests with the same Authorization and the same template share it, all of them with a
    system message or none: a 401, or a refusal by a template, must not fail the others.
    """
    body, authorization = job.request.body, job.context.headers.get("Authorization")
    own = {field: body[field] for field in TEMPLATE if field in body}
    template = dump_json(own) if own else None
    system = has_system_message(body)
    return output_key, job.namespace, authorization, template, system, skips_claims


@dataclass(frozen=True, slots=True, eq=False)
class EncodeGroup:
    """Items of one encode request. Equal only to itself.

    Attributes:
        instance: the encode instance.
        tasks: its items, in order; of one modality if there are several.
    """

    instance: Instance
    tasks: tuple[EncodeTask, ...]


@dataclass(slots=True, eq=False)
class FirstTries:
    """First tries of one request's items, which arrive one by one.

    Args:
        assign: assigns items to instances. Each item is in one group.
        send: sends the request of a group, and returns the output of each item.
    """

    _assign: Callable[[Sequence[EncodeTask]], Sequence[EncodeGroup]]
    _send: Callable[[EncodeGroup], Coroutine[Any, Any, Sequence[OutputFacts]]]
    _arrived: list[EncodeTask] = field(default_factory=list)
    _groups: dict[EncodeTask, EncodeGroup] = field(default_factory=dict)
    _flights: Flights[EncodeGroup, Sequence[OutputFacts]] = field(default_factory=Flights)

    async def group_of(self, task: EncodeTask) -> EncodeGroup:
        """Return the group of an item.

        The items of a request that do not wait for anything else arrive in the same turn of the
        event loop. One turn later they are assigned together.

        Raises:
            NoInstance: there is no instance.
        """
        self._arrived.append(task)
        try:
            await asyncio.sleep(0)
            if task not in self._groups:
                new = [arrived for arrived in self._arrived if arrived not in self._groups]
                for group in self._assign(new):
                    self._groups.update(dict.fromkeys(group.tasks, group))
        finally:
            self._arrived.remove(task)
        return self._groups[task]

    async def output_of(self, task: EncodeTask, group: EncodeGroup) -> OutputFacts:
        """Return the output of an item. If its group is rejected, it is sent again alone.

        The first item of a group sends the request, which is cancelled when no item needs it.

        Raises:
            ProxyError: the instance failed, or rejected the item alone.
        """
        if len(group.tasks) > 1:
            try:
                outputs = await self._flights.join(group, partial(self._send, group))
                return outputs[group.tasks.index(task)]
            except ProxyError as failure:
                if failure.retryable or failure.died:
                    raise
                drop_tracebacks(failure)
        [encoded] = await self._send(EncodeGroup(group.instance, (task,)))
        return encoded


@dataclass(frozen=True, slots=True, eq=False)
class EncodeTries:
    """Requests to encode instances for the items of requests. Belongs to one event loop."""

    _table: InstanceTable
    _choice: Choice
    _stages: Stages
    _namespaces: Namespaces
    _transfer: ECTransfer
    _fatal: FatalRequests
    _token_counts: TokenCounts
    _retries: Retries = field(default_factory=Retries)

    def first_tries(self, job: EncodeJob) -> FirstTries | None:
        """Return the common first tries of a job's items; None if each is sent by itself.

        The balance `least_load` assigns the items of a request together, in groups or not. A
        request in quarantine has one instance for all of them.
        """
        config, quarantined = job.context.config, job.context.watched.pins is not None
        together = config.encode_group_items > 1 or config.encode_balance == "least_load"
        if quarantined or not together:
            return None
        return FirstTries(partial(self._assign_groups, job), partial(self._send, job))

    async def encode_item(self, task: EncodeTask, first_tries: FirstTries | None) -> OutputFacts:
        """Return the output of an item from an encode instance, or from the next after a failure.

        Only its first try may be common with other items of the request.

        Raises:
            UpstreamTimeout: the deadline of the request's encode stage has passed.
            ProxyError: all tries failed, or the item itself is invalid.
        """
        job, context, limits = task.job, task.job.context, task.limits
        falls_back = (
            context.config.on_encode_failure == "local"
            and job.has_all_media
            and not self._transfer.pushed
        )
        clock = asyncio.get_running_loop().time
        tried: list[Instance] = []
        server_errors = 0
        started_s = clock()
        with self._retries.tries(MAX_ENCODES) as tries:
            while True:
                if not limits.left_s:
                    raise UpstreamTimeout(
                        "the encode stage of the request did not end in time",
                        slug="encode_timeout",
                        stage="encode",
                    )
                alone = True
                try:
                    if tried or first_tries is None:
                        group = EncodeGroup(self._next_instance(task, tried), (task,))
                        tried.append(group.instance)
                        [encoded] = await self._send(job, group, tried)
                        return encoded
                    group = await first_tries.group_of(task)
                    tried.append(group.instance)
                    alone = len(group.tasks) == 1
                    return await first_tries.output_of(task, group)
                except ProxyError as error:
                    server_errors += error.engine_failed and alone
                    if error.retryable:  # nor may prefill or decode encode such an item
                        self._fatal.check(context.watched, [task.item.identity])
                    failure = EncodeFailure(
                        error,
                        tries=len(tried),
                        server_errors=server_errors,
                        elapsed_s=clock() - started_s,
                        others=context.watched.pins is None
                        and self._choice.has_untried(tried, self._fits(job)),
                        falls_back=falls_back,
                        patience_s=limits.left_s,
                    )
                    delay_s = None if context.is_spent else encode_delay_s(failure)
                    if delay_s is None or not limits.retries:
                        raise
                    limits.retries -= alone
                    await tries.next_try(error, delay_s, 0.0 if falls_back else limits.left_s)

    def error_after_last_try(self, error: ProxyError) -> ProxyError:
        """Return the final error of an item's encode, after the last try."""
        failed = isinstance(error, UpstreamFailed | UpstreamTimeout)
        if not failed or self._table.any_serving(Role.ENCODE):
            return error
        nothing = NoInstance("no encode instance is reachable", slug="no_encoder", stage="encode")
        nothing.__cause__ = error.__cause__ or error
        return nothing

    def _next_instance(self, task: EncodeTask, tried: Sequence[Instance]) -> Instance:
        context = task.job.context
        return context.watched.choose_instance(
            "encode",
            lambda fits: self._choice.best_instance(
                tried,
                balance=context.config.encode_balance,
                item=task.item.identity,
                session=context.session,
                prefer=task.plan.instance,
                fits=fits,
            ),
            self._fits(task.job),
        )

    def _assign_groups(self, job: EncodeJob, tasks: Sequence[EncodeTask]) -> Sequence[EncodeGroup]:
        """Assign items to instances, and group those with the same instance and modality.

        Raises:
            NoInstance: there is no instance.
        """
        context = job.context
        instances = self._choice.spread_items(
            [task.item.identity for task in tasks],
            [task.plan.tokens for task in tasks],
            [task.plan.instance for task in tasks],
            balance=context.config.encode_balance,
            session=context.session,
            fits=self._fits(job),
        )
        together: dict[object, list[EncodeTask]] = {}
        for task, instance in zip(tasks, instances, strict=True):
            may_share = self._may_share(job, task.item)
            key = (instance, task.item.modality) if may_share else task
            together.setdefault(key, []).append(task)
        instance_of = dict(zip(tasks, instances, strict=True))
        group_size = context.config.encode_group_items
        return [
            EncodeGroup(instance_of[members[0]], tuple(members[start : start + group_size]))
            for members in together.values()
            for start in range(0, len(members), group_size)
        ]

    def _may_share(self, job: EncodeJob, item: MMItem) -> bool:
        """Return whether an item may share its request.

        Media that an instance has to fetch would delay the others, or fail them. An item that may
        have killed an instance must be blamed alone.
        """
        watched = job.context.watched
        suspect = watched.deaths is not None or self._fatal.is_suspect(watched, item.identity)
        return item.modality in GROUPED and not item.is_remote and not suspect

    def _timeout_s(self, group: EncodeGroup, tried: Sequence[Instance]) -> float:
        """Return the time limit of a request: half of what is left while another one may follow.

        An instance that has to fetch media may need all of it.
        """
        task = group.tasks[0]
        left_s, fits = task.limits.left_s, self._fits(task.job)
        others = task.job.context.watched.pins is None and any(
            candidate.instance not in tried
            and candidate.instance != group.instance
            and (fits is None or fits(candidate.instance))
            for candidate in self._table.usable_candidates(Role.ENCODE)
        )
        may_follow = others and len(tried) < MAX_ENCODES and task.limits.retries
        return left_s / 2 if may_follow and not task.item.is_remote else left_s

    async def _send(
        self, job: EncodeJob, group: EncodeGroup, tried: Sequence[Instance] = ()
    ) -> Sequence[OutputFacts]:
        """Return the outputs of the items of one request to an encode instance.

        `tried` are the instances that have had the item, this one included.

        Raises:
            ProxyError: the instance failed, or rejected an item; or instances have died of an item.
        """
        instance, context, body = group.instance, job.context, job.request.body
        items = [task.item for task in group.tasks]
        self._fatal.check(context.watched, [item.identity for item in items])
        tokens = sum([task.plan.tokens for task in group.tasks])
        # New for each request: an instance that failed may still push its output later.
        item_params = [
            self._transfer.encode_params(job.consumer_reservation, feature_count(body, item))
            for item in items
        ]
        params = item_params[0] if len(items) == 1 else self._transfer.group_params(item_params)
        using = self._table.track_request(instance, work=Work(0, tokens))
        try:
            with using:
                timeout_s = self._timeout_s(group, tried)
                replied = await self._stages.encode(
                    instance, body, items, params, context, timeout_s
                )
                encoded = list(map(self._transfer.encoded, replied, item_params))
        except UpstreamFailed as failure:
            if len(items) == 1:  # a group may have failed by any of its items
                context.doubts.add(failure, using, items[0])
            if not isinstance(failure, UpstreamDied):
                raise context.watched.final_error(failure, instance) from failure.__cause__
            blamed = (items[0].identity,) if len(items) == 1 else ()
            error = self._fatal.after(failure, instance, context.watched, blamed)
            raise error from failure.__cause__
        for item in items:
            context.doubts.settle(instance, item)
        processed = (item.identity for item in items)
        self._fatal.record_survival(context.watched, processed, body=False)
        for item, output in zip(items, encoded, strict=True):
            reported = media_tokens(output.metadata)
            self._token_counts.learn_tokens(body.get("model"), item.modality, item.pixels, reported)
            if output.namespace is not None:
                self._namespaces.record_namespace(instance, output.namespace)
        if job.namespace is None:
            return encoded
        # The consumer cannot find an output that is written to another namespace.
        findable = {None, job.namespace}
        return [output if output.namespace in findable else OutputFacts() for output in encoded]

    def _fits(self, job: EncodeJob) -> Callable[[Instance], bool] | None:
        """Return the predicate of the instances with the consumer's namespace; None for all."""
        if job.namespace is None:
            return None
        return partial(self._namespaces.shares_namespace, namespace=job.namespace)
