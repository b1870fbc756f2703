#!/usr/bin/env python
"""Copies of entries between a device and a store, compared with plain copies of pinned memory.

    python scripts/bench_gpu.py [--store file:///dev/shm/bench?max_bytes=8GiB]

It needs PyTorch with CUDA, numpy and this repository. If the packages of a real store are missing
(orjson, xxhash, redis), or without `--store`, it uses files without checksums: on /dev/shm, or in
the folder for temporary files if that is too small. Each number is the median over the rounds; the
measured ways alternate.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ec_store.arena.memory import create_memory, map_memory
from ec_store.engine.region import Region, register
from ec_store.engine.tensors import (
    HostCopies,
    Loader,
    Output,
    as_tensor,
    new_stream,
    pinned_memory,
    to_device,
)

SIZES_MB = (1, 8, 64)
ARENA_BYTES = 256 * 2**20
"""Size of an arena: a multiple of huge pages, as that of a server. Small pages are slower."""
ROOM_BYTES = 256 * 2**20
"""Free bytes that the files of all sizes need: /dev/shm of a container has 64 MB by default."""


class Kept(Protocol):
    """Storage that entries are written to and read from."""

    def put(self, name: str, data: memoryview) -> None:
        """Write the data of an entry under a name."""

    def get(self, name: str) -> memoryview:
        """Return the data of an entry by its name."""


class Folder:
    """Storage in files, without checksums; memory for reads is reused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: dict[str, memoryview] = {}

    def put(self, name: str, data: memoryview) -> None:
        """Write a file with one call, and rename it."""
        with (self._path / "new").open("wb", buffering=0) as file:
            file.write(data)
        (self._path / "new").rename(self._path / name)

    def get(self, name: str) -> memoryview:
        path = self._path / name
        into = self._memory.setdefault(name, memoryview(bytearray(path.stat().st_size)))
        with path.open("rb", buffering=0) as file:
            file.readinto(into)
        return into


class RealStore:
    """Storage in a store of this package."""

    def __init__(self, url: str) -> None:
        import ec_store  # noqa: PLC0415 - its packages may be missing

        self._package, self._store = ec_store, ec_store.open_store(url)

    def put(self, name: str, data: memoryview) -> None:
        """Delete the entry of this name, and write a new one."""
        key = self._package.EntryKey("bench", name)
        self._store.delete([key])
        self._store.put(key, self._package.Entry(data, "BF16", (data.nbytes // 2,), "image"))

    def get(self, name: str) -> memoryview:
        """Return the verified data of an entry.

        Raises:
            LookupError: the store has no entry of this name.
        """
        entry = self._store.get(self._package.EntryKey("bench", name))
        if entry is None:
            raise LookupError(name)
        return entry.data


def main() -> int:
    """Print a table with the throughput of each way; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="URL of a store")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: PyTorch finds no CUDA device")
        return 0
    with ExitStack() as running:
        kept, where = _open(args.store, running)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores,")
        print(f"{where}, medians of {args.rounds} rounds, GB/s\n")
        names = ["D2H pinned", "D2H ring", "device to store", "H2D pinned", "H2D region"]
        names += ["store to device", "device to arena", "arena to device"]
        print(f"| entry | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
        for size_mb in SIZES_MB:
            size = size_mb * 10**6
            taken = _measure(size, kept, args.rounds)
            speeds = [f"{size / statistics.median(taken[name]) / 1e9:.1f}" for name in names]
            print(f"| {size_mb} MB | {' | '.join(speeds)} |")
    return 0


def _open(url: str | None, running: ExitStack) -> tuple[Kept, str]:
    """Open the store, or files instead; return the storage and its description."""
    if url is not None:
        try:
            return RealStore(url), url
        except ModuleNotFoundError as error:
            print(f"the package {error.name} is missing: using files instead of the store")
    memory = Path("/dev/shm")  # noqa: S108 - the fastest file system
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES
    folder = tempfile.TemporaryDirectory(dir=memory if roomy else None)
    path = Path(running.enter_context(folder))
    return Folder(path), f"files in {path.parent}"


def _arena_ways(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the copies of a tensor to the memory of a host, and from it."""
    memory = create_memory(ARENA_BYTES)
    mapped = map_memory(memory.fd, ARENA_BYTES, write=True)
    os.close(memory.fd)
    if not register(mapped):
        print("the driver refuses to register the memory of an arena")
    entry = mapped[: tensor.nbytes]
    part, stream = torch.from_numpy(entry), new_stream(tensor.device)
    return {
        "device to arena": lambda: Output(tensor).copy_to([part], stream),
        "arena to device": lambda: to_device([as_tensor(entry.data)], "BF16", tensor.shape),
    }


def _measure(size: int, kept: Kept, rounds: int) -> dict[str, list[float]]:
    tensor = torch.randn(size // 2, device="cuda", dtype=torch.bfloat16)
    plain = pinned_memory(size)
    ring, region, loader = HostCopies(4 * size), Region(4 * size, 1), Loader(0)
    loader.map_shared(region.shared_region())
    while not region.is_mapped():
        time.sleep(0.01)

    def copied() -> Any:
        wait = ring.start(tensor)
        if wait is None:
            raise RuntimeError("the ring is full")
        return wait()

    def store() -> None:
        kept.put(str(size), memoryview(copied().view(torch.uint8).numpy()))

    def placed(data: memoryview) -> None:
        view = region.copy_in(data)
        place = None if view is None else region.find_place(view)
        if view is None or place is None:
            raise RuntimeError("the region is full")
        region.send([view])
        to_device([loader.view(place)], "BF16", (size // 2,))
        loader.finish(region.shared_region().number)
        torch.cuda.synchronize()
        loader.report_copies()

    source = np.ones(size, np.uint8).data
    device = tensor.view(torch.uint8)
    ways: dict[str, Callable[[], object]] = {
        "D2H pinned": lambda: plain.copy_(device, non_blocking=True),
        "D2H ring": copied,
        "device to store": store,
        "H2D pinned": lambda: device.copy_(plain, non_blocking=True),
        "H2D region": lambda: placed(source),
        "store to device": lambda: placed(kept.get(str(size))),
        **_arena_ways(tensor),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 3):
        for name, way in ways.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            way()
            torch.cuda.synchronize()
            if turn >= 3:  # noqa: PLR2004 - the first ones allocate
                taken[name].append(time.perf_counter() - started)
    ring.close()
    region.close()
    return taken


if __name__ == "__main__":
    sys.exit(main())
