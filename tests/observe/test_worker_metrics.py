"""Workers that count, are scraped, die and are replaced in any order: no counter decreases."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric

from epd.config import ProxyConfig
from epd.edge.admission import Admission
from epd.observe.metrics import MetricsObserver
from epd.observe.worker_metrics import PACE, WorkerMetrics, keep_counters
from epd.shared_page import HALF_BYTES, HEAD, NUMBER, Pace, SharedPage
from tests.examples import scaled

INDEXES = st.integers(0, 2)


class Worker:
    """Metrics of a worker process."""

    def __init__(self, pages: list[SharedPage], index: int, pace: Pace = PACE) -> None:
        registry = CollectorRegistry()
        self.counter = Counter("c", "", registry=registry)
        self.gauge = Gauge("g", "", registry=registry)
        self.doing = 0.0
        self.metrics = WorkerMetrics(registry, pages, index, pace)

    def do(self, value: float) -> None:
        self.doing = value
        self.gauge.set(value)

    def collected(self) -> list[Metric]:
        self.metrics.refresh()
        return self.metrics.collect()

    def figures(self) -> dict[str, float]:
        return {
            sample.name: sample.value for family in self.collected() for sample in family.samples
        }


class Workers(RuleBasedStateMachine):
    """State machine with three workers.

    Attributes:
        least: latest observed value of the counter.
        most: number of counts, including those that died with their worker.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages = [SharedPage.new_page() for _ in range(3)]
        self.workers = [Worker(self.pages, index) for index in range(3)]
        self.least = self.most = 0.0

    @rule(index=INDEXES, amount=st.floats(0, 1000))
    def count(self, index: int, amount: float) -> None:
        self.workers[index].counter.inc(amount)
        self.most += amount

    @rule(index=INDEXES, value=st.integers(0, 9))
    def do(self, index: int, value: int) -> None:
        self.workers[index].do(value)

    @rule(index=INDEXES)
    def write(self, index: int) -> None:
        self.workers[index].metrics.pages.write()

    @rule(index=INDEXES)
    def ask(self, index: int) -> None:
        seen = self.workers[index].figures()["c_total"]

        assert self.least <= seen <= self.most * (1 + 1e-9)
        self.least = seen

    @rule(index=INDEXES)
    def die(self, index: int) -> None:
        keep_counters(self.pages[index])
        others = [worker for number, worker in enumerate(self.workers) if number != index]
        self._agree(others)
        self.workers[index] = Worker(self.pages, index)

    @rule()
    def all_say_the_same_when_all_have_written(self) -> None:
        self._agree(self.workers)

    def _agree(self, living: list[Worker]) -> None:
        for worker in living:
            worker.metrics.pages.write()
        first, *others = [worker.figures() for worker in living]

        assert others == [first] * len(others)
        assert first["c_total"] >= self.least
        assert first["g"] == sum(worker.doing for worker in living)
        self.least = first["c_total"]

    def teardown(self) -> None:
        for page in self.pages:
            page.close()


class Reading(SharedPage):
    """Page that records the threads that read and write it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.readers = set[int]()
        self.writers = set[int]()

    def read(self) -> bytes | None:
        self.readers.add(threading.get_ident())
        return super().read()

    def write(self, page: bytes) -> None:
        self.writers.add(threading.get_ident())
        super().write(page)


async def test_a_scrape_of_several_workers_is_made_on_a_thread(pages: list[SharedPage]) -> None:
    config = ProxyConfig(encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",))
    watched = [Reading(page.descriptor) for page in pages]
    metrics = MetricsObserver(Admission(config, time.monotonic), watched, 0)
    for page in watched:
        page.readers.clear()
    content, _ = await metrics.page("")

    assert all(page.readers and threading.get_ident() not in page.readers for page in watched)
    assert metrics.workers is not None
    assert content == generate_latest(metrics.workers)
    # What this thread counts, it writes itself.
    assert watched[0].writers == {threading.get_ident()}


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=scaled(50))


@pytest.fixture
def pages() -> Iterator[list[SharedPage]]:
    with closing(SharedPage.new_page()) as one, closing(SharedPage.new_page()) as other:
        yield [one, other]


def test_a_page_is_written_only_where_something_is_new(pages: list[SharedPage]) -> None:
    worker = Worker(pages, 0)
    worker.metrics.pages.write()
    before = os.pread(pages[0].descriptor, NUMBER.size, 0)
    worker.metrics.pages.write()
    assert os.pread(pages[0].descriptor, NUMBER.size, 0) == before
    worker.counter.inc()
    worker.metrics.pages.write()

    assert os.pread(pages[0].descriptor, NUMBER.size, 0) != before


@pytest.mark.parametrize("damage", ["bytes", "shape", "closed"])
def test_a_page_that_cannot_be_read_is_left_out_and_warned_of_once(
    pages: list[SharedPage], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Worker(pages, 0), Worker(pages, 1)
    for worker in (one, other):
        worker.counter.inc()
        worker.metrics.pages.write()
    if damage == "bytes":
        os.pwrite(pages[0].descriptor, b"?" * 999, HEAD.size + HALF_BYTES)
    elif damage == "shape":
        pages[0].write(b"no page")
    else:
        monkeypatch.setattr(pages[0], "descriptor", -1)
    with structlog.testing.capture_logs() as lines:
        seen = [other.figures()["c_total"] for _ in range(3)]
        keep_counters(pages[0])

    assert seen == [1, 1, 1]
    assert [line["event"] for line in lines] == [
        "the metrics of a worker cannot be read, and are left out",
        "the metrics of a worker are lost",
    ]


def test_a_worker_that_cannot_write_its_metrics_warns_once(pages: list[SharedPage]) -> None:
    one, other = Worker(pages, 0), Worker(pages, 1)
    other.counter.inc()
    other.metrics.pages.write()
    readable = pages[0].descriptor
    pages[0].descriptor = os.open(f"/proc/self/fd/{readable}", os.O_RDONLY)
    one.counter.inc()
    with structlog.testing.capture_logs() as lines, closing(SharedPage(readable)):
        seen = [one.figures()["c_total"] for _ in range(3)]

    assert seen == [1, 1, 1]
    assert [line["event"] for line in lines] == [
        "other workers cannot be told of this one's metrics"
    ]


@asynccontextmanager
async def writing(worker: Worker) -> AsyncIterator[None]:
    """Run the worker's own writing task."""
    task = asyncio.create_task(worker.metrics.pages.keep_writing())
    try:
        yield
    finally:
        task.cancel()


async def changes(page: SharedPage, worker: Worker) -> int:
    """Return how often the page is written while the worker counts for ten turns of the loop."""
    before = page.write_count()
    for _ in range(10):
        worker.counter.inc()
        await asyncio.sleep(0)
    return page.write_count() - before


async def test_a_worker_writes_rarely_without_a_scrape(pages: list[SharedPage]) -> None:
    one, other = (Worker(pages, index, Pace(0, 90, 0, 15)) for index in (0, 1))
    async with writing(one):
        await asyncio.sleep(0)
        assert await changes(pages[0], one) == 0
        other.figures()
        assert await changes(pages[0], one) >= 9

    assert pages[1].write_count() == 1


async def test_a_worker_writes_its_page_without_a_scrape(pages: list[SharedPage]) -> None:
    one = Worker(pages, 0, Pace(0, 90, 0, 0))
    async with writing(one):
        assert await changes(pages[0], one) >= 9
