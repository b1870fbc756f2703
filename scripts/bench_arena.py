"""Measure the memory of a host beside plain copies of memory and empty round trips.

PYTHONPATH=. .venv/bin/python scripts/bench_arena.py
PYTHONPATH=. .venv/bin/python scripts/bench_arena.py full --scale 0.01
"""

import argparse
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ec_store import EntryKey
from ec_store.arena.extents import ExtentAllocator
from ec_store.arena.index import ArenaIndex, Client, Slot
from ec_store.arena.memory import copy_out
from ec_store.arena.store import ArenaStore, PlacedEntry
from ec_store.errors import StoreUnavailable
from scripts.memory_server import entry, key, opened, serving

MB = 10**6
WRITERS = 16
FORK = multiprocessing.get_context("fork")


def populated(store: ArenaStore, size_bytes: int) -> None:
    """Wait until this process has mapped the pages of the memory."""
    store.check()
    while mapped_bytes() < size_bytes:
        time.sleep(0.05)


def mapped_bytes() -> int:
    """Return the bytes of shared memory that this process has mapped and populated."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssShmem:")[2].split()[0])


def timed(call: Callable[[], object]) -> float:
    """Return the time of a call in seconds."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def copies(rounds: int) -> None:
    """Write entries in one process and read them in another, beside two plain copies.

    The plain copies go through numpy's own memory, which may have huge pages, and through pages of
    the host's memory. As an entry does, they take another place in each round, so no cache has it.
    Each has a target of its own, which is as long unused as the consumer's.
    """
    size_bytes = 2 * 2**30
    with serving("2GiB") as (path, _), opened(path) as store:
        populated(store, size_bytes)
        pipe, other = FORK.Pipe()
        consumer = FORK.Process(target=consume, args=(path, other), daemon=True)
        consumer.start()
        private, shared = np.ones(size_bytes // 2, np.uint8), mapped(store)
        for size in (33 * MB, 150 * MB):
            source = np.ones(size, np.uint8)
            targets = {name: np.zeros(size, np.uint8) for name in ("numpy's", "shared")}
            for n in range(size_bytes // size + 1):  # so that each further entry evicts
                store.put(key(f"{size}-{n}-before"), entry(source.data))
            time.sleep(2)  # until the server has their checksums
            times: dict[str, list[float]] = {
                name: [] for name in ("numpy's", "shared", "put", "get", "whole")
            }
            pipe.send(size)
            pipe.recv()
            for n in range(rounds):
                source[:8] = n
                for name, memory in (("numpy's", private), ("shared", shared)):
                    place = memory[-(n * size) % (len(memory) - size) & ~4095 :][:size]
                    began_s = time.perf_counter()
                    np.copyto(place, source)
                    np.copyto(targets[name], place)
                    times[name].append(time.perf_counter() - began_s)
                began_s = time.perf_counter()
                store.put(key(f"{size}-{n}"), entry(source.data))
                put_s = time.perf_counter()
                pipe.send(n)
                read_s, got_s = pipe.recv()
                times["put"].append(put_s - began_s)
                times["get"].append(got_s - read_s)
                times["whole"].append(got_s - began_s)
            pipe.send(None)
            print_copies(size, times)
        pipe.send(None)
        consumer.join()


def mapped(store: ArenaStore) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the memory that a store has mapped."""
    arena = store.connection.arena
    if arena is None:
        sys.exit("the connection was lost")
    return arena.memory


def print_copies(size: int, times: dict[str, list[float]]) -> None:
    """Print the medians, and the medians of the ratios of all rounds."""
    medians = ", ".join(f"{name} {1000 * statistics.median(s):.2f}" for name, s in times.items())
    pair = [sum(both) for both in zip(times["put"], times["get"], strict=True)]
    ratios = ", ".join(
        f"{name} {over(pair, times[name]):.3f} ({over(times['whole'], times[name]):.3f})"
        for name in ("numpy's", "shared")
    )
    print(
        f"{size // MB} MB, ms: {medians}; put and get over two copies through this memory, and "
        f"with the word from one process to the other: {ratios}"
    )


def over(times: list[float], plain: list[float]) -> float:
    """Return the median of the ratios of each round."""
    return statistics.median(t / p for t, p in zip(times, plain, strict=True))


def consume(path: Path, pipe: Connection) -> None:
    """Read the entries that a pipe names; send when each read began, and when it was in a tensor.

    A time is of one clock for all processes.
    """
    with opened(path) as store:
        populated(store, 2 * 2**30)
        while size := pipe.recv():
            target = np.zeros(size, np.uint8)
            pipe.send("ready")
            while (n := pipe.recv()) is not None:
                began_s = time.perf_counter()
                found = store.pin(key(f"{size}-{n}"))
                if found is not None:  # `get` would first make one of several extents
                    copy_out(found.parts, target.data)
                    del found
                ended_s = time.perf_counter()
                right = (target[:8] == n % 256).all()
                pipe.send((began_s, ended_s if right else float("nan")))


def round_trips(rounds: int) -> None:
    """Compare calls for one and for 64 keys with an empty round trip of the same connection."""
    with serving("64MiB") as (path, _), opened(path) as writer, opened(path) as store:
        keys = [key(n) for n in range(64)]
        for each in keys:
            writer.put(each, entry(memoryview(bytes(64))))
        calls: dict[str, Callable[[], object]] = {
            "empty": store.check,
            "look-up of 64 keys": lambda: store.lookup(keys),
            "look-up of one": lambda: store.lookup(keys[:1]),
            "lease": lambda: store.lease(keys[:1], 5.0),
            "claim": lambda: store.claim(keys[:1], "owner", 5.0),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for n in range(rounds):
            for name, call in calls.items():
                call() if n == 0 else times[name].append(timed(call))
        empty_s = statistics.median(times["empty"])
        for name, each_s in times.items():
            median_s = statistics.median(each_s)
            print(f"{name}: {1e6 * median_s:.1f} us, {median_s / empty_s:.2f} of an empty one")


def full(entries: int) -> None:
    """Write entries of 64 KiB to 150 MB into a full memory of 8 GiB, from 16 processes.

    They write the first and the last bytes of each extent, not the 2 TB between them.
    """
    size_bytes = 8 * 2**30
    with serving("8GiB") as (path, _), opened(path) as store:
        each = [range(n, entries, WRITERS) for n in range(WRITERS)]
        pipe, other = FORK.Pipe()
        writers = [FORK.Process(target=fill, args=(path, names, other)) for names in each]
        for writer in writers:
            writer.start()
        results = [pipe.recv() for _ in writers]
        for writer in writers:
            writer.join()
        readable = sum(read_back(store, row.info.key) for row in store.ls() if row.info)
        left = store.stats().entries
        print(
            f"{entries} entries, {WRITERS} writers: readable payload over quota "
            f"{readable / size_bytes:.3f}, failed puts {sum(failed for failed, _ in results)}, "
            f"slowest allocation with its round trip {1000 * max(s for _, s in results):.1f} ms, "
            f"{left} entries at the end"
        )


def fill(path: Path, names: range, pipe: Connection) -> None:
    """Write entries; send the number of failed ones, and the time of the slowest allocation."""
    failed, slowest_s = 0, 0.0
    with opened(path) as store:
        for name in names:
            size = size_of(name)
            began_s = time.perf_counter()
            try:
                write = store.begin(key(name), size)
                slowest_s = max(slowest_s, time.perf_counter() - began_s)
                for part in write.parts if write else ():
                    part[:8] = part[-8:] = np.frombuffer(name.to_bytes(8, "little"), np.uint8)
                if write:
                    place = write.place
                    stored = write.commit(PlacedEntry("BF16", (size // 2,), "image", {}, place, ()))
                failed += not (write and stored)
            except StoreUnavailable:
                failed += 1
    pipe.send((failed, slowest_s))


def size_of(name: int) -> int:
    """Return the size of an entry in whole words of 8 bytes, log-uniform by its name."""
    share = random.Random(name).random()  # noqa: S311 - no secret
    return int(2**16 * (150 * MB / 2**16) ** share) & ~7


def read_back(store: ArenaStore, each: EntryKey) -> int:
    """Return the bytes of an entry if it is there, with the bytes of its writer."""
    entry = store.pin(each)
    if entry is None:
        return 0
    name = int(each.identifier).to_bytes(8, "little")
    right = all(bytes(part[:8]) == bytes(part[-8:]) == name for part in entry.parts)
    return right * sum(len(part) for part in entry.parts)


def allocations(entries: int) -> None:
    """Measure the processor time of the allocation of such entries, with its evictions."""
    size_bytes = 8 * 2**30
    index, client = ArenaIndex(ExtentAllocator(size_bytes, 2**30)), Client()
    times_s, parts = [], []
    for name in range(entries):
        slot = Slot(name.to_bytes(32), b"", size_of(name))
        began_s = time.thread_time()
        number = index.begin(client, slot, name)
        times_s.append(time.thread_time() - began_s)
        if isinstance(number, int):
            index.commit(client, number, b"header", name)
        parts.append(len(slot.extents))
    print(
        f"allocation alone: median {1e6 * statistics.median(times_s):.0f} us, longest "
        f"{1e6 * max(times_s):.0f} us; extents {statistics.mean(parts):.2f}, at most {max(parts)}"
    )


def main() -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("copies", "trips", "full")
    parser.add_argument("parts", nargs="*", default=parts, help=f"of {', '.join(parts)}")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rounds and entries")
    args = parser.parse_args()
    if "copies" in args.parts:
        copies(round(20 * args.scale))
    if "trips" in args.parts:
        round_trips(round(4000 * args.scale))
    if "full" in args.parts:
        full(round(100_000 * args.scale))
        allocations(round(100_000 * args.scale))


if __name__ == "__main__":
    main()
