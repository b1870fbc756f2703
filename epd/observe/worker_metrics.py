"""Metrics over all workers, on every worker's `/metrics`.

Each worker writes its metrics to a page of shared memory that the others read: every second while
they are scraped, less often otherwise, and before it answers a scrape. So every value that a scrape
returned is on a page, and no counter decreases when a worker dies. A replacement worker continues
with the counters of that page.

Counters and histograms are summed in a fixed order and rounded once. Otherwise two processes could
answer sums that differ in the last digit, and Prometheus would take the smaller one for a reset of
the counter.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain

import orjson
import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.observe.metric_defs import FIGURES
from epd.shared_page import PageUnreadable, SharedPage

_Values = dict[tuple[str, frozenset[tuple[str, str]]], list[float]]


def dump(families: Iterable[Metric]) -> bytes:
    """Encode families: name, documentation, type and samples. Values are finite."""
    return orjson.dumps(
        [
            (found.name, found.documentation, found.type, [sample[:3] for sample in found.samples])
            for found in families
        ]
    )


def load(page: bytes) -> list[Metric]:
    """Decode the families of a page.

    Raises:
        ValueError: the content is not JSON.
    """
    return [_family(*fields) for fields in orjson.loads(page)]


def counted(families: Iterable[Metric]) -> list[Metric]:
    """Return the families that stay true after a process has ended: counters and histograms."""
    return [family for family in families if family.type != "gauge"]


def merge_pages(pages: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Sum several pages. Families and samples keep the order of their first appearance."""
    families: dict[str, Metric] = {}
    values: dict[str, _Values] = {}
    for family in chain.from_iterable(pages):
        families.setdefault(family.name, family)
        of_family = values.setdefault(family.name, {})
        for name, labels, value, *_ in family.samples:
            of_family.setdefault((name, frozenset(labels.items())), []).append(value)
    return [_added(family, values[name]) for name, family in families.items()]


def _added(family: Metric, values: _Values) -> Metric:
    combine = FIGURES[family.name].of_workers if family.name in FIGURES else math.fsum
    samples = [(name, dict(labels), combine(found)) for (name, labels), found in values.items()]
    return _family(family.name, family.documentation, family.type, samples)


def _family(
    name: str, documentation: str, kind: str, samples: Iterable[tuple[str, dict[str, str], float]]
) -> Metric:
    family = Metric(name, documentation, kind)
    for sample in samples:
        family.add_sample(*sample)
    return family


WRITE_S = 1.0
"""Interval of writing while scraped, in seconds: little beside a scrape interval."""
ASKED_S = 90.0
"""Time after a scrape during which `WRITE_S` applies, in seconds: longer than usual intervals."""
UNASKED_S = 15.0
"""Interval of writing otherwise, in seconds. A killed worker loses what it had not written."""


class ReadCollector(Collector):
    """Collector of the families that a function returns."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


class WorkerMetrics(Collector):
    """Collector of one worker's metrics and of the sums over all workers."""

    def __init__(
        self,
        own: Collector,
        pages: Sequence[SharedPage],
        index: int,
        write_s: float = WRITE_S,
        unasked_s: float = UNASKED_S,
    ) -> None:
        """Collect `own` and `pages`: those of all workers, this one's at `index`."""
        self._write_s = write_s
        self._unasked_s = unasked_s
        self._own = own
        self._pages = pages
        self._page = pages[index]
        self._warned: set[object] = set()
        self._earlier = counted(self._read(self._page))
        self._written = b""

    def write(self) -> None:
        """Write this worker's metrics to its page, if they have changed."""
        page = dump(merge_pages([self._earlier, self._own.collect()]))
        if page == self._written:
            return
        try:
            self._page.write(page)
        except OSError as error:
            self._warn(self, "other workers cannot be told of this one's metrics", error)
        else:
            self._written = page

    async def keep_writing(self) -> None:
        written_s = -self._unasked_s
        while True:
            now_s = time.monotonic()
            if now_s - written_s >= self._unasked_s or self._page.wanted_within(ASKED_S):
                self.write()
                written_s = now_s
            await asyncio.sleep(self._write_s)

    def collect(self) -> Iterator[Metric]:
        """Yield the sums over all workers, with this worker's current values."""
        yield from self.write_figures().collect()

    def write_figures(self) -> ReadCollector:
        """Write this worker's metrics. Return a collector of all, to be read on any thread."""
        self.write()
        for page in self._pages:
            if page is not self._page:
                with suppress(OSError):  # reading it fails too, and is logged
                    page.mark_wanted()
        return ReadCollector(lambda: merge_pages([self._read(page) for page in self._pages]))

    def _read(self, page: SharedPage) -> list[Metric]:
        try:
            return load(page.read() or b"[]")
        except (PageUnreadable, OSError, ValueError) as error:
            self._warn(page, "the metrics of a worker cannot be read, and are left out", error)
            return []

    def _warn(self, about: object, event: str, error: Exception) -> None:
        if about not in self._warned:
            self._warned.add(about)
            structlog.get_logger("epd").warning(event, reason=str(error))


def keep_counters(page: SharedPage) -> None:
    """Keep only the counters and histograms of a worker that has died."""
    try:
        page.write(dump(counted(load(page.read() or b"[]"))))
    except (PageUnreadable, OSError, ValueError) as error:
        structlog.get_logger("epd").warning("the metrics of a worker are lost", reason=str(error))
