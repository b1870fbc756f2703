"""Stores of registrations: in this process, in a folder, in Redis.

If a store has lost its data, its readers restore them: a deleted file or an empty Redis ends no
registration. A store with an empty list has not lost its data.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from epd.discovery.entries import EntriesInvalid, read_json, write_json
from epd.discovery.folder import Folder
from epd.routing.instances import Instance

T = TypeVar("T")

Instances = tuple[Instance, ...]

REGISTERED = "registered.json"
"""Name of the file with the registrations."""


class StoreFailed(Exception):
    """A read or a write failed. The message contains no secret."""


class Edit(NamedTuple):
    """A change: removes all instances with this URL, and adds the given one."""

    url: str
    instance: Instance | None = None

    def of(self, instances: Sequence[Instance]) -> Instances:
        """Return the instances after the change."""
        kept = tuple(one for one in instances if one.url != self.url)
        return kept if self.instance is None else (*kept, self.instance)


class Store(Protocol):
    """Registrations that outlive the process that registered them."""

    async def read(self) -> Instances | None:
        """Return all registrations; None if the store is new, or has lost its data.

        Raises:
            StoreFailed: the store did not answer.
        """

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        """Make a change, and return the result.

        Args:
            known: instances to write first if the store has lost its data.
            edit: the change; None for no other change.

        Raises:
            StoreFailed: the store did not answer; the change may have been made or not.
        """


class InProcess:
    """A store of registrations that ends with the process."""

    def __init__(self) -> None:
        self._held: Instances = ()

    async def read(self) -> Instances | None:
        return self._held

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        del known
        self._held = self._held if edit is None else edit.of(self._held)
        return self._held


class InFolder:
    """A store of registrations in a file, shared by all processes with access to it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    async def read(self) -> Instances | None:
        return await self._in_thread(self._read)

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        def write() -> Instances:
            with self._folder.locked():
                try:
                    held = self._read()
                except EntriesInvalid:
                    held = None
                after = known if held is None else held
                after = after if edit is None else edit.of(after)
                if after != held:
                    self._folder.write(REGISTERED, write_json(after))
                return after

        return await self._in_thread(write)

    def _read(self) -> Instances | None:
        content = self._folder.read(REGISTERED)
        return None if content is None else read_json(content)

    @staticmethod
    async def _in_thread(call: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(call)
        except OSError as error:
            raise StoreFailed(error.strerror or str(error)) from error
        except EntriesInvalid as error:
            raise StoreFailed(f"{REGISTERED}: {error}") from error


def folder_of(url: str | None) -> Folder | None:
    """Return the folder of a store's URL; None for another kind of URL."""
    if url is None or not url.startswith("file://"):
        return None
    return Folder(Path(urlsplit(url).path))
