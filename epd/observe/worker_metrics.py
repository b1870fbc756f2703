"""Metrics over all workers, on every worker's `/metrics`.

Each worker writes its metrics to a page of shared memory that the others read: every second while
they are scraped, less often otherwise, and before it answers a scrape. So every value that a scrape
returned is on a page, and no counter decreases when a worker dies. A replacement worker continues
with the counters of that page.
"""

from collections.abc import Sequence

import orjson
import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.observe.metric_sums import Dumped, counted, dump, load, merge_pages
from epd.shared_page import Pace, PageUnreadable, SharedPage, WorkerPages

PACE = Pace(write_s=1.0, wanted_s=90.0, poll_s=1.0, unread_s=15.0)
"""Seconds: an interval of 1 s is little beside that of scrapes, and 90 s are longer than usual
ones. A killed worker loses what it had not written."""


class WorkerMetrics(Collector):
    """Collector of the sums over all workers."""

    def __init__(
        self, metrics: Collector, pages: Sequence[SharedPage], index: int, pace: Pace = PACE
    ) -> None:
        """Collect `metrics` and `pages`: those of all workers, this one's at `index`."""
        self._metrics = metrics
        self._all = pages
        self.pages = WorkerPages(pages, index, self._dumped, "metrics", pace)
        self._earlier = counted(load(self.pages.read(pages[index])))

    def _dumped(self) -> Dumped:
        return dump(merge_pages([self._earlier, self._metrics.collect()]))

    def refresh(self) -> None:
        """Write this worker's metrics, and ask the others to write theirs."""
        self.pages.write()
        self.pages.ask()

    def collect(self) -> list[Metric]:
        """Return the sums over all pages. Any thread may call it."""
        return merge_pages([load(self.pages.read(page)) for page in self._all])


def keep_counters(page: SharedPage) -> None:
    """Keep only the counters and histograms of a worker that has died."""
    try:
        page.write(orjson.dumps(dump(counted(load(orjson.loads(page.read() or b"[]"))))))
    except (PageUnreadable, OSError, ValueError) as error:
        structlog.get_logger("epd").warning("the metrics of a worker are lost", reason=str(error))
