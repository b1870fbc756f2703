"""Registration of the namespace that an engine's entries have."""

import logging
import threading
import time
from collections.abc import Callable

from ec_store.base import Store
from ec_store.concurrency import DaemonPool
from ec_store.errors import StoreError

logger = logging.getLogger("vllm.ec_store")

RETRY_S = 10.0
"""Seconds between two attempts."""


class NamespaceRegistration:
    """Registration of a served model's namespace, on a thread that retries until it succeeds.

    An engine serves even if the store is unreachable or hangs, or the thread cannot be started.
    Until the namespace is registered, a proxy finds no entries and sends media.

    `start` is called in each step: it does nothing once the thread has started.
    """

    def __init__(
        self,
        store: Store,
        model: str,
        namespace: str,
        *,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._model = model
        self._namespace = namespace
        self._retry_s = retry_s
        self._clock = clock
        self._closed = threading.Event()
        self._pool = DaemonPool(1, "ec-store-register")
        self._queued = False
        self._due_s = clock()
        self.start()

    def start(self) -> None:
        """Start the thread; if that fails, the first call after `retry_s` tries again."""
        if not self._queued and self._clock() >= self._due_s:
            self._queued, self._due_s = True, self._clock() + self._retry_s
            self._pool.queue_job(self._run, self._refuse)

    def _refuse(self) -> None:
        self._queued = False

    def close(self) -> None:
        """Stop retrying; a call that is running ends by itself."""
        self._closed.set()
        self._pool.close()

    def _run(self) -> None:
        failed = False
        while not self._closed.is_set():
            try:
                self._register()
            except StoreError as error:
                if not failed:
                    logger.warning(
                        "the encoder store cannot be used; retrying every %g s: %s",
                        self._retry_s,
                        error,
                    )
                failed = True
                self._closed.wait(self._retry_s)
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
