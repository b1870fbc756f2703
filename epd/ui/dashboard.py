"""What the page shows, put together when somebody asks, of all workers.

With several, each writes what it knows to a page of memory that the others read: once a second
while a client reads the state, if it is other than before. A request waits for none of it.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence

import orjson
import structlog

from epd.observe.metrics import MetricsObserver
from epd.observe.worker_metrics import PageUnreadable, SharedPage
from epd.routing.instances import Role
from epd.routing.table import InstanceTable
from epd.ui.recent import Recent
from epd.ui.snapshot import Seen, Snapshot, totals
from epd.ui.state import Moment, state

WRITE_S = 1.0
"""How old what is known of other workers may be."""
LOOKED_S = 5.0
"""For how long after a look the others go on writing."""
POLL_S = 0.25
"""How often a worker checks for a reader, while there is none."""
AWAKE_S = 1.0
"""How long the first look waits for what the others write; one of them may just have died."""
FRESH_S = 0.5
"""How old an answer may be: it is made twice a second, however many look."""


class Board:
    """What this process knows, and by it what all know.

    Args:
        recent: what it has seen of late.
        table: its instances.
        metrics: the figures of all.
        store: what kind of encoder-cache store it asks.
    """

    def __init__(
        self, recent: Recent, table: InstanceTable, metrics: MetricsObserver, store: str | None
    ) -> None:
        self._recent = recent
        self._table = table
        self._metrics = metrics
        self._store = store
        self._others: Sequence[SharedPage] = ()
        self._page: SharedPage | None = None
        self._written = b""
        self._made_s = -FRESH_S
        self._made = b""
        self._making = asyncio.Lock()

    def share(self, pages: Sequence[SharedPage], seat: int) -> None:
        """Show what all workers know from now on.

        Args:
            pages: theirs, in the same order in each.
            seat: the place of this one's among them.
        """
        self._page = pages[seat]
        self._others = [page for page in pages if page is not self._page]

    async def keep_writing(self) -> None:
        """Let the other workers know, again and again while a client reads the state."""
        looked_at = False
        while True:
            before, looked_at = (
                looked_at,
                self._page is not None and self._page.wanted_within(LOOKED_S),
            )
            if looked_at:
                if not before:  # the first look waits until the page is written
                    self._written = b""
                self.write()
            await asyncio.sleep(WRITE_S if looked_at else POLL_S)

    def write(self) -> None:
        """Let them know, if there is anything new."""
        known = orjson.dumps(self._known())
        if self._page is None or known == self._written:
            return
        self._written = known
        try:
            self._page.write(known)
        except OSError as error:
            structlog.get_logger("epd").warning(
                "other workers cannot be told of this one's requests", reason=str(error)
            )

    async def document(self) -> bytes:
        """The page's state as JSON, at most `FRESH_S` old."""
        async with self._making:
            if time.monotonic() - self._made_s >= FRESH_S:
                await self._wake_others()
                self._made_s, self._made = time.monotonic(), self._document()
        return self._made

    def _document(self) -> bytes:
        snapshots = [self._known(), *self._known_to_others()]
        figures = totals(self._metrics.shown.collect())
        return orjson.dumps(
            state(snapshots, figures, self._store, Moment(time.monotonic(), time.time()))
        )

    async def _wake_others(self) -> None:
        """Have the others write, and wait for those that did not."""
        asleep = [
            (page, page.number()) for page in self._others if not page.wanted_within(LOOKED_S)
        ]
        try:
            for page in self._others:
                page.want()
        except OSError as error:
            structlog.get_logger("epd").warning(
                "other workers cannot be asked for their requests", reason=str(error)
            )
        until_s = time.monotonic() + AWAKE_S
        while asleep and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S / 2)
            asleep = [(page, number) for page, number in asleep if page.number() == number]

    def _known(self) -> Snapshot:
        return Snapshot(instances=self._instances(), events=self._recent.events())

    def _instances(self) -> list[Seen]:
        under_way = self._table.under_way
        return [
            Seen(
                role=one.role,
                url=one.url,
                state=self._table.state(one),
                requests=under_way.get(one, 0),
            )
            for one in self._table.of(*Role)
        ]

    def _known_to_others(self) -> Iterable[Snapshot]:
        for page in self._others:
            try:
                if found := page.read():
                    yield orjson.loads(found)
            except (PageUnreadable, OSError, orjson.JSONDecodeError) as error:
                structlog.get_logger("epd").warning(
                    "what a worker knows cannot be read", reason=str(error)
                )


def forget(page: SharedPage) -> None:
    """Leave nothing of a worker that has died: it does nothing any more."""
    try:
        page.write(b"")
    except OSError as error:
        structlog.get_logger("epd").warning("a dead worker stays shown", reason=str(error))
