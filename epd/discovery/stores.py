"""Where registrations are kept: in this process, in a folder, in Redis.

A store that has lost what it held is given back what its readers know: nobody's registration ends
with a file that was deleted, or a Redis that came back empty. One that holds an empty list has not
lost it.
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
"""The file of a folder that registrations are in."""


class StoreFailed(Exception):
    """A store cannot be read or written. The message holds no secret."""


class Edit(NamedTuple):
    """A change: no instance has this URL any more, but for the one that is given."""

    url: str
    instance: Instance | None = None

    def of(self, instances: Sequence[Instance]) -> Instances:
        """The instances after it."""
        kept = tuple(one for one in instances if one.url != self.url)
        return kept if self.instance is None else (*kept, self.instance)


class Store(Protocol):
    """Registrations that outlive what registered them."""

    async def read(self) -> Instances | None:
        """All of them; None where the store is new, or has lost them.

        Raises:
            StoreFailed: nobody can tell.
        """

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        """Make a change, and return what there is after it.

        Args:
            known: what is put there first where the store has nothing.
            edit: the change; None: nothing but that.

        Raises:
            StoreFailed: it may or may not have been made.
        """


class InProcess:
    """Registrations that end with the process."""

    def __init__(self) -> None:
        self._held: Instances = ()

    async def read(self) -> Instances | None:
        """See `Store`."""
        return self._held

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        """See `Store`."""
        del known
        self._held = self._held if edit is None else edit.of(self._held)
        return self._held


class InFolder:
    """Registrations in a file, which all processes share that can reach it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    async def read(self) -> Instances | None:
        """See `Store`."""
        return await self._in_thread(self._read)

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        """See `Store`."""

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
    """The folder that a store's URL names, where it names one."""
    if url is None or not url.startswith("file://"):
        return None
    return Folder(Path(urlsplit(url).path))
