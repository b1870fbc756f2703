"""Encoder store: encoder outputs, shared by vLLM instances.

The names below are imported at their first use. `ec_store.device` has to run in an environment with
PyTorch alone, and the other modules of this package import more.
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
    from ec_store.opening import open_store
    from ec_store.urls import check_url

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
    "check_url": "urls",
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
    """Import a public name at its first use.

    Raises:
        AttributeError: `name` is not a public name of this package.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
