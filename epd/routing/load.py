"""The load of one instance, as far as a proxy can determine it. No I/O.

An instance's report includes local requests (those of this proxy), as of some moment between the
question and the answer. The highest number of local requests in that time is therefore subtracted
from the report. The rest comes from other proxies, or directly from clients:

    load = local requests now + max(0, reported - highest number of local requests meanwhile)

So no local request is counted twice, local requests count as soon as they begin or end, and new
requests of others count from the next report on. A request that an instance splits into several
(`n`, several prompts) counts as all its parts. Without a recent report, the load is the
number of local requests.

The same rule applies to the data-parallel ranks behind one URL (`Ranks`). The reports are read from
the instance's metrics page, which also has its namespace.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from epd.routing.encode_work import EncodeWork
from epd.routing.prefix import NO_PREFIX, Prefix, PrefixCache, cheapest_seat


@dataclass(slots=True, eq=False)
class RankLoad:
    """Load of one data-parallel rank.

    Attributes:
        under_way: number of local requests at the rank.
        share: the rank's part of its instance's share.
        seed: seed for hashes, the same in every proxy.
        cache: known content of its engine's prefix cache.
    """

    seed: int
    cache: PrefixCache
    share: float = 1.0
    under_way: int = 0
    _elsewhere: int = 0
    _asked: int = 0

    @property
    def value(self) -> int:
        """The load, in requests."""
        return self.under_way + self._elsewhere

    @property
    def pressure(self) -> float:
        """The load divided by the share."""
        return self.value / self.share

    def begin_request(self) -> None:
        self.under_way += 1
        self._asked = max(self._asked, self.under_way)

    def report_requested(self) -> None:
        self._asked = self.under_way

    def record_report(self, requests: int) -> None:
        self._elsewhere = max(0, requests - self._asked)


class Ranks:
    """Loads of an instance's data-parallel ranks, by the rule of this module."""

    __slots__ = ("_last", "seats")

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seats = tuple(RankLoad(rank, PrefixCache(clock)) for rank in range(count))
        self._last = -1

    def next_rank(self, prefix: Prefix = NO_PREFIX) -> int:
        """Return the rank for a prompt: the cheapest one for its prefix, or else the lowest load.

        Equal ones take turns.
        """
        if prefix.links:
            return self.seats.index(cheapest_seat(self.seats, prefix))
        count = len(self.seats)
        turns = [(self._last + step) % count for step in range(1, count + 1)]
        self._last = min(turns, key=lambda rank: self.seats[rank].value)
        return self._last

    def identify(self, seed: int, share: float) -> None:
        """Set the seeds and the shares of the ranks by those of their instance."""
        for rank, seat in enumerate(self.seats):
            seat.seed = xxh3_64_intdigest(b"%d" % rank, seed)
            seat.share = share / len(self.seats)

    def begin_request(self, rank: int) -> None:
        self.seats[rank].begin_request()

    def end_request(self, rank: int) -> None:
        self.seats[rank].under_way -= 1

    def report_requested(self) -> None:
        for seat in self.seats:
            seat.report_requested()

    def record_report(self, engines: Mapping[int, int]) -> None:
        """Record a report. A report that does not cover every rank is ignored."""
        complete = engines.keys() == set(range(len(self.seats)))
        for rank, seat in enumerate(self.seats):
            seat.record_report(engines[rank] if complete else 0)


KEPT_INTERVALS = 3
"""Age of a report, in intervals, after which it expires."""

MIN_KEPT_S = 2.0
"""Minimum age at which a report expires, for short intervals."""

MAX_DOUBLINGS = 5
"""Maximum number of doublings of the interval for an instance without reports: a factor of 32."""


class KVMoved(NamedTuple):
    """KV blocks that an instance's NIXL connector has transferred since its start.

    Attributes:
        transfer_s: sum of the durations of all transfers, in seconds.
    """

    bytes: float = 0.0
    transfer_s: float = 0.0


class Report(NamedTuple):
    """The numbers of waiting and running requests that an instance reports.

    Attributes:
        engines: sum of both, by the number of the data-parallel engine.
        kv_tokens: number of tokens for which an engine has KV blocks; 0 if it is not reported.
        progress: digest that changes while the engines work; None if they report no counters.
        kv_moved: transferred KV blocks; zeros without a NIXL connector.
    """

    waiting: int
    running: int
    engines: Mapping[int, int]
    kv_tokens: int = 0
    progress: int | None = None
    kv_moved: KVMoved = KVMoved()


