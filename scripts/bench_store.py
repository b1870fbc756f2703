"""Measure a store beside memcpy, safetensors and redis-benchmark: ratios, since machines are noisy.

    .venv/bin/python scripts/bench_store.py file:///dev/shm/bench redis://localhost:6379

In every round each column has its turn, all clients at it together; a round takes as long as its
last client. The medians of the rounds are compared: above 1, the store is faster.
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
from ec_store.redis_url import redis_options

WIDTH = 2048
ITEM_BYTES = 2
MEGABYTE = 10**6
PAGE = 4096
NAMESPACE = "bench"

PATIENCE_S = 300.0
"""When a client is not there by then, it has failed."""

YARDSTICK_BYTES = 256 * MEGABYTE
"""What redis-benchmark moves in a round: it counts milliseconds."""

RATIOS: Mapping[str, tuple[str, str]] = {
    "put / memcpy": ("memcpy", "put"),
    "get / memcpy": ("memcpy", "get"),
    "put / save_file": ("save_file", "put"),
    "get / load_file": ("load_file", "get"),
    "get, copied / load_file, copied": ("load_file, copied", "get, copied"),
    "put / SET": ("SET", "put"),
    "get / GET": ("GET", "get"),
}
"""Each column, and the steps whose times it divides."""

Bytes = NDArray[np.uint8]
Times = dict[str, list[float]]
"""Seconds of each step, round by round."""


def main() -> None:
    """Print one table for each store."""
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
            print("no redis-benchmark (Debian's redis-tools), or one that would need a password")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="+", help="stores, as ec_store.open_store takes them")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.25, 5, 20, 64])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def _ratio(taken: Times, theirs: str, ours: str) -> float:
    return statistics.median(taken[theirs]) / statistics.median(taken[ours])


def _together(url: str, megabytes: float, clients: int, rounds: int) -> Times:
    """What each step took in each round, of its slowest client."""
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
    names = dict.fromkeys(name for one in taken for name in one)
    return {
        name: [max(each) for each in zip(*(one[name] for one in taken if name in one), strict=True)]
        for name in names
    }


def _client(  # noqa: PLR0913, PLR0917 - what a process is given
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
    """What is measured, in turns.

    `load_file` only maps the file, and `get` has read and checked every byte. They are compared
    twice: with a byte of each page read of what is mapped, and with both copied to where an engine
    wants the tensor.
    """
    entry = Entry(source.data, "BF16", (len(source) // WIDTH // ITEM_BYTES, WIDTH), "image")
    tensor = torch.from_numpy(source).view(torch.bfloat16).reshape(entry.shape)
    wanted = np.ones_like(source)

    def got() -> Bytes:
        found = store.get(key)
        if found is None:
            raise SystemExit("an entry is gone: is the store too small?")
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
    """Where the reference file goes: to the file system the store is on, or to memory."""
    parts = urlsplit(url)
    return str(Path(parts.path).parent) if parts.scheme == "file" else "/dev/shm"  # noqa: S108


def _redis_benchmark(url: str) -> Callable[[int, int], Mapping[str, float]] | None:
    """Measures bytes per second of SET and GET, of some clients with an entry of some bytes."""
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
                raise SystemExit("an entry is gone: is the store too small?")
        store.purge(NAMESPACE)
    return statistics.median(taken) * 1000


if __name__ == "__main__":
    main()
