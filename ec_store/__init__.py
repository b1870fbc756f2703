"""The encoder cache: encoder outputs of vLLM instances, kept where other instances find them.

The names below are imported when they are first used: `ec_store.device` runs where there is nothing
but PyTorch, and the rest of this package needs more.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ec_store.base import Listed, Store, StoreStats
    from ec_store.config import redacted
    from ec_store.entry import Entry, EntryInfo
    from ec_store.errors import (
        CorruptEntry,
        EntryTooLarge,
        StoreError,
        StoreMissing,
        StoreUnavailable,
    )
    from ec_store.keys import EntryKey
    from ec_store.opening import check_url, open_store

_MODULES = {
    "CorruptEntry": "errors",
    "Entry": "entry",
    "EntryInfo": "entry",
    "EntryKey": "keys",
    "EntryTooLarge": "errors",
    "Listed": "base",
    "Store": "base",
    "StoreError": "errors",
    "StoreMissing": "errors",
    "StoreStats": "base",
    "StoreUnavailable": "errors",
    "check_url": "opening",
    "open_store": "opening",
    "redacted": "config",
}

__all__ = [
    "CorruptEntry",
    "Entry",
    "EntryInfo",
    "EntryKey",
    "EntryTooLarge",
    "Listed",
    "Store",
    "StoreError",
    "StoreMissing",
    "StoreStats",
    "StoreUnavailable",
    "check_url",
    "open_store",
    "redacted",
]


def __getattr__(name: str) -> object:
    """Import a public name.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
