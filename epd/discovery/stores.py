"""Stores of registrations: in this process, in a folder, in Redis.

If a store has lost its data, its readers restore them: a deleted file or an empty Redis ends no
registration. A store with an empty list has not lost its data.

- Folder: small files that several processes share. Writes are atomic.
- Redis: a hash with one field for each registration, and a field that marks the hash as complete.
"""

import asyncio
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from epd.aio import cancel_after
from epd.discovery.entries import VERSION, EntriesInvalid, read_json, write_json
from epd.redis_urls import close, redis_client, redis_errors
from epd.routing.instances import Instance

LOCK_S = 5.0
"""Maximum wait for the lock, in seconds. A holder that takes longer is assumed to hang."""

MAX_BYTES = 1024**2
"""Maximum size of a file. A larger one was written by other software."""


class LockedFolder:
    """Folder of small files. Its calls block on the disk, so an event loop runs them on threads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist. Raise OSError if unreadable."""
        return read_file(self._path / name)

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a file atomically.

        Raises:
            OSError: the file cannot be written; the old content remains.
        """
        self._path.mkdir(mode=0o750, parents=True, exist_ok=True)
        staging = self._path / f".{name}.{secrets.token_hex(8)}"
        try:
            descriptor = os.open(staging, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(self._path / name)
        finally:
            staging.unlink(missing_ok=True)

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the folder's lock, which also ends with the process of its holder.

        Raises:
            OSError: the lock is not available.
        """
        self._path.mkdir(mode=0o750, parents=True, exist_ok=True)
        descriptor = os.open(self._path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640)
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)


def read_file(path: Path) -> bytes | None:
    """Return the content of a small file; None if it does not exist.

    Raises:
        OSError: the file cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(content) > MAX_BYTES:
        raise OSError(f"{path.name} has more than {MAX_BYTES} bytes")
    return content


def _lock(descriptor: int) -> None:
    deadline_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError("another process holds the lock") from None
            time.sleep(0.01)
        else:
            return


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

    def edited_instances(self, instances: Sequence[Instance]) -> Instances:
        kept = tuple(instance for instance in instances if instance.url != self.url)
        return kept if self.instance is None else (*kept, self.instance)


class RegistrationStore(Protocol):
    """Registrations that outlive the process that registered them."""

    async def read(self) -> Instances | None:
        """Return all registrations; None if the store is new, or has lost its data.

        Raises:
            StoreFailed: the store did not answer.
        """

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        """Make a change, and return the result. A store that has lost its data first gets `known`.

        Raises:
            StoreFailed: the store did not answer; the change may have been made or not.
        """


class InProcess:
    """A store of registrations that ends with the process."""

    def __init__(self) -> None:
        self._held: Instances = ()

    async def read(self) -> Instances | None:
        return self._held

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:  # noqa: ARG002
        self._held = self._held if edit is None else edit.edited_instances(self._held)
        return self._held


class InFolder:
    """A store of registrations in a file, shared by all processes with access to it."""

    def __init__(self, folder: LockedFolder) -> None:
        self._folder = folder

    async def read(self) -> Instances | None:
        return await self._in_thread(self._read)

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        def write() -> Instances:
            with self._folder.hold_lock():
                try:
                    held = self._read()
                except EntriesInvalid:
                    held = None
                after = known if held is None else held
                after = after if edit is None else edit.edited_instances(after)
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


def folder_of(url: str | None) -> LockedFolder | None:
    """Return the folder of a store's URL; None for another kind of URL."""
    if url is None or not url.startswith("file://"):
        return None
    return LockedFolder(Path(urlsplit(url).path))


KEY = "epd:instances"
"""Name of the hash; the `key` parameter of the URL replaces it."""

MARK = b"version"
"""The field that marks a complete hash. Without it, Redis has lost the data."""

TIMEOUT_S = 2.0
"""Timeout of a read, and of a write."""


class RegistrationsInRedis:
    """Implements `RegistrationStore` by a hash. Field: a URL; value: its instance in JSON."""

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str) -> AsyncIterator[Self]:
        """Return a store that connects at the first call. The URL's `key` names another hash."""
        client, key = redis_client(url, KEY)
        try:
            yield cls(client, key)
        finally:
            await close(client)

    async def read(self) -> Instances | None:
        with redis_errors(StoreFailed), cancel_after(TIMEOUT_S):
            found = await self._client.hgetall(self._key)
        return _instances(found)

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        async def change(pipe: Any) -> None:
            whole = await pipe.hexists(self._key, MARK)
            pipe.multi()
            if not whole:
                pipe.delete(self._key)
                pipe.hset(self._key, mapping={MARK: VERSION, **_fields(known)})
            if edit is not None and edit.instance is not None:
                pipe.hset(self._key, mapping=_fields((edit.instance,)))
            elif edit is not None:
                pipe.hdel(self._key, edit.url)
            pipe.hgetall(self._key)

        with redis_errors(StoreFailed), cancel_after(TIMEOUT_S):
            replies = await self._client.transaction(change, self._key)
        return _instances(replies[-1]) or ()


def _fields(instances: Instances) -> dict[str | bytes, bytes | int]:
    return {instance.url: write_json((instance,)) for instance in instances}


def _instances(found: dict[bytes, bytes]) -> Instances | None:
    if MARK not in found:
        return None
    try:
        rows = [read_json(value) for name, value in sorted(found.items()) if name != MARK]
    except EntriesInvalid as error:
        raise StoreFailed(f"the hash was not written by this proxy: {error}") from error
    return tuple(instance for row in rows for instance in row)
