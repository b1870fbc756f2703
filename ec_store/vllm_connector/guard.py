"""Guard of the connector's methods: an exception in one of them does not end the engine."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from ec_store.counts import Counts

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
