"""Facts about the store, which is used as the proxy and the engines use it."""

import asyncio
import secrets
import shutil
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import unquote, urlsplit

import psutil

from ec_store.aio import AsyncStore
from ec_store.arena.remote_url import SCHEMES as REMOTE
from ec_store.backends import find_backend
from ec_store.errors import StoreError, StoreMissing
from ec_store.keys import EntryKey
from ec_store.opening import open_async_store
from epd.config import ProxyConfig
from epd.tools.doctor.facts import Mount, StoreFacts
from epd.tools.doctor.trials import Limits
from epd.transfer.encoded import OutputFacts

LOOKS = 9
"""Number of lookups. Their median is the round trip time."""

WITHIN_S = 10.0
"""Deadline for all operations on the store."""


async def read_store(config: ProxyConfig, made: OutputFacts | None, limits: Limits) -> StoreFacts:
    """Return the facts about the store, and whether it has `made`.

    That is the output that an instance just wrote, as the instance reported it; None: there
    is none to look up.
    """
    budget_s, url = config.ec_store_budget_s, config.ec_store
    if url is None:
        return StoreFacts(budget_s, is_configured=False)
    parts = urlsplit(url)
    if parts.scheme in REMOTE:
        problem = "the memory of another host: run `epd doctor` on that host, with its shm:// URL"
        return StoreFacts(budget_s, problem=problem)
    folder = Path(unquote(parts.path)) if parts.scheme == "file" else None
    try:
        async with asyncio.timeout(WITHIN_S), await open_async_store(url, create=False) as store:
            entry = None if made is None else await _entry(store, made, limits.arrives_s)
            stats = await store.stats()
            return StoreFacts(
                budget_s,
                round_trip_s=await _round_trip_s(store),
                is_writable=await _writable(store),
                entry=entry,
                bytes=stats.bytes,
                max_bytes=stats.max_bytes,
                writing_bytes=find_backend(url).writing_bytes(url),
                free_bytes=None if folder is None else shutil.disk_usage(folder).free,
                full_bytes=limits.full_bytes,
                mount=None if folder is None else _mount(folder),
            )
    except TimeoutError:
        return StoreFacts(budget_s, problem=f"no answer within {WITHIN_S:g} s")
    except (StoreError, OSError) as error:
        missing = isinstance(error, StoreMissing)
        return StoreFacts(budget_s, problem=str(error), is_missing=missing)


async def _entry(store: AsyncStore, made: OutputFacts, arrives_s: float) -> str:
    if made.namespace is None or made.identifier is None:
        return "missing"
    key = EntryKey(made.namespace, made.identifier)
    until_s = time.monotonic() + arrives_s
    while (await store.lookup([key]))[0] is None:
        if time.monotonic() > until_s:
            return "missing"
        await asyncio.sleep(0.1)
    return "found" if await store.get(key) is None else "read"


async def _round_trip_s(store: AsyncStore) -> float:
    times = []
    for _ in range(LOOKS):
        started_s = time.perf_counter()
        await store.lookup([_random_key()])
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


async def _writable(store: AsyncStore) -> bool:
    owner = f"epd-doctor-{secrets.token_hex(8)}"
    key = _random_key()
    try:
        claimed = await store.claim([key], owner, 1.0)
        await store.release([key], owner)
    except StoreError:
        return False
    return claimed == [True]


def _random_key() -> EntryKey:
    return EntryKey("epd-doctor", secrets.token_hex(32))


def _mount(folder: Path) -> Mount | None:
    with suppress(OSError):
        return mount_of(folder.resolve(), psutil.disk_partitions(all=True))
    return None


def mount_of(path: PurePath, table: Iterable[tuple[str, str, str, str]]) -> Mount | None:
    """Return the mount of an absolute path without symbolic links; None: the table has none.

    The table has device, mount point, type and options of each mount. Of several mounts at one
    mount point the last one counts.
    """
    mounts = [Mount(PurePosixPath(place), kind) for _, place, kind, _ in table]
    around = [mount for mount in mounts if path.is_relative_to(mount.path)]
    return max(reversed(around), key=lambda mount: len(mount.path.parts), default=None)