class Prompts(NamedTuple):
    """Estimated tokens of the prompts that an instance has received from this proxy.

    Attributes:
        matched: the part of them that was expected in the prefix cache.
    """

    tokens: int
    matched: int


class Load:
    """The load of one instance.

    Attributes:
        under_way: number of local requests at the instance.
        value: the load, in requests.
        pressure: the load divided by the share; comparable between instances.
        ranks: loads of its data-parallel ranks; None if the instance distributes requests itself.
        cache: known content of the engine's prefix cache, if there are no ranks.
        encode: media items that the instance encodes, and its speed.
        kv_bytes_per_s: mean bandwidth of the last KV transfers that it reported; None before any.
        answering: number of local requests with an answer that has begun.
        report: the last report; None without a recent one.
        progress_s: time of the last report with progress.
        stalled_s: time since which reports show no progress, while requests run there and local
            requests wait for them.
        seed: seed for hashes, the same in every proxy.
        share: the weight; 1 for a weight of 0, because drained instances are used equally.
    """

    __slots__ = (
        "_asked",
        "_elsewhere",
        "_failures",
        "_intervals",
        "_kv_moved",
        "_progress",
        "_since_s",
        "_until_s",
        "_weight",
        "answering",
        "cache",
        "encode",
        "kv_bytes_per_s",
        "pressure",
        "progress_s",
        "ranks",
        "report",
        "seed",
        "share",
        "stalled_s",
        "under_way",
        "value",
    )

    def __init__(
        self,
        url: str,
        weight: float = 1.0,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seed = xxh3_64_intdigest(url.encode())
        self.ranks = ranks
        self.cache = PrefixCache(clock)
        self.encode = EncodeWork(clock)
        self.report: Report | None = None
        self.kv_bytes_per_s: float | None = None
        self._kv_moved: KVMoved | None = None
        self.under_way = self._elsewhere = self._asked = self._failures = self.answering = 0
        self.progress_s = self.stalled_s = -math.inf
        self._progress: int | None = None
        self.weight = weight
        self._since_s = -math.inf
        self._intervals = 1.0
        self._until_s = math.inf

    @property
    def weight(self) -> float:
        """The relative share of the load; 0 drains the instance."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = weight
        self.share = weight or 1.0
        if self.ranks is not None:
            self.ranks.identify(self.seed, self.share)
        self._weigh()

    @property
    def seats(self) -> "Sequence[Load | RankLoad]":
        """The engines that take its requests: its ranks, or the instance itself."""
        return (self,) if self.ranks is None else self.ranks.seats

    @property
    def caches(self) -> Sequence[PrefixCache]:
        return [seat.cache for seat in self.seats]

    @property
    def prompts(self) -> Prompts:
        """The prompts of this proxy so far, if the instance is chosen by their content."""
        caches = self.caches
        return Prompts(sum(cache.asked for cache in caches), sum(cache.matched for cache in caches))

    @property
    def pending_tokens(self) -> int:
        """Estimated tokens of this proxy's prompts that wait for their prefill, or are in it."""
        return sum([cache.pending for cache in self.caches])

    @property
    def reports_progress(self) -> bool:
        """Whether recent reports show if the engines work."""
        return self.report is not None and self.report.progress is not None

    @property
    def precise(self) -> bool:
        """Whether events of the engines keep the content of all prefix caches up to date."""
        return all(cache.precise for cache in self.caches)

    def next_rank(self, prefix: Prefix = NO_PREFIX) -> int | None:
        """Return the rank for a prompt; None if the instance distributes requests itself."""
        return None if self.ranks is None else self.ranks.next_rank(prefix)

    def cache_of(self, rank: int | None) -> PrefixCache:
        return self.cache if self.ranks is None or rank is None else self.ranks.seats[rank].cache

    def begin_request(self, rank: int | None = None) -> None:
        self.under_way += 1
        # An outstanding report may include it.
        if self.under_way > self._asked:  # noqa: PLR1730 - a call costs more
            self._asked = self.under_way
        if self.ranks is not None and rank is not None:
            self.ranks.begin_request(rank)
        self._weigh()

    def end_request(self, rank: int | None = None) -> None:
        self.under_way -= 1
        if self.ranks is not None and rank is not None:
            self.ranks.end_request(rank)
        self._weigh()

    def expire(self, now_s: float) -> None:
        """Drop a report that is too old."""
        if now_s >= self._until_s:
            self._forget()

    def report_due(self, now_s: float, interval_s: float) -> bool:
        """Return whether a report is due. After True, the caller must ask and call `record_report`.

        The interval may change between calls.
        """
        if now_s < self._since_s + self._intervals * interval_s:
            return False
        self._since_s = math.inf
        self._asked = self.under_way
        if self.ranks is not None:
            self.ranks.report_requested()
        return True

    def record_report(self, report: Report | None, now_s: float, interval_s: float) -> None:
        """Record a report; None after a failure. The interval is the current one of reports."""
        self._since_s = now_s
        if report is None:
            self._failures = min(self._failures + 1, MAX_DOUBLINGS)
            self._intervals = 2.0**self._failures
            return
        self._failures = 0
        # A different interval for each instance, so that the reports do not coincide.
        self._intervals = 0.9 + 0.2 * self.seed * 2.0**-64
        self._until_s = now_s + max(interval_s * KEPT_INTERVALS, MIN_KEPT_S)
        self.report = report
        before, self._progress = self._progress, report.progress
        moved = report.progress != before
        if moved and before is not None:
            self.progress_s = now_s
        if moved or not (report.running and self.under_way):
            self.stalled_s = now_s
        for cache in self.caches if report.kv_tokens else ():
            cache.limit = report.kv_tokens
        self._measure_kv(report.kv_moved)
        self._elsewhere = max(0, report.waiting + report.running - self._asked)
        if self.ranks is not None:
            self.ranks.record_report(report.engines)
        self._weigh()

    def _measure_kv(self, moved: KVMoved) -> None:
        """Compute the bandwidth of the transfers since the previous report, if there were any."""
        before = self._kv_moved or moved
        self._kv_moved = moved
        moved_bytes, elapsed_s = moved.bytes - before.bytes, moved.transfer_s - before.transfer_s
        if moved_bytes > 0 and elapsed_s > 0:  # less than before: the engine has restarted
            self.kv_bytes_per_s = moved_bytes / elapsed_s

    def drop_report(self) -> None:
        """Drop the report of a removed instance. It may be added again before its requests end."""
        self._since_s = -math.inf
        self._forget()

    def forget_engines(self) -> None:
        """Forget prefix caches and speed: the engines have ended, or may have."""
        for cache in self.caches:
            cache.clear()
        self.encode.forget_speed()

    def _forget(self) -> None:
        self.report = None
        self._until_s = math.inf
        self._elsewhere = 0
        if self.ranks is not None:
            self.ranks.record_report({})
        self._weigh()

    def _weigh(self) -> None:
        self.value = self.under_way + self._elsewhere
        self.pressure = self.value / self.share


RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
"""vLLM's gauges, one sample for each engine (`PrometheusStatLogger`,
vllm/v1/metrics/loggers.py)."""

TOKENS = (b"vllm:prompt_tokens_total", b"vllm:generation_tokens_total")
KV_USAGE = b"vllm:kv_cache_usage_perc"
"""Counters of an engine's tokens, and the gauge that changes in a long prefill: vLLM counts the
tokens of a prompt at the end of its prefill."""

KV_BYTES = b"vllm:nixl_bytes_transferred_sum"
KV_SECONDS = b"vllm:nixl_xfer_time_seconds_sum"
"""Sums of histograms with one sample for each finished transfer between two ranks. vLLM counts a
transfer at the instance that starts it: decode, or prefill with NixlPushConnector
(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py`)."""

MAX_REQUESTS = 100_000
"""Upper bound of one engine's requests. A larger value is invalid."""

MAX_SAMPLES = 1024
MAX_LINE_BYTES = 4096

NAMESPACE = b"vllm:ec_store_namespace_info"
"""The gauge of our connector, one sample for each engine (`ec_store.vllm_connector.metrics`)."""

PRODUCER = b"vllm:ec_store_producer"
"""The gauge of our connector that is 1 for an engine that writes its encoder outputs."""

_KV_TOKENS = re.compile(
    rb'^vllm:cache_config_info\{[^}\n]{,4096}\bkv_cache_size_tokens="([1-9][0-9]{,11})"',
    re.MULTILINE,
)
"""Size of an engine's KV cache. All engines of an instance have the same."""

_NAMED = re.compile(rb'[{,]namespace="([^"\\]{1,256})"')
_ENGINE = re.compile(rb"[{,]engine=\"(\d{1,4})\"")


def read_report(page: bytes) -> Report | None:
    """Return the load on a page; None if it is missing or invalid.

    Pages have hundreds of kilobytes. Only the relevant lines are parsed.
    """
    try:
        running, waiting = dict(_samples(page, RUNNING)), dict(_samples(page, WAITING))
    except ValueError:
        return None
    if not running or running.keys() != waiting.keys():
        return None
    engines = {engine: count + waiting[engine] for engine, count in running.items()}
    size = _KV_TOKENS.search(page)
    kv_tokens = int(size[1]) if size else 0
    return Report(
        sum(waiting.values()),
        sum(running.values()),
        engines,
        kv_tokens,
        _read_progress(page),
        _read_kv_moved(page),
    )


def _read_kv_moved(page: bytes) -> KVMoved:
    """Return the transferred KV blocks; zeros for an instance without them."""
    try:
        moved = (
            sum(float((*line.rpartition(b"}")[2].split(), b"")[0]) for line in _lines(page, name))
            for name in (KV_BYTES, KV_SECONDS)
        )
        return KVMoved(*moved)
    except ValueError:
        return KVMoved()


def _read_progress(page: bytes) -> int | None:
    """Return a digest of the counters of tokens and of the use of KV blocks; None without any."""
    try:
        counters = [line for name in TOKENS for line in _lines(page, name)]
        usage = list(_lines(page, KV_USAGE))
    except ValueError:
        return None
    return xxh3_64_intdigest(b"".join(counters + usage)) if counters else None


def read_namespace(page: bytes) -> str:
    """Return the common namespace of all engines on a page; empty if there is none.

    Engines with different namespaces cannot share entries, so the result is empty.
    """
    found = read_namespaces(page)
    return next(iter(found)) if len(found) == 1 else ""


def read_namespaces(page: bytes) -> frozenset[str]:
    """Return the namespaces under which the engines of a page keep encoder outputs.

    A sample of 0 marks a namespace that the engine no longer has. An unreadable page has none.
    """
    try:
        samples = [line.rpartition(b"}") for line in _lines(page, NAMESPACE)]
        labels = [label for label, _, value in samples if float((*value.split(), b"")[0]) != 0]
        return frozenset(
            named[1].decode() if (named := _NAMED.search(label)) else "" for label in labels
        )
    except ValueError:
        return frozenset()


def writes_outputs(page: bytes) -> bool:
    """Return whether all engines of a page write their encoder outputs to the store."""
    try:
        found = [float(line.rpartition(b"}")[2].split()[0]) for line in _lines(page, PRODUCER)]
    except (ValueError, IndexError):
        return False
    return bool(found) and all(value == 1 for value in found)


def _samples(page: bytes, name: bytes) -> Iterator[tuple[int, int]]:
    """Yield the engine and the value of each sample.

    Raises:
        ValueError: a value is not a number of requests.
    """
    for line in _lines(page, name):
        labels, _, after = line.rpartition(b"}")
        number = float((*after.split(), b"")[0])
        if not 0 <= number <= MAX_REQUESTS:
            raise ValueError("not a number of requests")
        engine = _ENGINE.search(labels)
        yield int(engine[1]) if engine else 0, int(number)


def _lines(page: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the labels and the value of each sample.

    Raises:
        ValueError: there are too many samples, or a line is too long.
    """
    begins = b"\n" + name
    found = page.find(begins)
    samples = 0
    while found >= 0:
        after = found + len(begins)
        if page[after : after + 1] in {b"{", b" "}:  # else a metric with a longer name
            samples += 1
            end = page.find(b"\n", after, after + MAX_LINE_BYTES)
            if samples > MAX_SAMPLES or end < 0:
                raise ValueError("not a metrics page of one server")
            yield page[after:end]
        found = page.find(begins, after)
