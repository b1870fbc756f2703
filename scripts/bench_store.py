"""Measure a store relative to memcpy, safetensors and redis-benchmark, because machines are noisy.

    .venv/bin/python scripts/bench_store.py file:///dev/shm/bench redis://localhost:6379

In every round, all clients run each column's step at the same time; a step takes as long as its
slowest client. The medians over the rounds are compared: above 1, the store is faster.
"""

import argparse
import csv
import multiprocessing as mp
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from ec_store import Entry, EntryKey, Store, open_store
from ec_store.entry import TENSOR
from ec_store.redis.url import redis_options

WIDTH = 2048
ITEM_BYTES = 2
MEGABYTE = 10**6
PAGE = 4096
NAMESPACE = "bench"

PATIENCE_S = 300.0
"""Time after which a missing client has failed, in seconds."""

YARDSTICK_BYTES = 256 * MEGABYTE
"""Bytes that redis-benchmark moves in a round: it counts only milliseconds."""

RATIOS: Mapping[str, tuple[str, str]] = {
    "put / memcpy": ("memcpy", "put"),
    "get / memcpy": ("memcpy", "get"),
    "put / save_file": ("save_file", "put"),
    "get / load_file": ("load_file", "get"),
    "get, copied / load_file, copied": ("load_file, copied", "get, copied"),
    "put / SET": ("SET", "put"),
    "get / GET": ("GET", "get"),
}
"""Columns, each with the two steps of its ratio."""

Bytes = NDArray[np.uint8]
Times = dict[str, list[float]]
"""Times of each step per round, in seconds."""


def main() -> None:
    """Print a table of ratios for each store."""
    args = _arguments()
    for url in args.url:
        yardstick = _redis_benchmark(url)
        columns = [name for name in RATIOS if yardstick or not name.endswith("ET")]
        print(f"\n### `{url.partition('?')[0]}`\n")
        print("| entry | clients | " + " | ".join(columns) + " |")
        print("| --- " * (2 + len(columns)) + "|")
        for clients in args.clients:
            for megabytes in args.megabytes:
                taken = _together(url, megabytes, clients, args.rounds)
                cells = " | ".join(f"{_ratio(taken, *RATIOS[name]):.2f}" for name in columns)
                print(f"| {megabytes:g} MB | {clients} | {cells} |", flush=True)
        print(f"\nlookup of 64 keys, median: {_lookup_ms(url):.2f} ms")
        if not yardstick and not url.startswith("file:"):
            print("redis-benchmark (Debian's redis-tools) is missing, or would need a password")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="+", help="URLs of stores, as for ec_store.open_store")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.25, 5, 20, 64])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def _ratio(taken: Times, theirs: str, ours: str) -> float:
    return statistics.median(taken[theirs]) / statistics.median(taken[ours])


def _together(url: str, megabytes: float, clients: int, rounds: int) -> Times:
    """Return the time of each step in each round, that of the slowest client."""
    turn = mp.Barrier(clients, timeout=PATIENCE_S)
    results: mp.SimpleQueue[Times] = mp.SimpleQueue()
    processes = [
        mp.Process(target=_client, args=(number, turn, results, url, megabytes, rounds))
        for number in range(clients)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)
    taken = [results.get() for _ in processes]
    names = dict.fromkeys(name for times in taken for name in times)
    return {
        name: [
            max(each)
            for each in zip(*(times[name] for times in taken if name in times), strict=True)
        ]
        for name in names
    }


