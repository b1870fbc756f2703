"""What keeps exceptions out of an engine, which would end with them."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from ec_store.counts import Counts

logger = logging.getLogger("vllm.ec_store")

T = TypeVar("T")


class Guarded(Protocol):
    """What has guarded methods.

    Attributes:
        counts: gets `exceptions`.
        logged: names of the methods whose exceptions were logged.
    """

    counts: Counts
    logged: set[str]


def guarded(default: Callable[[], Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Answer a default where a method raises.

    Exceptions are counted, and logged in full the first time each method raises one.
    """

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - an engine must not end of it
                caught(self, method.__name__, error)
                return cast("T", default())

        return call

    return wrap


def caught(on: Guarded, name: str, error: Exception) -> None:
    """Count an exception of a method, and log the first one of each method in full."""
    on.counts.add(exceptions=1)
    if name not in on.logged:
        on.logged.add(name)
        logger.error("%s failed; the engine goes on without", name, exc_info=error)
