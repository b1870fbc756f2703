"""Findings about this machine and the configuration, and facts about the store.

Neither needs an instance. The store is used as the proxy and the engines use it.
"""

import asyncio
import os
import resource
import secrets
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

import psutil

from ec_store.aio import AsyncStore
from ec_store.errors import StoreError, StoreMissing
from ec_store.keys import EntryKey
from ec_store.opening import open_async_store
from ec_store.urls import writing_bytes
from epd.config import ProxyConfig
from epd.edge.access import is_loopback
from epd.edge.request_head import PER_CLIENT, RESERVED
from epd.routing.instances import Instance
from epd.tools.doctor.facts import Finding, Mount, StoreFacts, fail, mount_of, ok, warn
from epd.tools.engine_ends import end_cause
from epd.transfer.encoded import OutputFacts

SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
MIN_SOMAXCONN, GOOD_SOMAXCONN = 1024, 4096
"""Values of `net.core.somaxconn`. Below the first, a burst of clients may not fit. The second is
the default of Linux since 5.4."""

ACCELERATORS = ("nvidia[0-9]*", "kfd", "dri/renderD*")
"""Patterns below /dev that match a GPU of NVIDIA, AMD or Intel."""

LOG_BYTES = 2**20
"""Bytes at the end of an engine's log that are searched for the cause of its end."""

LOAD_BALANCER_S = 60.0
"""Idle timeout of connections of common load balancers. A proxy behind one must keep idle
connections for longer; otherwise it may close a connection while a request arrives on it."""


def judge_host(config: ProxyConfig) -> Iterator[Finding]:
    """Yield the findings about limits, permissions and settings, which need no instance."""
    yield from _judge_descriptors(config)
    yield from judge_backlog(_somaxconn())
    yield from _judge_umask()
    yield from _judge_media(config)
    yield from _judge_keep_alive(config)
    yield from _judge_access(config)


def _judge_descriptors(config: ProxyConfig) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = -(-config.max_requests // config.workers)
    needed = RESERVED + PER_CLIENT * each
    if hard < needed:
        yield warn(
            "descriptors",
            f"a process may open {hard}, {each} concurrent requests need {needed}",
            f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {needed} or more",
        )
    else:
        yield ok("descriptors", f"a process may open {hard}")


def has_no_device(*instances: Instance) -> bool:
    """Return whether these instances run on this machine, and it has no accelerator."""
    own = {found.address for interface in psutil.net_if_addrs().values() for found in interface}
    hosts = [urlsplit(instance.url).hostname or "" for instance in instances]
    if not all(is_loopback(host) or host in own for host in hosts):
        return False
    return not any(found for pattern in ACCELERATORS for found in Path("/dev").glob(pattern))


def _somaxconn() -> int | None:
    try:
        return int(SOMAXCONN.read_text())
    except (OSError, ValueError):  # not Linux, or not readable in this container
        return None


def judge_backlog(somaxconn: int | None) -> Iterator[Finding]:
    """Judge `net.core.somaxconn` of Linux; None: not known."""
    if somaxconn is None:
        return
    seen = f"the kernel queues {somaxconn} connections until the proxy accepts them"
    if somaxconn < MIN_SOMAXCONN:
        yield warn(
            "backlog",
            f"{seen}: in a larger burst, clients wait 1 s or longer to connect",
            f"run sysctl -w net.core.somaxconn={GOOD_SOMAXCONN} here, and in the proxy's container "
            "or pod: it is a setting of the network namespace",
        )
    else:
        yield ok("backlog", seen)


def _judge_umask() -> Iterator[Finding]:
    mask = os.umask(0o077)
    os.umask(mask)
    if mask & 0o002:
        yield ok("umask", f"{mask:04o}")
    else:
        yield warn("umask", f"{mask:04o}: every user may write to new files", "set umask 027")


def _judge_media(config: ProxyConfig) -> Iterator[Finding]:
    folder = config.allowed_local_media_path
    if folder is not None and not os.access(folder, os.R_OK | os.X_OK):
        yield warn(
            "media", f"{folder} cannot be read on this machine", "mount it as on the instances"
        )
    if config.media_fetch == "proxy" and not config.allowed_media_domains:
        yield warn(
            "media",
            "the proxy fetches from any host with a public address",
            "name the allowed hosts in --allowed-media-domains",
        )
    elif config.media_fetch == "proxy":
        if not config.media_fetch_trust_env and getproxies_environment().keys() & {"http", "https"}:
            yield warn(
                "media",
                "the proxy fetches media directly, although HTTP_PROXY or HTTPS_PROXY is set",
                "set --media-fetch-trust-env if only the forward proxy reaches the origins",
            )
    else:
        yield warn(
            "media",
            "engines fetch http(s) media themselves, from every host that they can reach",
            "give the engines --allowed-media-domains, or the proxy --media-fetch proxy",
        )


def _judge_keep_alive(config: ProxyConfig) -> Iterator[Finding]:
    if config.keep_alive_s <= LOAD_BALANCER_S:
        yield warn(
            "keep-alive",
            f"the proxy closes idle client connections after {config.keep_alive_s:g} s",
            "set --keep-alive-s above the idle timeout of the load balancer, often "
            f"{LOAD_BALANCER_S:g} s",
        )
    else:
        yield ok(
            "keep-alive", f"the proxy keeps idle client connections for {config.keep_alive_s:g} s"
        )


def _judge_access(config: ProxyConfig) -> Iterator[Finding]:
    if config.admin_api_key is None and (config.uds or not is_loopback(config.host)):
        answers = "only the proxy's own user" if config.uds else "403"
        yield warn(
            "access",
            f"no admin key: /metrics, /ui/state, /policies and profiling answer {answers}",
            "set EPD_ADMIN_API_KEY, or let --host be a loopback address",
        )
    if "*" in config.allowed_origins and config.api_keys_file is None:
        yield warn(
            "access",
            "no API keys and any origin: every web page in a client's browser can use the proxy",
            "name the allowed origins in --allowed-origins, or set --api-keys-file",
        )
    if config.api_keys_file is not None and config.key_secret is None:
        yield warn(
            "access",
            "no key secret: a process that can list the store can guess tenants' keys",
            "set EPD_KEY_SECRET, the same for every replica",
        )


def judge_logs(folder: Path) -> Iterator[Finding]:
    """Yield the known causes of ends in the logs of engines in a folder.

    If it has the folders of several runs of `epd up`, the latest one counts.
    """
    runs = sorted(log.parent for log in folder.glob("*/*.log"))
    for log in sorted((runs[-1] if runs else folder).glob("*.log")):
        with suppress(OSError), log.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - LOG_BYTES))
            cause = end_cause(opened.read().decode(errors="replace"))
            if cause is not None:
                yield fail("log", f"{log}: the engine ended", cause)