def _client(  # noqa: PLR0913, PLR0917 - parameters of a process
    number: int, turn: Barrier, results: Any, url: str, megabytes: float, rounds: int
) -> None:
    rows = int(megabytes * MEGABYTE) // (WIDTH * ITEM_BYTES)
    source = np.random.default_rng().integers(0, 255, rows * WIDTH * ITEM_BYTES, dtype=np.uint8)
    key = EntryKey(NAMESPACE, f"{os.getpid()}-{megabytes}")
    yardstick = _redis_benchmark(url) if number == 0 else None
    taken: Times = defaultdict(list)
    with open_store(url) as store, tempfile.TemporaryDirectory(dir=_beside(url)) as folder:
        steps = _steps(store, key, source, Path(folder) / "tensor")
        for _ in range(rounds):
            store.delete([key])
            for name, step in steps.items():
                turn.wait()
                started = time.perf_counter()
                result = step()
                taken[name].append(time.perf_counter() - started)
                del result
            turn.wait()
            if yardstick:
                for name, rate in yardstick(turn.parties, source.nbytes).items():
                    taken[name].append(turn.parties * source.nbytes / rate)
        store.delete([key])
    results.put(dict(taken))


def _steps(
    store: Store, key: EntryKey, source: Bytes, path: Path
) -> Mapping[str, Callable[[], object]]:
    """Return the steps to measure, in their order.

    `load_file` only maps the file; `get` has read and checked every byte. They are compared twice:
    with a byte of each mapped page read, and with both copied into an engine's memory.
    """
    entry = Entry(source.data, "BF16", (len(source) // WIDTH // ITEM_BYTES, WIDTH), "image")
    tensor = torch.from_numpy(source).view(torch.bfloat16).reshape(entry.shape)
    wanted = np.ones_like(source)

    def got() -> Bytes:
        found = store.get(key)
        if found is None:
            raise SystemExit("an entry was evicted: is the store too small?")
        return np.frombuffer(found.data, np.uint8)

    def loaded() -> Bytes:
        raw: Bytes = load_file(path)[TENSOR].view(torch.uint8).flatten().numpy()
        return raw

    return {
        "put": lambda: store.put(key, entry),
        "get": got,
        "memcpy": source.copy,
        "save_file": lambda: save_file({TENSOR: tensor}, path),
        "load_file": lambda: int(loaded()[::PAGE].sum()),
        "get, copied": lambda: np.copyto(wanted, got()),
        "load_file, copied": lambda: np.copyto(wanted, loaded()),
    }


def _beside(url: str) -> str:
    """Return the folder for the reference file: the store's file system, or shared memory."""
    parts = urlsplit(url)
    return str(Path(parts.path).parent) if parts.scheme == "file" else "/dev/shm"  # noqa: S108


def _redis_benchmark(url: str) -> Callable[[int, int], Mapping[str, float]] | None:
    """Return a function that measures bytes per second of SET and GET; None if impossible."""
    program = shutil.which("redis-benchmark")
    if url.startswith("file:") or program is None:
        return None
    options = redis_options(url)
    if options.tls or options.password or options.password_file:
        return None
    host, port = options.addresses[0].host, str(options.addresses[0].port)
    command = [program, "-h", host, "-p", port, "-t", "set,get", "--csv"]
    command += ["--cluster"] if options.cluster else []

    def measure(clients: int, entry_bytes: int) -> Mapping[str, float]:
        count = max(8 * clients, YARDSTICK_BYTES // entry_bytes)
        numbers = {"-c": clients, "-d": entry_bytes, "-n": count}
        arguments = [str(part) for pair in numbers.items() for part in pair]
        output = subprocess.run(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        rates = (row for row in csv.reader(output.splitlines()) if row[:1] in (["SET"], ["GET"]))
        return {name: float(rate) * entry_bytes for name, rate, *_ in rates}

    return measure


def _lookup_ms(url: str) -> float:
    keys = [EntryKey(NAMESPACE, f"lookup-{number}") for number in range(64)]
    data = memoryview(bytes(WIDTH * ITEM_BYTES))
    with open_store(url) as store:
        for key in keys:
            store.put(key, Entry(data, "BF16", (1, WIDTH), "image"))
        taken = []
        for _ in range(200):
            started = time.perf_counter()
            found = store.lookup(keys)
            taken.append(time.perf_counter() - started)
            if None in found:
                raise SystemExit("an entry was evicted: is the store too small?")
        store.purge(NAMESPACE)
    return statistics.median(taken) * 1000


if __name__ == "__main__":
    main()
