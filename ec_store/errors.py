"""Errors that a store raises. A miss is not an error."""


class StoreError(Exception):
    """Base class of the errors that a store raises."""


class StoreUnavailable(StoreError):
    """Error of a store that cannot be reached or written now; a later retry may succeed."""


class StoreMissing(StoreUnavailable):
    """Error of a path without a store, for a caller that does not create one."""


class CorruptEntry(StoreError):
    """Error of bytes that are not the expected entry.

    They may be cut, changed, another key's entry, or in another format.
    """


class OtherFormat(CorruptEntry):
    """Error of an entry that another release has written. It is a miss, and it stays."""


class EntryTooLarge(StoreError):
    """Error of an entry that is larger than the store accepts."""
