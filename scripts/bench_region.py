#!/usr/bin/env python
"""Time until several local workers can read a step's entries: shared memory and vLLM's arena.

    .venv/bin/python scripts/bench_region.py

Both send the step's metadata through vLLM's `MessageQueue`. The arena gets the entries as torch
tensors. For the shared memory the metadata has the places: fetch threads have copied the entries
there before. The ways alternate, in all orders. There are two times, from sending the step's
metadata until the last worker:

- in hand: has all tensors;
- touched: has also read a byte of each page. A page fault then means that the page could not be
  read before. The column counts the faults of all workers in a step.
"""

import argparse
import multiprocessing
import pickle
import resource
import statistics
import time
from collections.abc import Sequence
from itertools import permutations
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from ec_store.engine.region import Place, Region, RegionReader, SharedRegion
from ec_store.engine.tensors import as_tensor

PAGE = 4096
ARENA, SHARED, EMPTY = "arena", "shared memory", "empty"


class Answer(NamedTuple):
    """Report of a worker about a step.

    Attributes:
        in_hand_s: time at which it had all tensors, on the clock shared by all processes.
        touched_s: time at which it had read a byte of each page.
        faults: page faults of these reads.
    """

    in_hand_s: float
    touched_s: float
    faults: int


def main() -> None:
    """Print both times of each way, and the ratios of the ways."""
    args = _arguments()
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
        arguments = (queue.export_handle(), rank, region.shared_region(), theirs)
        workers.append(context.Process(target=_work, args=arguments, daemon=True))
        workers[-1].start()
    queue.wait_until_ready()
    taken: dict[str, list[Answer]] = {ARENA: [], SHARED: [], EMPTY: []}
    # Each way follows each other way equally often: the previous one has filled the caches.
    orders = list(permutations(taken))
    for number in range(args.rounds + args.warm_up):
        # Before the step: a fetch thread copies the entries while the request waits.
        views = [view for block in data if (view := region.copy_in(block)) is not None]
        places = [region.find_place(view) for view in views]
        region.send(views)
        del views
        steps: dict[str, list[Any]] = {
            ARENA: [as_tensor(block) for block in data],
            SHARED: places,
            EMPTY: [],
        }
        for name in orders[number % len(orders)]:
            time.sleep(args.pause_ms / 1e3)
            started = time.perf_counter()
            queue.enqueue((steps[name], region.shared_region().number))
            answer = _last(started, [pipe.recv() for pipe in pipes])
            if number >= args.warm_up:
                taken[name].append(answer)
    queue.enqueue(None)
    for worker in workers:
        worker.join()
    print(f"{args.mib} MiB in {args.entries} entries, {args.workers} workers, {args.rounds} rounds")
    print(f"bytes of the step's metadata with places: {len(pickle.dumps(steps[SHARED]))}\n")
    _print_table(taken)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=80, help="size of a step's entries, in MiB")
    parser.add_argument("--entries", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=10,
        help="rounds before the measurement, which fill the arena's slots",
    )
    parser.add_argument("--pause-ms", type=float, default=0, help="pause before each step")
    return parser.parse_args()


def _last(started: float, answers: Sequence[Answer]) -> Answer:
    """Return the times until the last worker, in seconds, and the faults of all workers."""
    return Answer(
        max(answer.in_hand_s for answer in answers) - started,
        max(answer.touched_s for answer in answers) - started,
        sum(answer.faults for answer in answers),
    )


def _print_table(taken: dict[str, list[Answer]]) -> None:
    print("| way | in hand, ms: median, best | touched, ms: median, best | faults: median, most |")
    print("| --- | --- | --- | --- |")
    for name, answers in taken.items():
        in_hand, touched = ([answer[part] * 1e3 for answer in answers] for part in range(2))
        faults = [answer.faults for answer in answers]
        print(
            f"| {name} | {statistics.median(in_hand):.2f}, {min(in_hand):.2f} "
            f"| {statistics.median(touched):.2f}, {min(touched):.2f} "
            f"| {statistics.median(faults):.0f}, {max(faults)} |"
        )
    print()
    for part, name in enumerate(("in hand", "touched")):
        medians = [
            statistics.median(answer[part] for answer in taken[way]) for way in (SHARED, ARENA)
        ]
        print(f"shared memory / arena, {name}: {medians[0] / medians[1]:.2f}")


def _work(handle: Any, rank: int, shared: SharedRegion, pipe: Connection) -> None:
    queue = MessageQueue.create_from_handle(handle, rank)
    queue.wait_until_ready()
    reader = RegionReader(shared.handle, rank)
    reader.has_read(0)
    while (step := queue.dequeue()) is not None:
        loads, number = step
        tensors = [reader.view(raw) if isinstance(raw, Place) else raw for raw in loads]
        in_hand_s, before = time.perf_counter(), _faults()
        for tensor in tensors:
            tensor[::PAGE].sum()
        touched_s, faults = time.perf_counter(), _faults() - before
        pipe.send(Answer(in_hand_s, touched_s, faults))
        reader.has_read(number)
        del loads, step, tensors


def _faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


if __name__ == "__main__":
    main()
