"""The load of an instance with all its ranks, from its reports and the local requests. No I/O."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from epd.routing.encode_work import EncodeWork
from epd.routing.engine_load import EngineLoad
from epd.routing.prefix import NO_PREFIX, Prefix, PrefixCache
from epd.routing.rendezvous import cheapest_engine
from epd.routing.reports import Host, KVMoved, Report

REPORT_TTL_INTERVALS = 3
"""Age of a report, in intervals, after which it expires."""

MIN_REPORT_TTL_S = 2.0
"""Minimum age at which a report expires, for short intervals."""

MAX_DOUBLINGS = 5
"""Maximum number of doublings of the interval for an instance without reports: a factor of 32."""


class Prompts(NamedTuple):
    """Estimated tokens of the prompts that an instance has received from this proxy.

    Attributes:
        matched: the part of them that was expected in the prefix cache.
    """

    tokens: int
    matched: int


class Load(EngineLoad):
    """The load of one instance.

    Attributes:
        weight: relative share of the load; 0 drains the instance. Its `share` is then 1, because
            drained instances are used equally.
        ranks: loads of its data-parallel ranks; empty if the instance distributes requests itself.
        encode: media items that the instance encodes, and its speed.
        namespace: namespace of its encoder outputs in the store; empty if it is unknown.
        writes_outputs: whether it writes its encoder outputs to the store; None if it is unknown.
        host: server of its host's memory, as its metrics name it; None if they name none.
        block_tokens: tokens of a block of its KV cache; 0 if it is unknown.
        kv_bytes_per_s: mean bandwidth of the last KV transfers that it reported; None before any.
        answering: number of local requests with an answer that has begun.
        report: the last report; None without a recent one.
        progress_s: time of the last report with progress.
        stalled_s: time since which reports show no progress, while requests run there and local
            requests wait for them.
    """

    def __init__(
        self,
        url: str,
        weight: float = 1.0,
        ranks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(xxh3_64_intdigest(url.encode()), clock)
        self.ranks = tuple(
            EngineLoad(xxh3_64_intdigest(b"%d" % rank, self.seed), clock) for rank in range(ranks)
        )
        self.encode = EncodeWork(clock)
        self.report: Report | None = None
        self.namespace = ""
        self.writes_outputs: bool | None = None
        self.host: Host | None = None
        self.block_tokens = 0
        self.kv_bytes_per_s: float | None = None
        self.answering = 0
        self.progress_s = self.stalled_s = self._since_s = -math.inf
        self._expires_s = math.inf
        self._failures = 0
        self._kv_moved: KVMoved | None = None
        self._last_rank = -1
        self._progress: int | None = None
        self.set_weight(weight)

    def set_weight(self, weight: float) -> None:
        self.weight = weight
        self.set_share(weight or 1.0)
        for rank in self.ranks:
            rank.set_share(self.share / len(self.ranks))

    @property
    def engines(self) -> Sequence[EngineLoad]:
        """What takes its requests: its ranks, or the instance itself."""
        return self.ranks or (self,)

    @property
    def caches(self) -> Sequence[PrefixCache]:
        return [engine.cache for engine in self.engines]

    @property
    def prompts(self) -> Prompts:
        """The prompts of this proxy so far, if the instance is chosen by their content."""
        caches = self.caches
        return Prompts(
            sum(cache.prompt_tokens for cache in caches), sum(cache.matched for cache in caches)
        )

    @property
    def pending_tokens(self) -> int:
        """Estimated tokens of this proxy's prompts that wait for their prefill, or are in it."""
        return sum([cache.pending for cache in self.caches])

    @property
    def precise(self) -> bool:
        """Whether events of the engines keep the content of all prefix caches up to date."""
        return all(cache.precise for cache in self.caches)

    def next_rank(self, prefix: Prefix = NO_PREFIX) -> int | None:
        """Return the rank for a prompt: the cheapest one for its prefix, or else the lowest load.

        Equal ones take turns. None if the instance distributes requests itself.
        """
        ranks = self.ranks
        if not ranks:
            return None
        if prefix.links:
            return ranks.index(cheapest_engine(ranks, prefix))
        first = self._last_rank + 1
        order = [*range(first, len(ranks)), *range(first)]
        self._last_rank = min(order, key=lambda rank: ranks[rank].value)
        return self._last_rank

    def cache_of(self, rank: int | None) -> PrefixCache:
        return self.ranks[rank].cache if self.ranks and rank is not None else self.cache

    def begin_request(self, rank: int | None = None) -> None:
        super().begin_request()
        if self.ranks and rank is not None:
            self.ranks[rank].begin_request()

    def end_request(self, rank: int | None = None) -> None:
        super().end_request()
        if self.ranks and rank is not None:
            self.ranks[rank].end_request()

    def expire_report(self, now_s: float) -> None:
        if now_s >= self._expires_s:
            self._drop_report()

    def report_due(self, now_s: float, interval_s: float) -> bool:
        """Return whether a report is due. After True, the caller must ask and call `record_report`.

        The interval may change between calls.
        """
        # A different interval for each instance, so that the reports do not coincide.
        intervals = 2.0**self._failures if self._failures else 0.9 + 0.2 * self.seed * 2.0**-64
        if now_s < self._since_s + intervals * interval_s:
            return False
        self._since_s = math.inf
        for engine in (self, *self.ranks):
            engine.report_requested()
        return True

    def record_report(self, report: Report | None, now_s: float, interval_s: float) -> None:
        """Record a report; None after a failure. The interval is the current one of reports."""
        self._since_s = now_s
        if report is None:
            self._failures = min(self._failures + 1, MAX_DOUBLINGS)
            return
        self._failures = 0
        self._expires_s = now_s + max(interval_s * REPORT_TTL_INTERVALS, MIN_REPORT_TTL_S)
        self.report = report
        self.block_tokens = report.block_tokens or self.block_tokens
        before, self._progress = self._progress, report.progress
        moved = report.progress != before
        if moved and before is not None:
            self.progress_s = now_s
        if moved or not (report.running and self.under_way):
            self.stalled_s = now_s
        for cache in self.caches if report.kv_tokens else ():
            cache.limit = report.kv_tokens
        self._measure_kv(report.kv_moved)
        self.set_reported(report.waiting + report.running)
        # A report that does not cover every rank is ignored for all of them.
        complete = report.engines.keys() == set(range(len(self.ranks)))
        for number, rank in enumerate(self.ranks):
            rank.set_reported(report.engines[number] if complete else 0)

    def _measure_kv(self, moved: KVMoved) -> None:
        """Compute the bandwidth of the transfers since the previous report, if there were any."""
        before = self._kv_moved or moved
        self._kv_moved = moved
        moved_bytes, elapsed_s = moved.bytes - before.bytes, moved.transfer_s - before.transfer_s
        if moved_bytes > 0 and elapsed_s > 0:  # less than before: the engine has restarted
            self.kv_bytes_per_s = moved_bytes / elapsed_s

    def leave(self) -> None:
        """Forget what is known of the engines of a removed instance.

        It may be added again before its requests end.
        """
        self._since_s = -math.inf
        self.namespace, self.writes_outputs, self.host = "", None, None
        self._drop_report()
        self.forget_engines()

    def forget_engines(self) -> None:
        """Forget prefix caches and speed: the engines have ended, or may have."""
        for cache in self.caches:
            cache.clear()
        self.block_tokens = 0
        self.encode.forget_speed()

    def _drop_report(self) -> None:
        self.report = None
        self._expires_s = math.inf
        for engine in (self, *self.ranks):
            engine.set_reported(0)
