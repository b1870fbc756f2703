"""Lock renewal in a child of `fork`: a lock that another thread held stays held in the child."""

import os
import weakref
from collections.abc import Callable

_renewed: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
"""Names of the registered methods, by their objects."""


def after_fork(renew: Callable[[], None]) -> None:
    """Register a bound method to be called in every child of `fork` while its object lives."""
    _renewed[renew.__self__] = renew.__name__  # type: ignore[attr-defined]


def _renew_all() -> None:
    for owner, name in list(_renewed.items()):
        getattr(owner, name)()


# Registered once: the interpreter cannot unregister a function.
os.register_at_fork(after_in_child=_renew_all)
