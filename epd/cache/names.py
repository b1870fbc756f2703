"""Clients' names for their media, stored in the encoder-cache store."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ec_store import Entry, EntryInfo, EntryKey, StoreUnavailable
from ec_store.bounded import BoundedDict
from epd.cache.encoder_cache import EncoderCache

NOTHING = memoryview(b"")
"""The tensor of a name, which is an entry with only metadata."""

MAX_STALE = 65536
"""Upper bound of the names that are known to have a stale value in the store."""


class Name(NamedTuple):
    """The meaning of a client's name for its media.

    Attributes:
        key: key under which a consumer finds the output.
        own: whether the key is a digest that includes the tenant. A hash by an engine does not.
    """

    key: str
    own: bool


class Names:
    """The stored names, visible to every proxy on the store. Belongs to one event loop.

    If overwriting a name fails, its old value would be the wrong picture. The proxy ignores that
    value from then on. If the old value is unknown, it ignores every value until it has written the
    name.
    """

    def __init__(self, cache: EncoderCache) -> None:
        self._cache = cache
        self._stale: BoundedDict[EntryKey, Mapping[str, Any] | None] = BoundedDict(MAX_STALE)

    async def remember(self, model: str | None, name: str, modality: str, stands_for: Name) -> None:
        """Store the meaning of a name. It expires as unused entries do."""
        key = self._key(model, name)
        if key is None:
            return
        metadata = stands_for._asdict()
        infos = await self._cache.read("get_name", lambda store: store.lookup([key]))
        before = infos[0].metadata if infos and infos[0] is not None else None
        if before == metadata:
            self._stale.pop(key, None)
            return
        entry = Entry(NOTHING, "F32", (0,), modality, metadata)
        written: bool | None = None
        try:
            written = await self._cache.write(
                "put_name", lambda store: store.put(key, entry, replace=True)
            )
        finally:
            if written:
                self._stale.pop(key, None)
            else:
                self._disbelieve(key, before)

    async def recall(self, model: str | None, names: Sequence[str]) -> Mapping[str, Name]:
        """Return the meanings of the known names.

        Raises:
            StoreUnavailable: the store did not answer.
        """
        keys = [key for name in names if (key := self._key(model, name)) is not None]
        infos: Sequence[EntryInfo | None] | None = []
        if keys:
            infos = await self._cache.read("get_name", lambda store: store.lookup(keys))
        if infos is None:
            raise StoreUnavailable("the encoder cache did not answer")
        known = {info.key: info.metadata for info in infos if info is not None}
        if known:
            self._cache.later(self._cache.lease(list(known)))
        return {
            key.identifier: Name(str(metadata.get("key")), bool(metadata.get("own")))
            for key, metadata in known.items()
            if self._believes(key, metadata)
        }

    async def forget(
        self, model: str | None, names: Sequence[str], identifiers: Sequence[str] = ()
    ) -> None:
        """Delete names and entries.

        Raises:
            StoreUnavailable: the store did not answer. This proxy ignores the names nevertheless.
        """
        keys = [key for name in names if (key := self._key(model, name)) is not None]
        namespace = self._cache.namespace(model)
        entries = [EntryKey(namespace, one) for one in identifiers] if namespace else []
        deleted: int | None = None
        try:
            deleted = await self._cache.write(
                "delete", lambda store: store.delete([*keys, *entries])
            )
        finally:
            for key in keys:
                if deleted is None:
                    self._disbelieve(key, None)
                else:
                    self._stale.pop(key, None)
        if deleted is None:
            raise StoreUnavailable("the encoder cache did not answer")

    def _key(self, model: str | None, name: str) -> EntryKey | None:
        namespace = self._cache.namespace(model)
        return None if namespace is None else EntryKey(f"{namespace}#names", name)

    def _believes(self, key: EntryKey, metadata: Mapping[str, Any]) -> bool:
        return key not in self._stale or self._stale[key] not in (None, metadata)

    def _disbelieve(self, key: EntryKey, metadata: Mapping[str, Any] | None) -> None:
        self._stale[key] = metadata
