"""Facts about the store, which is used as the proxy and the engines use it."""

import asyncio
import secrets
import shutil
import statistics
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from ec_store.aio import AsyncStore
from ec_store.errors import StoreError, StoreMissing
from ec_store.keys import EntryKey
from ec_store.opening import open_async_store
from epd.tools.doctor.facts import Mount, StoreFacts, mount_of
from epd.transfer.encoded import Encoded

LOOKS = 9
"""Number of lookups. Their median is the round trip time."""
ARRIVES_S = 5.0
"""Maximum time until a new entry appears: encode instances write in the background."""
SEARCH_S = 2.0
"""Deadline for the search of all namespaces for a missing entry."""
WITHIN_S = 10.0
"""Deadline for all operations on the store."""


async def look_at_store(url: str, made: Encoded | None) -> StoreFacts:
    """Return the facts about the store.

    Args:
        url: URL of the store.
        made: output that an encode instance just wrote, as the instance reported it; None: there
            is none to look up.
    """
    try:
        async with asyncio.timeout(WITHIN_S), await open_async_store(url, create=False) as store:
            entry = None if made is None else await _entry(store, made)
            lost = made if entry == "missing" else None
            elsewhere = None if lost is None else await _elsewhere(store, lost)
            stats = await store.stats()
            return StoreFacts(
                round_trip_s=await _round_trip_s(store),
                writable=await _writable(store),
                entry=entry,
                elsewhere=elsewhere,
                bytes=stats.bytes,
                max_bytes=stats.max_bytes,
                free_bytes=_free_bytes(url),
                mount=_mount(url),
            )
    except TimeoutError:
        return StoreFacts(problem=f"no answer within {WITHIN_S:g} s")
    except (StoreError, OSError) as error:
        return StoreFacts(problem=str(error), missing=isinstance(error, StoreMissing))


async def _entry(store: AsyncStore, made: Encoded) -> str:
    if made.namespace is None or made.identifier is None:
        return "missing"
    key = EntryKey(made.namespace, made.identifier)
    until_s = time.monotonic() + ARRIVES_S
    while (await store.lookup([key]))[0] is None:
        if time.monotonic() > until_s:
            return "missing"
        await asyncio.sleep(0.1)
    return "found" if await store.get(key) is None else "read"


async def _elsewhere(store: AsyncStore, made: Encoded) -> str | None:
    """Return another namespace that has the output; None: not found within `SEARCH_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SEARCH_S):
            async for listed in store.ls():
                key = None if listed.info is None else listed.info.key
                if key is not None and key.identifier == made.identifier:
                    return key.namespace
    return None


async def _round_trip_s(store: AsyncStore) -> float:
    times = []
    for _ in range(LOOKS):
        started_s = time.perf_counter()
        await store.lookup([_nobodys()])
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


async def _writable(store: AsyncStore) -> bool:
    owner = f"epd-doctor-{secrets.token_hex(8)}"
    key = _nobodys()
    try:
        claimed = await store.claim([key], owner, 1.0)
        await store.release([key], owner)
    except StoreError:
        return False
    return claimed == [True]


def _nobodys() -> EntryKey:
    return EntryKey("epd-doctor", secrets.token_hex(32))


def _mount(url: str) -> Mount | None:
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    with suppress(OSError):
        table = Path("/proc/self/mounts").read_text(errors="surrogateescape")
        return mount_of(PurePosixPath(Path(unquote(parts.path)).resolve()), table.splitlines())
    return None


def _free_bytes(url: str) -> int | None:
    parts = urlsplit(url)
    return shutil.disk_usage(unquote(parts.path)).free if parts.scheme == "file" else None
