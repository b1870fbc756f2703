"""State of the operator's page, put together per request over all workers.

With several workers, each writes its state to shared memory that the others read: once a second
while a client reads the page, if the state has changed. Client requests do not wait for this.
"""

import asyncio
import time
from collections.abc import Sequence

import orjson

from epd.observe.metrics import MetricsObserver
from epd.routing.instances import Role
from epd.routing.table import InstanceTable
from epd.shared_page import Pace, SharedPage, WorkerPages
from epd.ui.readings import Readings
from epd.ui.recent import InstanceState, Recent, Snapshot
from epd.ui.state import Looked, Moment, metric_totals, state

FRESH_S = 0.5
"""Lifetime of a document, in seconds: at most two are made per second, for all readers."""
PACE = Pace(write_s=1.0, wanted_s=5.0, poll_s=0.25)
"""Seconds: another worker's state is at most 1 s old while a client reads the page."""


class Board:
    """State of this process and, through shared pages, of all workers.

    Attributes:
        readings: what is read for readers of the page alone.
        pages: pages of the workers; None for a single one.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        recent: Recent,
        table: InstanceTable,
        metrics: MetricsObserver,
        store: str | None,
        readings: Readings,
        pages: Sequence[SharedPage] = (),
        index: int = 0,
        pace: Pace = PACE,
    ) -> None:
        """Make the board of a process.

        `store` is the kind of the encoder store, and `readings` has its use. With several workers,
        `pages` has the page of each, this worker's at `index`.
        """
        self._recent = recent
        self._table = table
        self._metrics = metrics
        self._store = store
        self.readings = readings
        self._poll_s = pace.poll_s
        self.pages = WorkerPages(pages, index, self._known, "requests", pace) if pages else None
        self._made_s = -FRESH_S
        self._made = b""
        self._making = asyncio.Lock()

    async def document(self) -> bytes:
        """Return the state as JSON, at most `FRESH_S` old."""
        async with self._making:
            if time.monotonic() - self._made_s >= FRESH_S:
                if self.pages is not None and not self.pages.ask():
                    await asyncio.sleep(2 * self._poll_s)  # for the workers that begin to write
                looked = await self.readings.look()
                self._made_s, self._made = time.monotonic(), self._document(looked)
        return self._made

    def _document(self, looked: Looked) -> bytes:
        snapshots = [self._known(), *(self.pages.others() if self.pages is not None else ())]
        totals = metric_totals(self._metrics.collect_all())
        now = Moment(time.monotonic(), time.time())
        return orjson.dumps(state(snapshots, totals, self._store, now, looked))

    def _known(self) -> Snapshot:
        under_way = self._table.under_way
        loads = {instance: self._table.load(instance) for instance in self._table.of_roles(*Role)}
        instances = [
            InstanceState(
                role=instance.role,
                url=instance.url,
                state=self._table.state(instance),
                cause=self._table.cause(instance),
                requests=under_way.get(instance, 0),
                prompt_tokens=load.prompts.tokens,
                prefix_tokens=load.prompts.matched,
                precise=load.precise,
                kv_bytes_per_s=load.kv_bytes_per_s,
                writes=load.writes_outputs is True,
            )
            for instance, load in loads.items()
        ]
        return self._recent.snapshot(instances)
