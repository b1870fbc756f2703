"""The figures of all workers, whichever of them is asked.

Each worker writes its figures to a page that the others read: every second while they are
scraped, more rarely otherwise, and before it answers.
So no figure was ever shown that is not on a page, and no counter goes back when a worker dies. A
worker that replaces another goes on counting from where that one's page ends.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.observe.metric_sums import added, counted, dump, load
from epd.observe.shared_page import PageUnreadable, SharedPage

WRITE_S = 1.0
"""How old the figures of other workers may be: little beside the time between two scrapes."""
ASKED_S = 90.0
"""For how long after a scrape they are written so often: longer than any usual scrape interval."""
UNASKED_S = 15.0
"""How often they are written after that. What a worker that is killed had not written is lost."""


class WorkerMetrics(Collector):
    """The figures of one worker, and by them those of all.

    Args:
        own: what this worker has counted, and is doing.
        pages: those of all workers, in the same order in each.
        seat: the place of its own among them.
    """

    def __init__(self, own: Collector, pages: Sequence[SharedPage], seat: int) -> None:
        self._own = own
        self._pages = pages
        self._page = pages[seat]
        self._warned: set[object] = set()
        self._earlier = counted(self._read(self._page))
        self._written = b""

    def write(self) -> None:
        """Let the others know, if there is anything new."""
        page = dump(added([self._earlier, self._own.collect()]))
        if page == self._written:
            return
        try:
            self._page.write(page)
        except OSError as error:
            self._warn(self, "other workers cannot be told of this one's metrics", error)
        else:
            self._written = page

    async def keep_writing(self) -> None:
        """Do so again and again."""
        written_s = -UNASKED_S
        while True:
            now_s = time.monotonic()
            if now_s - written_s >= UNASKED_S or self._page.wanted_within(ASKED_S):
                self.write()
                written_s = now_s
            await asyncio.sleep(WRITE_S)

    def collect(self) -> Iterator[Metric]:
        """The figures of all, this one's being those of this moment."""
        yield from self.written().collect()

    def written(self) -> "Written":
        """Write this worker's figures; return all, to be read on any thread."""
        self.write()
        for page in self._pages:
            if page is not self._page:
                with suppress(OSError):  # reading it fails too, and is logged
                    page.want()
        return Written(lambda: added([self._read(page) for page in self._pages]))

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


class Written(Collector):
    """What all workers have written."""

    def __init__(self, read: Callable[[], list[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Read it."""
        return iter(self._read())


def bury(page: SharedPage) -> None:
    """Leave of a worker that has died what it counted, and not what it was doing."""
    try:
        page.write(dump(counted(load(page.read() or b"[]"))))
    except (PageUnreadable, OSError, ValueError) as error:
        structlog.get_logger("epd").warning("the metrics of a worker are lost", reason=str(error))
