"""What a child of `fork` has to make anew: a lock that a thread of its parent held stays held."""

import os
import weakref
from collections.abc import Callable

_renewed: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
"""Names of methods, by the objects that have them."""


def after_fork(renew: Callable[[], None]) -> None:
    """Have a bound method called in every child, for as long as its object lives."""
    _renewed[renew.__self__] = renew.__name__  # type: ignore[attr-defined]


def _renew_all() -> None:
    for owner, name in list(_renewed.items()):
        getattr(owner, name)()


# Once: the system keeps what is registered for ever.
os.register_at_fork(after_in_child=_renew_all)
