"""What the page shows, put together when somebody asks, of all workers.

With several, each writes what it knows to a page of memory that the others read, once a second if
it is other than before. Nobody is asked on a request's way.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence

import orjson
import structlog

from epd.observe.metrics import MetricsObserver
from epd.observe.shared_page import PageUnreadable, SharedPage
from epd.routing.instances import Role
from epd.routing.table import InstanceTable
from epd.ui.recent import Recent
from epd.ui.snapshot import Seen, Snapshot
from epd.ui.state import Moment, state
from epd.ui.totals import totals

WRITE_S = 1.0
"""How old what is known of other workers may be."""
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

    def share(self, pages: Sequence[SharedPage], seat: int) -> None:
        """Show what all workers know from now on.

        Args:
            pages: theirs, in the same order in each.
            seat: the place of this one's among them.
        """
        self._page = pages[seat]
        self._others = [page for page in pages if page is not self._page]

    async def keep_writing(self) -> None:
        """Let the other workers know, again and again."""
        while True:
            self.write()
            await asyncio.sleep(WRITE_S)

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

    def document(self) -> bytes:
        """The page's state as JSON, at most `FRESH_S` old."""
        now_s = time.monotonic()
        if now_s - self._made_s >= FRESH_S:
            snapshots = [self._known(), *self._known_to_others()]
            figures = totals(self._metrics.shown.collect())
            shown = state(snapshots, figures, self._store, Moment(now_s, time.time()))
            self._made_s, self._made = now_s, orjson.dumps(shown)
        return self._made

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
