"""Measure what Redis keeps under `maxmemory`: readable entries, and memory.

    .venv/bin/python scripts/bench_redis.py

It starts a separate server with deploy/kubernetes/redis.conf. Entries of different sizes fill the
memory several times, while half as many entries are read.
"""

import argparse
import asyncio
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from aiohttp.test_utils import TestServer

from ec_store import Entry, EntryKey, Store, StoreUnavailable, open_store
from ec_store.aio import AsyncStore
from ec_store.entry import EntryInfo
from ec_store.service import create_app

CONFIG = Path(__file__).parents[1] / "deploy/kubernetes/redis.conf"
MEGABYTE = 10**6
WIDTH = 2048
ITEM_BYTES = 2
NAMESPACE = "bench"
RECENT = 16
"""Number of the latest entries from which the next one to read is drawn."""

SETTLE_S = 5.0
"""Time after which Redis has released the buffers of idle connections, in seconds."""


def main() -> None:
    """Print a line for each measurement."""
    args = _arguments()
    with _server(args.port) as client, open_store(f"redis://127.0.0.1:{args.port}") as store:
        print(f"memory per byte of payload, 20 entries of 9 MB: {_overhead(store, client):.3f}")
        client.flushall()
        client.config_set("maxmemory", args.maxmemory_mb * MEGABYTE)
        keys = _turned_over(store, args)
        kept, readable, named, found = _readable(store, client, keys)
        print(f"unreadable of {kept / MEGABYTE:.0f} MB kept: {1 - readable / kept:.1%}")
        print(f"entries that a lookup finds: {named}, of which can be read: {found}")
        client.config_set("maxmemory", 0)
        client.flushall()
        commands = asyncio.run(_commands_of_serve(client, args.port))
        print(f"commands of an idle ec-store serve in 10 s, 30,000 keys: {commands}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=6390)
    parser.add_argument("--maxmemory-mb", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3, help="times that the memory is filled")
    parser.add_argument("--seconds", type=float, default=120, help="duration in seconds")
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[0.5, 2, 9, 20, 30], help="sizes of entries"
    )
    return parser.parse_args()


@contextmanager
def _server(port: int) -> Iterator[Any]:
    binary = shutil.which("redis-server")
    if binary is None:
        raise SystemExit("redis-server is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, str(CONFIG), "--port", str(port), "--dir", folder, "--bind", "127.0.0.1"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield redis.Redis(port=port, protocol=2)
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("redis-server did not start within 30 s")


def _entry(megabytes: float) -> Entry:
    rows = int(megabytes * MEGABYTE) // (WIDTH * ITEM_BYTES)
    payload = random.randbytes(rows * WIDTH * ITEM_BYTES)  # noqa: S311
    return Entry(memoryview(payload), "BF16", (rows, WIDTH), "image")


def _overhead(store: Store, client: Any) -> float:
    entry = _entry(9)
    store.lookup([EntryKey(NAMESPACE, "connect")])
    before = client.info("memory")["used_memory"]
    for number in range(20):
        store.put(EntryKey(NAMESPACE, f"memory-{number}"), entry)
    time.sleep(SETTLE_S)
    return float((client.info("memory")["used_memory"] - before) / (20 * entry.data.nbytes))


def _turned_over(store: Store, args: argparse.Namespace) -> list[EntryKey]:
    """Fill the memory several times, and return the keys."""
    entries = [_entry(size) for size in args.megabytes]
    keys: list[EntryKey] = []
    written, goal = 0, args.turns * args.maxmemory_mb * MEGABYTE
    choice, began = random.Random(1), time.monotonic()  # noqa: S311
    while written < goal:
        entry = choice.choice(entries)
        keys.append(EntryKey(NAMESPACE, f"entry-{len(keys)}"))
        try:
            store.put(keys[-1], entry)
        except StoreUnavailable as error:
            print(f"not written: {error}")
        if len(keys) % 2:
            store.get(choice.choice(keys[-RECENT:]))
        written += entry.data.nbytes
        time.sleep(max(0, began + args.seconds * written / goal - time.monotonic()))
    return keys


def _readable(store: Store, client: Any, keys: Sequence[EntryKey]) -> tuple[int, int, int, int]:
    """Return bytes kept and readable, and the numbers of entries found and readable."""
    client.config_set("maxmemory", 0)
    infos = store.lookup(keys)
    names = list(client.scan_iter())
    kept = sum(client.strlen(name) for name in names if client.type(name) == b"string")
    found = [info.size_bytes for key in keys if (info := _info_if_readable(store, key))]
    return kept, sum(found), sum(info is not None for info in infos), len(found)


def _info_if_readable(store: Store, key: EntryKey) -> EntryInfo | None:
    [info] = store.lookup([key])
    return info if store.get(key) is not None else None


async def _commands_of_serve(client: Any, port: int) -> int:
    with open_store(f"redis://127.0.0.1:{port}") as store:
        entry = _entry(0.005)
        for number in range(30_000):
            store.put(EntryKey(NAMESPACE, str(number)), entry)
    app = create_app(AsyncStore(open_store(f"redis://127.0.0.1:{port}")), interval_s=10.0)
    before = client.info("stats")["total_commands_processed"]
    async with TestServer(app):
        await asyncio.sleep(10)
    return int(client.info("stats")["total_commands_processed"] - before - 1)


if __name__ == "__main__":
    main()