LOOKS = 9
"""Number of lookups. Their median is the round trip time."""
ARRIVES_S = 5.0
"""Maximum time until a new entry appears: encode instances write in the background."""
SEARCH_S = 2.0
"""Deadline for the search of all namespaces for a missing entry."""
WITHIN_S = 10.0
"""Deadline for all operations on the store."""


async def look_at_store(url: str, made: OutputFacts | None) -> StoreFacts:
    """Return the facts about the store, and whether it has `made`.

    That is the output that an encode instance just wrote, as the instance reported it; None: there
    is none to look up.
    """
    folder = _folder(url)
    try:
        async with asyncio.timeout(WITHIN_S), await open_async_store(url, create=False) as store:
            entry = None if made is None else await _entry(store, made)
            lost = made if entry == "missing" else None
            elsewhere = None if lost is None else await _other_namespace(store, lost)
            stats = await store.stats()
            return StoreFacts(
                round_trip_s=await _round_trip_s(store),
                writable=await _writable(store),
                entry=entry,
                elsewhere=elsewhere,
                bytes=stats.bytes,
                max_bytes=stats.max_bytes,
                writing_bytes=writing_bytes(url),
                free_bytes=None if folder is None else shutil.disk_usage(folder).free,
                mount=None if folder is None else _mount(folder),
            )
    except TimeoutError:
        return StoreFacts(problem=f"no answer within {WITHIN_S:g} s")
    except (StoreError, OSError) as error:
        return StoreFacts(problem=str(error), missing=isinstance(error, StoreMissing))


async def _entry(store: AsyncStore, made: OutputFacts) -> str:
    if made.namespace is None or made.identifier is None:
        return "missing"
    key = EntryKey(made.namespace, made.identifier)
    until_s = time.monotonic() + ARRIVES_S
    while (await store.lookup([key]))[0] is None:
        if time.monotonic() > until_s:
            return "missing"
        await asyncio.sleep(0.1)
    return "found" if await store.get(key) is None else "read"


async def _other_namespace(store: AsyncStore, made: OutputFacts) -> str | None:
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


def _folder(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _mount(folder: Path) -> Mount | None:
    with suppress(OSError):
        return mount_of(folder.resolve(), psutil.disk_partitions(all=True))
    return None
