"""A proxy finds a model's entries by the namespace that engines register in the store."""

import logging
import threading

from ec_store.base import Store
from ec_store.errors import StoreError

logger = logging.getLogger("vllm.ec_store")

RETRY_S = 10.0


class Registration:
    """Registers the namespace of a served model, on a thread of its own, until it is in the store.

    A store that is away or hangs is no reason not to serve. Until the namespace is there, a proxy
    finds none and sends media.
    """

    def __init__(self, store: Store, model: str, namespace: str) -> None:
        """Begin."""
        self._store = store
        self._model = model
        self._namespace = namespace
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ec-store-register", daemon=True).start()

    def close(self) -> None:
        """Try no more."""
        self._closed.set()

    def _run(self) -> None:
        failed = False
        while not self._closed.is_set():
            try:
                self._register()
            except StoreError as error:
                if not failed:
                    logger.warning(
                        "the encoder cache cannot be used, and is tried again every %g s: %s",
                        RETRY_S,
                        error,
                    )
                failed = True
                self._closed.wait(RETRY_S)
            else:
                if failed:
                    logger.info("the encoder cache can be used now")
                return

    def _register(self) -> None:
        known = self._store.namespaces().get(self._model)
        if known not in {None, self._namespace}:
            logger.warning(
                "%s was served from namespace %s: other encoder weights, configuration, dtype or "
                "generation. Nothing is shared with it.",
                self._model,
                known,
            )
        self._store.register_namespace(self._model, self._namespace)
