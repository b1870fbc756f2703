"""Write to and read from a small memory of a host with many processes, and check every read.

    python -m tests.ec_store.arena.soak shm:///tmp/arena.sock --seconds 600

The entries come from a pool of ten times the memory's size (`--pool-bytes`), so that most writes
must evict. The content of an entry is derived from its key, so that a reader can check it: when it
gets the entry, and again when it drops it, some reads later. In the end nothing may be held in the
memory, and its entries must take all bytes that are not free.
"""

# ruff: noqa: T201 - a program

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import numpy as np

from ec_store import Entry, EntryKey, EntryTooLarge, Store, StoreUnavailable, open_store
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.protocol import GetStats, Stats
from ec_store.config import size_bytes, size_text

FORK = multiprocessing.get_context("fork")
NAMESPACE = "soak"
WIDTH = 2048
ITEM_BYTES = 2
ROWS = (64, 1024)
"""Minimum and maximum rows of an entry: 0.25 to 4 MiB."""

HELD = 4
"""Entries that a reader holds."""

END_S = 30.0
"""Seconds in which a memory must be free of what ended processes held."""


@dataclass(slots=True)
class Done:
    """Work of one process.

    Attributes:
        counts: number of calls, by result.
        bytes: bytes written or read.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bytes: int = 0


def main() -> None:
    """Print the results; exit with 1 if a read was wrong or bytes are held in the end."""
    args = _arguments()
    with open_store(args.url) as store:
        print(f"{args.writers} writers, {args.readers} readers, {args.seconds:g} s, {args.url}")
    mean = WIDTH * ITEM_BYTES * sum(ROWS) // 2
    pool = args.pool_bytes // mean
    pipes = []
    for number in range(args.writers + args.readers):
        ours, theirs = FORK.Pipe(duplex=False)
        arguments = (number < args.writers, args.url, number, pool, args.seconds, theirs)
        FORK.Process(target=_work, args=arguments, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    done = [pipe.recv() for pipe in pipes]
    written, read = _sum(done[: args.writers]), _sum(done[args.writers :])
    for name, samples in (("put", written), ("get", read)):
        print(f"{name}: {dict(samples.counts)}, {size_text(samples.bytes)}")
    with open_store(args.url) as store:
        problems = [row.problem for row in store.verify() if row.problem]
    print(f"entries found corrupt in the end: {len(problems)}")
    left = _left_in_memory(args.url)
    if left:
        print(left)
    wrong = read.counts["wrong"] + read.counts["changed"] + read.counts["error"]
    sys.exit(1 if problems or left or wrong or written.counts["error"] else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="URL of a running memory")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument(
        "--pool-bytes", type=size_bytes, default=size_bytes("2560MiB"), help="size of all entries"
    )
    return parser.parse_args()


def _work(write: bool, url: str, seed: int, pool: int, seconds: float, pipe: Connection) -> None:  # noqa: PLR0913, PLR0917
    """Write or read random entries of the pool, in a separate process."""
    draw, done = random.Random(seed), Done()  # noqa: S311 - no secret
    until_s = time.monotonic() + seconds
    held: deque[tuple[Entry, Entry]] = deque()
    with open_store(url) as store:
        while time.monotonic() < until_s:
            name = draw.randrange(pool)
            entry = _entry(name)
            key = EntryKey(NAMESPACE, str(name))
            try:
                came = _put(store, key, entry) if write else _get(store, key, entry, held)
            except StoreUnavailable:
                came = "dropped"
            except (EntryTooLarge, OSError, ValueError) as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                came = "error"
            done.counts[came] += 1
            if came in {"written", "found"}:
                done.bytes += entry.data.nbytes
    pipe.send(done)


def _put(store: Store, key: EntryKey, entry: Entry) -> str:
    return "written" if store.put(key, entry) else "there already"


def _get(store: Store, key: EntryKey, right: Entry, held: deque[tuple[Entry, Entry]]) -> str:
    """Read an entry and hold it; return whether it is right, and the one that is dropped still."""
    found = store.get(key)
    if found is None:
        return "missing"
    held.append((found, right))
    if not _same(found, right):
        return "wrong"
    return "found" if len(held) <= HELD or _same(*held.popleft()) else "changed"


def _same(found: Entry, right: Entry) -> bool:
    data, expected = (np.frombuffer(each.data, np.uint8) for each in (found, right))
    return found.shape == right.shape and np.array_equal(data, expected)


def _entry(name: int) -> Entry:
    """Return the entry of a name, with size and content derived from the name."""
    rows = random.Random(name).randint(*ROWS)  # noqa: S311 - no secret
    row = name.to_bytes(8, "little") * (WIDTH * ITEM_BYTES // 8)
    return Entry(memoryview(row * rows), "BF16", (rows, WIDTH), "image", {})


def _left_in_memory(url: str) -> str:
    """Return what is wrong in a memory without clients; empty if nothing is."""
    with open_store(url) as store:
        kept = sum(-(-row.info.payload_bytes // 4096) * 4096 for row in store.ls() if row.info)
    connection = ArenaConnection(urlsplit(url).path, "proxy", 10.0)
    until_s = time.monotonic() + END_S
    while True:
        stats, _ = connection.call(GetStats(), Stats)
        held = stats.pinned_bytes + stats.begun_bytes + stats.gone_bytes
        if not held or time.monotonic() > until_s:
            connection.close()
            right = not held and stats.taken_bytes == kept
            return "" if right else f"entries take {kept} bytes: {stats}"
        time.sleep(0.1)


def _sum(parts: Sequence[Done]) -> Done:
    whole = Done()
    for part in parts:
        whole.counts.update(part.counts)
        whole.bytes += part.bytes
    return whole


if __name__ == "__main__":
    main()
