"""State of the operator's page, put together per request over all workers.

With several workers, each writes its state to shared memory that the others read: once a second
while a client reads the page, if the state has changed. Client requests do not wait for this.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence

import orjson
import structlog

from epd.observe.metrics import MetricsObserver
from epd.routing.instances import Role
from epd.routing.table import InstanceTable
from epd.shared_page import PageUnreadable, SharedPage
from epd.ui.recent import InstanceState, Recent, Snapshot
from epd.ui.state import Moment, metric_totals, state

FRESH_S = 0.5
"""Lifetime of a document, in seconds: at most two are made per second, for all readers."""
WRITE_S = 1.0
"""Upper bound of the age of another worker's state, in seconds."""
LOOKED_S = 5.0
"""Time for which the other workers write after a client has read the page, in seconds."""
POLL_S = 0.25
"""Interval at which an idle worker checks for a reader, in seconds."""

logger = structlog.get_logger("epd")


class Board:
    """State of this process and, through shared pages, of all workers."""

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        recent: Recent,
        table: InstanceTable,
        metrics: MetricsObserver,
        store: str | None,
        pages: Sequence[SharedPage] = (),
        index: int = 0,
        *,
        write_s: float = WRITE_S,
        looked_s: float = LOOKED_S,
        poll_s: float = POLL_S,
    ) -> None:
        """Make the board of a process.

        `store` is the kind of the encoder store. With several workers, `pages` has the page of
        each, this worker's at `index`.
        """
        self._recent = recent
        self._table = table
        self._metrics = metrics
        self._store = store
        self._page = pages[index] if pages else None
        self._others = [page for page in pages if page is not self._page]
        self._write_s = write_s
        self._looked_s = looked_s
        self._poll_s = poll_s
        self._written = b""
        self._made_s = -FRESH_S
        self._made = b""
        self._making = asyncio.Lock()

    async def keep_writing(self) -> None:
        """Write this worker's state periodically while a client reads the page."""
        while True:
            looked_at = self._page is not None and self._page.wanted_within(self._looked_s)
            if looked_at:
                self.write()
            await asyncio.sleep(self._write_s if looked_at else self._poll_s)

    def write(self) -> None:
        """Write this worker's state to its page, if it has changed."""
        known = orjson.dumps(self._known())
        if self._page is None or known == self._written:
            return
        self._written = known
        try:
            self._page.write(known)
        except OSError as error:
            logger.warning("other workers cannot be told of this one's requests", reason=str(error))

    async def document(self) -> bytes:
        """Return the state as JSON, at most `FRESH_S` old."""
        async with self._making:
            if time.monotonic() - self._made_s >= FRESH_S:
                await self._request_writes()
                self._made_s, self._made = time.monotonic(), self._document()
        return self._made

    def _document(self) -> bytes:
        snapshots = [self._known(), *self._entries_of_others()]
        totals = metric_totals(self._metrics.shown.collect())
        now = Moment(time.monotonic(), time.time())
        return orjson.dumps(state(snapshots, totals, self._store, now))

    async def _request_writes(self) -> None:
        """Ask the other workers to write, and give those time that do not write already."""
        awake = all(page.wanted_within(self._looked_s) for page in self._others)
        try:
            for page in self._others:
                page.mark_wanted()
        except OSError as error:
            logger.warning("other workers cannot be asked for their requests", reason=str(error))
        if not awake:
            await asyncio.sleep(2 * self._poll_s)

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
            )
            for instance, load in loads.items()
        ]
        return self._recent.snapshot(instances)

    def _entries_of_others(self) -> Iterable[Snapshot]:
        for page in self._others:
            try:
                if found := page.read():
                    yield orjson.loads(found)
            except (PageUnreadable, OSError, orjson.JSONDecodeError) as error:
                logger.warning("the state of a worker cannot be read", reason=str(error))


def clear_page(page: SharedPage) -> None:
    """Clear the page of a worker that has died."""
    try:
        page.write(b"")
    except OSError as error:
        logger.warning("the page of a dead worker cannot be cleared", reason=str(error))
