"""Tries of items at encode instances, each by itself: the first instance, and the next ones."""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

from epd.api.body import dump_json
from epd.api.chat import TEMPLATE, has_system_message
from epd.api.items import MMItem, feature_count
from epd.encoder_cache.identity import OutputKey
from epd.errors import (
    NoInstance,
    ProxyError,
    UpstreamFailed,
    UpstreamTimeout,
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
    body, authorization = job.request.body, job.request.headers.get("Authorization")
    own = {field: body[field] for field in TEMPLATE if field in body}
    template = dump_json(own) if own else None
    system = has_system_message(body)
    return output_key, job.namespace, authorization, template, system, skips_claims


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

    async def encode_item(self, task: EncodeTask) -> OutputFacts:
        """Return the output of an item from an encode instance, or from the next after a failure.

        Raises:
            UpstreamTimeout: the deadline of the request's encode stage has passed.
            ProxyError: all tries failed, or the item itself is invalid.
        """
        job, request, limits = task.job, task.job.request, task.limits
        falls_back = (
            request.config.on_encode_failure == "local"
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
                try:
                    instance = self._next_instance(task, tried)
                    tried.append(instance)
                    return await self._send(task, instance, tried)
                except ProxyError as error:
                    server_errors += error.engine_failed
                    if error.retryable:  # nor may prefill or decode encode such an item
                        self._fatal.check(request.watched, [task.item.identity])
                    failure = EncodeFailure(
                        error,
                        tries=len(tried),
                        server_errors=server_errors,
                        elapsed_s=clock() - started_s,
                        others=request.watched.pins is None
                        and self._choice.has_untried(tried, self._fits(job)),
                        falls_back=falls_back,
                        patience_s=limits.left_s,
                    )
                    delay_s = None if request.is_spent else encode_delay_s(failure)
                    if delay_s is None or not limits.retries:
                        raise
                    limits.retries -= 1
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
        request = task.job.request
        return request.watched.choose_instance(
            "encode",
            lambda fits: self._choice.best_instance(
                tried,
                balance=request.config.encode_balance,
                item=task.item.identity,
                session=request.session,
                prefer=task.plan.instance,
                fits=fits,
            ),
            self._fits(task.job),
        )

    def _timeout_s(self, task: EncodeTask, instance: Instance, tried: Sequence[Instance]) -> float:
        """Return the time limit of a request: half of what is left while another one may follow.

        An instance that has to fetch media may need all of it.
        """
        left_s, fits = task.limits.left_s, self._fits(task.job)
        others = task.job.request.watched.pins is None and any(
            candidate.instance not in tried
            and candidate.instance != instance
            and (fits is None or fits(candidate.instance))
            for candidate in self._table.usable_candidates(Role.ENCODE)
        )
        may_follow = others and len(tried) < MAX_ENCODES and task.limits.retries
        return left_s / 2 if may_follow and not task.item.is_remote else left_s

    async def _send(
        self, task: EncodeTask, instance: Instance, tried: Sequence[Instance]
    ) -> OutputFacts:
        """Return the output of an item from one request to an encode instance.

        `tried` are the instances that have had the item, this one included.

        Raises:
            ProxyError: the instance failed, or rejected the item; or instances have died of it.
        """
        job, item = task.job, task.item
        request, body = job.request, job.request.body
        self._fatal.check(request.watched, [item.identity])
        # New for each request: an instance that failed may still push its output later.
        params = self._transfer.encode_params(job.consumer_reservation, feature_count(body, item))
        using = self._table.track_request(instance, work=Work(0, task.plan.tokens))
        try:
            with using:
                timeout_s = self._timeout_s(task, instance, tried)
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

    def _fits(self, job: EncodeJob) -> Callable[[Instance], bool] | None:
        """Return the predicate of the instances with the consumer's namespace; None for all."""
        if job.namespace is None:
            return None
        return partial(self._namespaces.shares_namespace, namespace=job.namespace)
