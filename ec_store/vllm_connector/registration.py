"""Registration of the engine's namespace, by which a proxy finds a model's entries."""

import logging
import threading

from ec_store.base import Store
from ec_store.errors import StoreError

logger = logging.getLogger("vllm.ec_store")

RETRY_S = 10.0


class Registration:
    """Registration of a served model's namespace, on a thread that retries until it succeeds.

    An engine serves even if the store is unreachable or hangs. Until the namespace is registered, a
    proxy finds no entries and sends media.
    """

    def __init__(self, store: Store, model: str, namespace: str) -> None:
        """Start the thread that registers the namespace."""
        self._store = store
        self._model = model
        self._namespace = namespace
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ec-store-register", daemon=True).start()

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
                        "the encoder cache cannot be used; retrying every %g s: %s",
                        RETRY_S,
                        error,
                    )
                failed = True
                self._closed.wait(RETRY_S)
            else:
                if failed:
                    logger.info("the encoder cache can be used again")
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
