"""The proxy's client of the encoder store. A failing store must not fail requests.

Every call has a time budget. While the store does not answer, or cannot be opened, the proxy
bypasses it: every lookup is a miss, and requests are served as without a store.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, Literal, Self, TypeVar

import structlog

from ec_store.base import StoreStats
from ec_store.bounded import BoundedDict
from ec_store.concurrency import OPEN_S, Breaker
from ec_store.entry import EntryInfo
from ec_store.errors import StoreError, StoreMissing
from ec_store.keys import EntryKey
from ec_store.opening import ProxyStore
from epd.aio import Background, Work
from epd.config.sections.transfers import TransferSettings

REFRESH_S = 5.0
"""Interval of reading the namespaces, and of retries to open the store."""

MISSING_EVERY_S = 0.25
"""Interval of retries while no engine has created the store, or its namespace in it."""

OPEN_WITHIN_S = 2.0
"""Maximum wait for the store at the start of the proxy."""

MAKERS = (
    ". An engine with ECStoreConnector makes it when it starts, and so do `ec-store serve` and "
    "`ec-store configure`; the proxy does not"
)

MAX_LEARNED = 1024
"""Upper bound of the namespaces of models that are learned from encode instances."""

PATIENT_S = 1.0
"""Timeout of calls that a request cannot do without, or that are cheap compared with an encode."""

MAX_LEASED = 65536
"""Upper bound of the remembered leases, which avoid repeated calls."""

T = TypeVar("T")

Operation = Literal[
    "open",
    "namespaces",
    "lookup",
    "claim",
    "renew",
    "release",
    "lease",
    "get_name",
    "put_name",
    "delete",
]
"""Operations of the store."""
READS = ("lookup", "get_name")
Result = Literal["ok", "timeout", "error", "skipped"]
"""Results of an operation. `skipped`: the store is not open, or is bypassed after failures."""

OpenStore = Callable[[], Awaitable[ProxyStore]]

logger = structlog.get_logger("epd")


class EncoderCache:
    """A client for the entries of served models. Belongs to one event loop.

    Attributes:
        operations: number of operations, by operation and result.
        found_bytes: total size of the entries found.
    """

    def __init__(
        self,
        open_store: OpenStore,
        config: TransferSettings,
        background: Background,
        *,
        refresh_s: float = REFRESH_S,
        skip_s: float = OPEN_S,
    ) -> None:
        """Create the client without opening the store. `open_store` opens an existing one.

        A failing store is skipped for `skip_s` seconds.
        """
        self._background = background
        self.operations: Counter[tuple[Operation, Result]] = Counter()
        self.found_bytes = 0
        self._open_store = open_store
        self._config = config
        self._opened: ProxyStore | None = None
        self._store: ProxyStore | None = None
        self._problem: str | None = None
        self._refresh_s = refresh_s
        self._reading = Breaker("reading from the encoder store", warn=_warn, open_s=skip_s)
        self._writing = Breaker("writing to the encoder store", warn=_warn, open_s=skip_s)
        self._namespaces: Mapping[str, str] = {}
        self._learned_namespaces: BoundedDict[str, str] = BoundedDict(MAX_LEARNED)
        self._ready = asyncio.Event()
        self._refresh_now = asyncio.Event()
        self._lease_ends_s: BoundedDict[EntryKey, float] = BoundedDict(MAX_LEASED)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Open the store in the background, and wait a short time for it."""
        self.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WITHIN_S):
                await self._ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Open the store in the background."""
        self.keep_running("encoder_cache", self._refresh)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._opened is not None:
            await self._opened.close()

    @property
    def open_circuits(self) -> Mapping[str, bool]:
        """Whether the store is bypassed, by kind of operation."""
        return {"store_questions": self._reading.open, "store_changes": self._writing.open}

    async def find_entries(
        self, keys: Sequence[EntryKey], *, patient: bool = False
    ) -> Mapping[EntryKey, EntryInfo] | None:
        """Return the stored entries by key, from one round trip. They are leased soon after.

        None means that the store did not answer: the request should then bypass it. A `patient`
        request cannot be served without an answer.
        """
        if not keys:
            return {}
        limit_s = PATIENT_S if patient else self._config.ec_store_budget_s
        infos = await self.call("lookup", lambda store: store.lookup(keys), limit_s)
        return None if infos is None else self.note_entries(infos)

    def note_entries(self, infos: Iterable[EntryInfo | bool | None]) -> dict[EntryKey, EntryInfo]:
        """Return the found entries by key, and lease them soon after."""
        entries = {info.key: info for info in infos if isinstance(info, EntryInfo)}
        until_s = asyncio.get_running_loop().time() + self._config.ec_store_lease_s
        short: list[EntryKey] = []
        for key, info in entries.items():
            self.found_bytes += info.size_bytes
            if self._lease_ends_s.get(key, 0.0) < until_s:  # less than `ec_store_lease_s` is left
                short.append(key)
        if short:
            self.run_later(self.lease(short))
        return entries

    async def lease(self, keys: Sequence[EntryKey]) -> None:
        """Protect entries from eviction for a while.

        The lease is half as long again as `ec_store_lease_s`, so that not every hit renews it.
        """
        lease_s = 1.5 * self._config.ec_store_lease_s
        until_s = asyncio.get_running_loop().time() + lease_s
        infos = await self.call("lease", lambda store: store.lease(keys, lease_s))
        for info in infos or ():
            if info is not None:
                self._lease_ends_s[info.key] = until_s

    async def stats(self) -> StoreStats | None:
        """Return the metrics of the store; None if it cannot be read.

        No request waits for it. It has only the store's own timeout, and no part in the circuits.
        """
        if self._store is None:
            return None
        try:
            return await self._store.stats()
        except (StoreError, ValueError):
            return None

    async def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        if keys:
            await self.call("release", lambda store: store.release(keys, owner))

    def learn_namespace(self, model: str | None, namespace: str) -> None:
        """Learn the namespace of a model from an encode instance.

        The store's own answer has precedence. If the two differ, the namespaces are read again.
        """
        if model is None:
            return
        if self._namespaces.get(model, namespace) != namespace:
            self._refresh_now.set()
        self._learned_namespaces[model] = namespace

    def namespace(self, model: str | None) -> str | None:
        """Return the store's namespace of a served model; None if unknown."""
        if model is not None:
            namespace = self._namespaces.get(model) or self._learned_namespaces.get(model)
            if namespace:
                return namespace
        # An adapter has the namespace of its model, and vLLM accepts a request without a model. It
        # is unambiguous if there is only one namespace.
        namespaces = set(self._namespaces.values())
        return namespaces.pop() if len(namespaces) == 1 else None

    async def call(
        self,
        operation: Operation,
        call: Callable[[ProxyStore], Awaitable[T]],
        limit_s: float = PATIENT_S,
    ) -> T | None:
        """Return the store's answer; None if it did not answer, or is bypassed.

        Reads and writes have breakers of their own.
        """
        breaker = self._reading if operation in READS else self._writing
        if self._store is None or breaker.open:
            self.operations[operation, "skipped"] += 1
            return None
        try:
            async with asyncio.timeout(limit_s):
                answer = await call(self._store)
        except TimeoutError:
            self.operations[operation, "timeout"] += 1
            breaker.record_failure(f"no answer within {limit_s:g} s")
            return None
        except (StoreError, ValueError) as error:
            self.operations[operation, "error"] += 1
            breaker.record_failure(error)
            return None
        self.operations[operation, "ok"] += 1
        breaker.succeeded()
        return answer

    async def _refresh(self) -> None:
        while True:
            again_s = self._refresh_s
            operation: Operation = "open" if self._store is None else "namespaces"
            try:
                if self._store is None:
                    # The URL must name an existing store: an empty one at a mistyped path would
                    # always miss.
                    self._opened = self._opened or await self._open_store()
                    await self._opened.check()
                    self._store = self._opened
                async with asyncio.timeout(self._refresh_s):
                    self._namespaces = await self._store.namespaces()
                self.operations[operation, "ok"] += 1
                if self._problem is not None:
                    logger.info("the encoder store can be used")
                self._problem = None
                if not self._namespaces:
                    again_s = min(MISSING_EVERY_S, again_s)
            except (StoreError, ValueError, OSError) as error:  # TimeoutError is an OSError
                late = isinstance(error, TimeoutError)
                self.operations[operation, "timeout" if late else "error"] += 1
                if isinstance(error, StoreMissing):
                    again_s = MISSING_EVERY_S
                self._log_unusable(error, again_s)
            self._ready.set()
            self._refresh_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._refresh_now.wait()

    def _log_unusable(self, error: Exception, again_s: float) -> None:
        """Log the reason once, until it changes."""
        before, self._problem = self._problem, str(error) or "no answer"
        if self._problem == before:
            return
        if isinstance(error, StoreMissing):
            event, maker = "there is no encoder store", MAKERS
        else:
            event, maker = "the encoder store is unavailable", ""
        again = f"requests bypass it; the proxy retries every {again_s:g} s{maker}"
        logger.warning(event, reason=self._problem, next=again)

    def keep_running(self, task: str, work: Work) -> None:
        self.run_later(self._background.keep_running(task, work))

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background, outside the context of any request."""
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _warn(text: str) -> None:
    """Log a message with the logger that is configured at that time."""
    logger.warning(text)
