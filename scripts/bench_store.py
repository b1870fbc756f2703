"""Measure a store beside memcpy and safetensors, in one run: ratios, since machines are noisy.

    .venv/bin/python scripts/bench_store.py file:///dev/shm/bench redis://localhost:6379

Every row is measured in turns (ours, memcpy, ours, memcpy, …); the medians are compared.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ec_store import Entry, EntryKey, open_store

WIDTH = 2048
ITEM_BYTES = 2
MEGABYTE = 10**6
PAGE = 4096
NAMESPACE = "bench"


def main() -> None:
    """Print one table for each store."""
    args = _arguments()
    for url in args.url:
        print(f"\n### `{url.partition('?')[0]}`\n")
        print(
            "| entry | clients | put / memcpy | get / memcpy | put / save_file | get / load_file |"
        )
        print("| --- | --- | --- | --- | --- | --- |")
        for clients in args.clients:
            for megabytes in args.megabytes:
                _print_row(url, megabytes, clients, args.rounds)
        print(f"\nlookup of 64 keys, median: {_lookup_ms(url):.2f} ms")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="+", help="stores, as ec_store.open_store takes them")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.25, 5, 20, 64])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def _print_row(url: str, megabytes: float, clients: int, rounds: int) -> None:
    with ProcessPoolExecutor(clients) as pool:
        jobs = [pool.submit(_measure, url, megabytes, rounds) for _ in range(clients)]
        measured = [job.result() for job in jobs]
    put, get, copy, save, load = (
        statistics.median(column) for column in zip(*measured, strict=True)
    )
    ratios = (copy / put, copy / get, save / put, load / get)
    cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"| {megabytes:g} MB | {clients} | {cells} |", flush=True)


def _measure(url: str, megabytes: float, rounds: int) -> tuple[float, float, float, float, float]:
    """Median seconds of put, get, memcpy, save_file and load_file, each in turn with the others.

    A ratio above 1 means that the store is faster.
    """
    rows = int(megabytes * MEGABYTE) // (WIDTH * ITEM_BYTES)
    source = np.random.default_rng().integers(0, 255, rows * WIDTH * ITEM_BYTES, dtype=np.uint8)
    entry = Entry(source.data, "BF16", (rows, WIDTH), "image", {"image_grid_thw": [1, 2, 2]})
    tensor = torch.from_numpy(source).view(torch.bfloat16).reshape(rows, WIDTH)
    key = EntryKey(NAMESPACE, f"{os.getpid()}-{megabytes}")
    with open_store(url) as store, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "tensor"
        # load_file only maps the file: a byte of each page brings the tensor into memory, where
        # get has read every byte for its checksum.
        steps: Sequence[Callable[[], object]] = (
            lambda: store.put(key, entry),
            lambda: store.get(key),
            source.copy,
            lambda: save_file({"ec_cache": tensor}, path),
            lambda: int(load_file(path)["ec_cache"].view(torch.uint8).flatten()[::PAGE].sum()),
        )
        taken: list[list[float]] = [[] for _ in steps]
        for _ in range(rounds):
            store.delete([key])
            for times, step in zip(taken, steps, strict=True):
                started = time.perf_counter()
                result = step()
                times.append(time.perf_counter() - started)
                del result
        store.delete([key])
    put, get, copy, save, load = (statistics.median(times) for times in taken)
    return put, get, copy, save, load


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
