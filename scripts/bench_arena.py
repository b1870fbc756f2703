"""Measure the memory of a host beside plain copies of memory and empty round trips.

PYTHONPATH=. .venv/bin/python scripts/bench_arena.py
PYTHONPATH=. .venv/bin/python scripts/bench_arena.py full --scale 0.01
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from ec_store import Entry, EntryKey
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import arena_options
from ec_store.base import Store
from ec_store.errors import StoreUnavailable

MB = 10**6
NAMESPACE = "org/model@0123456789abcdef/encoder-0123456789abcdef/bf16/1"
FORK = multiprocessing.get_context("fork")


def opened(path: Path) -> ArenaStore:
    return ArenaStore(arena_options(f"shm://{path}?timeout=60s&verify=0"))


@contextmanager
def serving(size: str) -> Iterator[Path]:
    """Run `ec-store serve` with a memory of this size; yield its path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arena.sock"
        command = [sys.executable, "-m", "ec_store", "serve", f"shm://{path}?max_bytes={size}"]
        server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.DEVNULL)
        try:
            with opened(path) as store:
                while not is_up(store):
                    if server.poll() is not None:
                        sys.exit("the server has not started")
                    time.sleep(0.05)
            yield path
        finally:
            server.terminate()
            server.wait()


def is_up(store: Store) -> bool:
    try:
        store.stats()
    except StoreUnavailable:
        return False
    return True


def populated(store: ArenaStore, size_bytes: int) -> None:
    """Wait until this process has mapped the pages of the memory."""
    store.check()
    while time.sleep(0.05) or mapped_bytes() < size_bytes:
        pass


def mapped_bytes() -> int:
    """Return the bytes of shared memory that this process has mapped and populated."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssShmem:")[2].split()[0])


def key(name: object) -> EntryKey:
    return EntryKey(NAMESPACE, f"{name}".rjust(64, "0"))


def entry(data: memoryview) -> Entry:
    metadata = {"image_grid_thw": [1, 98, 98]}
    return Entry(data, "BF16", (data.nbytes // 2,), "image", metadata)


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def copies(rounds: int) -> None:
    """Copy entries from a tensor of one process to a tensor of another."""
    size_bytes = 2 * 2**30
    with serving("2GiB") as path, opened(path) as store:
        populated(store, size_bytes)
        pipe, other = FORK.Pipe()
        consumer = FORK.Process(target=consume, args=(path, other), daemon=True)
        consumer.start()
        private = np.ones(size_bytes // 2, np.uint8)
        for size in (33 * MB, 150 * MB):
            source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
            data = memoryview(source)
            plain, moved = [], []
            pipe.send(size)
            pipe.recv()
            for n in range(rounds):
                source[:8] = n
                # As an entry does, the bytes take another place each time, so no cache has it.
                place = private[(n * size) % (len(private) - size) :][:size]
                plain.append(timed(lambda: (np.copyto(place, source), np.copyto(target, place))))
                began_s = time.perf_counter()
                store.put(key(f"{size}-{n}"), entry(data))
                pipe.send(n)
                moved.append(pipe.recv() - began_s)
            pipe.send(None)
            ratio = statistics.median(m / p for m, p in zip(moved, plain, strict=True))
            print(
                f"{size // MB} MB: two copies {1000 * statistics.median(plain):.1f} ms, tensor to "
                f"tensor {1000 * statistics.median(moved):.1f} ms, median ratio {ratio:.2f}, "
                f"best {min(moved) / min(plain):.2f}"
            )
        pipe.send(None)
        consumer.join()


def consume(path: Path, pipe: Connection) -> None:
    with opened(path) as store:
        populated(store, 2 * 2**30)
        while size := pipe.recv():
            target = np.zeros(size, np.uint8)
            pipe.send("ready")
            while (n := pipe.recv()) is not None:
                found = store.get(key(f"{size}-{n}"))
                assert found is not None
                np.copyto(target, np.frombuffer(found.data, np.uint8))
                pipe.send(time.perf_counter())  # of one clock for all processes
                assert (target[:8] == n % 256).all()
                del found


def round_trips(rounds: int) -> None:
    """Compare calls for one and for 64 keys with an empty round trip of the same connection."""
    with serving("64MiB") as path, opened(path) as writer, opened(path) as store:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    copies(args.rounds)
    round_trips(args.rounds * 200)


if __name__ == "__main__":
    main()
