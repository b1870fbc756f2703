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
            except Exception:
                self.counts.add(exceptions=1)
                if method.__name__ not in self.logged:
                    self.logged.add(method.__name__)
                    logger.exception("%s failed; the engine goes on without", method.__name__)
                return cast("T", default())

        return call

    return wrap
