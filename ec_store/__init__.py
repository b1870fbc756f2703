"""The encoder cache: encoder outputs of vLLM instances, kept where other instances find them."""

from ec_store.base import Listed, Store, StoreStats
from ec_store.config import redacted
from ec_store.entry import Entry, EntryInfo
from ec_store.errors import CorruptEntry, EntryTooLarge, StoreError, StoreUnavailable
from ec_store.keys import EntryKey
from ec_store.opening import check_url, open_store

__all__ = [
    "CorruptEntry",
    "Entry",
    "EntryInfo",
    "EntryKey",
    "EntryTooLarge",
    "Listed",
    "Store",
    "StoreError",
    "StoreStats",
    "StoreUnavailable",
    "check_url",
    "open_store",
    "redacted",
]
