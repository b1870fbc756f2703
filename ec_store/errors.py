"""What can go wrong in a store. A miss is none of it."""


class StoreError(Exception):
    """Base of what a store raises."""


class StoreUnavailable(StoreError):
    """The store cannot be reached, or cannot be written, now. Trying again later may help."""


class StoreMissing(StoreUnavailable):
    """There is no store at the path, and the caller does not make one."""


class CorruptEntry(StoreError):
    """Bytes that are not the entry they should be: cut, changed, foreign, or of another format."""


class EntryTooLarge(StoreError):
    """The entry is larger than the store takes."""
