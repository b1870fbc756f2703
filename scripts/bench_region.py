#!/usr/bin/env python
"""Until several local workers have a step's entries: shared memory, and vLLM's own arena.

    .venv/bin/python scripts/bench_region.py

Both send the step's metadata by vLLM's `MessageQueue`. The arena gets the entries as torch tensors.
Of the shared memory the metadata has the places: fetch threads have put the entries there before.
Each worker takes its tensors, reads a byte of each page, and answers.
"""

import argparse
import multiprocessing
import pickle
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from ec_store.device.region import Place, Region, RegionReader, Shared
from ec_store.device.tensors import as_tensor

PAGE = 4096


def main() -> None:
    """Print the median of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=80, help="of a step's entries")
    parser.add_argument("--entries", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    size = args.mib * 2**20 // args.entries
    data = [
        memoryview(torch.randint(255, (size,), dtype=torch.uint8).numpy())
        for _ in range(args.entries)
    ]
    context = multiprocessing.get_context("spawn")
    queue = MessageQueue(args.workers, args.workers, enable_shm_tensor_arena=True)
    region = Region(2 * args.mib * 2**20, args.workers)
    pipes, workers = [], []
    for rank in range(args.workers):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        arguments = (queue.export_handle(), rank, region.shared(), theirs)
        workers.append(context.Process(target=_work, args=arguments, daemon=True))
        workers[-1].start()
    queue.wait_until_ready()
    taken: dict[str, list[float]] = {"arena": [], "shared memory": [], "empty": []}
    for _ in range(args.rounds):
        # Before the step: a fetch thread does it while the request waits.
        views = [view for one in data if (view := region.place(one)) is not None]
        places = [region.find(view) for view in views]
        region.send(views)
        steps: dict[str, list[Any]] = {
            "arena": [as_tensor(one) for one in data],
            "shared memory": places,
            "empty": [],
        }
        for name, loads in steps.items():
            started = time.perf_counter()
            queue.enqueue((loads, region.shared().number))
            for pipe in pipes:
                pipe.recv()
            taken[name].append(time.perf_counter() - started)
        del views
    queue.enqueue(None)
    for worker in workers:
        worker.join()
    print(f"{args.mib} MiB in {args.entries} entries, {args.workers} workers, milliseconds\n")
    print("| way | median | best | pickled, bytes |\n| --- | --- | --- | --- |")
    for name, times in taken.items():
        pickled = "" if name == "arena" else len(pickle.dumps(steps[name]))
        middle, best = statistics.median(times) * 1e3, min(times) * 1e3
        print(f"| {name} | {middle:.1f} | {best:.1f} | {pickled} |")
    ratio = statistics.median(taken["shared memory"]) / statistics.median(taken["arena"])
    print(f"\nshared memory / arena: {ratio:.2f}")


def _work(handle: Any, rank: int, shared: Shared, pipe: Connection) -> None:
    queue = MessageQueue.create_from_handle(handle, rank)
    queue.wait_until_ready()
    reader = RegionReader(shared.handle, rank)
    reader.has_read(0)
    while (step := queue.dequeue()) is not None:
        loads, number = step
        tensors = [reader.view(raw) if isinstance(raw, Place) else raw for raw in loads]
        for tensor in tensors:
            tensor[::PAGE].sum()
        pipe.send(len(tensors))
        reader.has_read(number)
        del loads, step, tensors


if __name__ == "__main__":
    main()
