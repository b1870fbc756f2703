"""Clients' names for their media, which the encoder store has with the key behind each name."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ec_store.bounded import BoundedDict
from ec_store.entry import Entry, EntryInfo
from ec_store.keys import EntryKey
from epd.encoder_cache.client import EncoderCache
from epd.errors import RequestRefused, no_store

NO_TENSOR = memoryview(b"")
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


class ClientNames:
    """The stored names, visible to every proxy on the store. Belongs to one event loop.

    If overwriting a name fails, its old value would be the wrong picture. The proxy ignores that
    value from then on. If the old value is unknown, it ignores every value until it has written the
    name.
    """

    def __init__(self, cache: EncoderCache) -> None:
        self._cache = cache
        self._stale: BoundedDict[EntryKey, Mapping[str, Any] | None] = BoundedDict(MAX_STALE)

    async def store_name(
        self, model: str | None, name: str, modality: str, stands_for: Name
    ) -> None:
        """Store the meaning of a name. It expires as unused entries do."""
        keys = self._keys(model, [name])
        if not keys:
            return
        [key] = keys
        metadata = stands_for._asdict()
        infos = await self._cache.call("get_name", lambda store: store.lookup(keys))
        before = infos[0].metadata if infos and infos[0] is not None else None
        if before == metadata:
            self._stale.pop(key, None)
            return
        entry = Entry(NO_TENSOR, "F32", (0,), modality, metadata)
        written: bool | None = None
        try:
            written = await self._cache.call(
                "put_name", lambda store: store.put(key, entry, replace=True)
            )
        finally:
            if written:
                self._stale.pop(key, None)
            else:
                self._stale[key] = before

    async def recall_names(self, model: str | None, names: Sequence[str]) -> Mapping[str, Name]:
        """Return the meanings of the known names.

        Raises:
            RequestRefused: 503, the store did not answer.
        """
        keys = self._keys(model, names)
        infos: Sequence[EntryInfo | None] | None = []
        if keys:
            infos = await self._cache.call("get_name", lambda store: store.lookup(keys))
        if infos is None:
            raise no_store("the encoder store did not answer; retry later")
        metadata_by_key = {info.key: info.metadata for info in infos if info is not None}
        if metadata_by_key:
            self._cache.run_later(self._cache.lease(list(metadata_by_key)))
        return {
            key.identifier: Name(str(metadata.get("key")), bool(metadata.get("own")))
            for key, metadata in metadata_by_key.items()
            if key not in self._stale or self._stale[key] not in (None, metadata)
        }

    async def drop_name(self, model: str | None, name: str, unless: str | None) -> None:
        """Delete a name, unless it stands for this key. Without an answer, the name is ignored."""
        with suppress(RequestRefused):
            meaning = (await self.recall_names(model, [name])).get(name)
            if meaning is not None and meaning.key == unless:
                return
        with suppress(RequestRefused):
            await self.delete_names(model, [name])

    async def delete_names(
        self, model: str | None, names: Sequence[str], identifiers: Sequence[str] = ()
    ) -> None:
        """Delete names and entries.

        Raises:
            RequestRefused: 503, the store did not answer. This proxy still ignores the names.
        """
        keys = self._keys(model, names)
        namespace = self._cache.namespace(model)
        entries = [EntryKey(namespace, identifier) for identifier in identifiers if namespace]
        count: int | None = None
        try:
            count = await self._cache.call("delete", lambda store: store.delete(keys + entries))
        finally:
            for key in keys:
                if count is None:
                    self._stale[key] = None
                else:
                    self._stale.pop(key, None)
        if count is None:
            raise no_store("the encoder store did not answer; retry later")

    def _keys(self, model: str | None, names: Sequence[str]) -> list[EntryKey]:
        """Return the keys of names; an empty list if their namespace is unknown."""
        namespace = self._cache.namespace(model)
        return [] if namespace is None else [EntryKey(f"{namespace}#names", name) for name in names]
