"""Options of the connector, guard of its methods, and registration of its namespace."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel, ByteSize, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from ec_store.base import Store
from ec_store.concurrency import NO_THREAD
from ec_store.counts import Counts
from ec_store.engine.fetcher import MEMORY_BYTES
from ec_store.engine.writer import QUEUE_BYTES
from ec_store.errors import StoreError


class ConnectorConfig(BaseModel):
    """Options of the connector, which the operator writes into `ec_connector_extra_config`.

    Attributes:
        store: URL of the store, as for `ec_store.open_store`.
        generation: part of the namespace. A new number starts with an empty cache.
        timeout_s: seconds after which an entry that has not arrived is a miss.
        promise_timeout_s: the same for an entry that the request's `ec_transfer_params` names.
        memory_bytes: host memory of the scheduler's process for entries that requests need, entries
            kept after them, and entries being fetched.
        fetch_threads: number of entries fetched at once; None for the default of the store.
        queue_bytes: upper bound of the host memory of entries that wait to be written.
        region_bytes: memory that a consumer with several workers shares with them; None for
            `memory_bytes`.
        encoder_output_widths: columns of encoder outputs by modality, needed if neither vLLM nor
            the model's configuration provides them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: str
    generation: NonNegativeInt = 0
    timeout_s: PositiveFloat = 1.0
    promise_timeout_s: PositiveFloat = 5.0
    memory_bytes: ByteSize = ByteSize(MEMORY_BYTES)
    fetch_threads: PositiveInt | None = None
    queue_bytes: ByteSize = ByteSize(QUEUE_BYTES)
    region_bytes: ByteSize | None = None
    encoder_output_widths: Mapping[str, PositiveInt] = {}


logger = logging.getLogger("vllm.ec_store")

T = TypeVar("T")


class Guarded(Protocol):
    """Interface of an object with guarded methods, see `ECStoreConnector`."""

    counts: Counts
    logged: set[str]


def guard_method(default: Callable[[], Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator: a method that raises returns a default, and does not end the engine.

    Exceptions are counted. The first one of each method is logged with its traceback.
    """

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - it must not end the engine
                count_exception(self, method.__name__, error)
                return cast("T", default())

        return call

    return wrap


def count_exception(on: Guarded, name: str, error: Exception) -> None:
    """Count an exception, and log the first one of each method with its traceback."""
    on.counts.add(exceptions=1)
    if name not in on.logged:
        on.logged.add(name)
        logger.error("%s failed; the engine continues without its result", name, exc_info=error)


RETRY_S = 10.0


class NamespaceRegistration:
    """Registration of a served model's namespace, on a thread that retries until it succeeds.

    An engine serves even if the store is unreachable or hangs, or the thread cannot be started.
    Until the namespace is registered, a proxy finds no entries and sends media.

    `start` is called in each step: it does nothing once the thread has started.
    """

    def __init__(self, store: Store, model: str, namespace: str) -> None:
        self._store = store
        self._model = model
        self._namespace = namespace
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ec-store-register", daemon=True)
        self._refused_s: float | None = None
        self.start()

    def start(self) -> None:
        """Start the thread; if that fails, the first call after `RETRY_S` tries again."""
        if self._thread.ident is not None:
            return
        refused_s, now_s = self._refused_s, time.monotonic()
        if refused_s is not None and now_s < refused_s + RETRY_S:
            return
        try:
            self._thread.start()
        except RuntimeError as error:
            self._refused_s = now_s
            if refused_s is None:
                logger.warning(NO_THREAD, self._thread.name, error)

    def close(self) -> None:
        """Stop retrying; a call that is running ends by itself."""
        self._closed.set()

    def _run(self) -> None:
        failed = False
        while not self._closed.is_set():
            try:
                self._register()
            except StoreError as error:
                if not failed:
                    logger.warning(
                        "the encoder store cannot be used; retrying every %g s: %s", RETRY_S, error
                    )
                failed = True
                self._closed.wait(RETRY_S)
            else:
                if failed:
                    logger.info("the encoder store can be used again")
                return

    def _register(self) -> None:
        known = self._store.namespaces().get(self._model)
        if known not in {None, self._namespace}:
            logger.warning(
                "%s was served from namespace %s: other encoder weights, configuration, dtype or "
                "generation. Its entries are not shared with this engine.",
                self._model,
                known,
            )
        self._store.register_namespace(self._model, self._namespace)
