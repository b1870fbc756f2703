"""Encoder store: encoder outputs, shared by vLLM instances.

The names below are imported at their first use. `ec_store.engine.region` has to run in an
environment with PyTorch alone, and the other modules of this package import more.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ec_store.base import Listed as Listed
    from ec_store.base import Store as Store
    from ec_store.base import StoreStats as StoreStats
    from ec_store.config import redacted as redacted
    from ec_store.entry import Entry as Entry
    from ec_store.entry import EntryInfo as EntryInfo
    from ec_store.errors import CorruptEntry as CorruptEntry
    from ec_store.errors import EntryTooLarge as EntryTooLarge
    from ec_store.errors import StoreError as StoreError
    from ec_store.errors import StoreMissing as StoreMissing
    from ec_store.errors import StoreUnavailable as StoreUnavailable
    from ec_store.keys import EntryKey as EntryKey
    from ec_store.opening import open_store as open_store
    from ec_store.urls import check_url as check_url

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

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
