r"""Cost of a consumer: a burst, its memory, a step, the loads of a step, and a store that hangs.

    .venv/bin/python scripts/bench_consumer.py burst
    .venv/bin/python scripts/bench_consumer.py memory
    .venv/bin/python scripts/bench_consumer.py step
    .venv/bin/python scripts/bench_consumer.py load
    .venv/bin/python scripts/bench_consumer.py hang --store redis://127.0.0.1:6379 \
        --pause $(pidof redis-server)

Each prints a row of docs/benchmarks/store.md, or a table. Run them one by one: `memory` reads the
peak memory of its own process. `hang` stops the store's process, makes the calls of vLLM's
scheduler for requests with a picture, prints the time of each call, and continues the process. It
needs vLLM, but no engine.
"""

import argparse
import os
import resource
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from ec_store import Entry, EntryKey, Store
from ec_store.engine.sharing import make_loads
from ec_store.engine.tensors import Loader
from ec_store.entry import payload_bytes
from ec_store.vllm_connector import ECStoreConnector
from ec_store.vllm_connector.worker import StepMetadata, load

MODEL = Path(__file__).resolve().parents[1] / ".run" / "models" / "tiny-qwen2.5-vl"
COLUMNS = 256
STEPS = 20
"""Number of steps for which a request waits for a store that hangs."""
ANSWER_S = 0.02
STEP_S = 0.05
"""Time between two steps of an engine, in seconds."""
MIB = 2**20


class Step:
    """Scheduler output of a step, with the fields that the connector reads."""

    def __init__(self, *new: Request) -> None:
        """Describe the step in which these requests are new."""
        self.scheduled_new_reqs = new


class Slow:
    """Store that has every entry and answers after 20 ms."""

    def get(self, _: EntryKey) -> Entry:
        """Return an entry of four tokens."""
        time.sleep(ANSWER_S)
        return _entry(4)


class Few:
    """Store of twenty entries that stand for all names; each read allocates new memory."""

    number = 20

    def __init__(self, store: Store, namespace: str, entries: Sequence[Entry]) -> None:
        """Write every tenth entry as `entries[1]`, the others as `entries[0]`."""
        self._store = store
        self._keys = [EntryKey(namespace, str(number)) for number in range(self.number)]
        for number, key in enumerate(self._keys):
            store.put(key, entries[number % 10 == 0])

    def get(self, key: EntryKey) -> Entry | None:
        """Return the entry that stands for a picture's name."""
        return self._store.get(self._keys[int(key.identifier.split("-")[1]) % self.number])


def main() -> None:
    """Print the measurement that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["burst", "memory", "step", "load", "hang"])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--store", default="redis://127.0.0.1:6379", help="store for `hang`")
    parser.add_argument("--pause", type=int, help="id of the process that `hang` stops")
    args = parser.parse_args()
    if args.what == "hang":
        _hang(args.model, args.store, args.pause)
    elif args.what == "load":
        _load()
    else:
        {"burst": _burst, "memory": _memory, "step": _step}[args.what](args.model)


def _burst(model: Path, requests: int = 2000) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        connector = _connector(model, f"file://{folder}")
        threads = connector._fetcher._threads  # noqa: SLF001
        connector._fetcher._store = Slow()  # noqa: SLF001
        waiting = [_request(number, 1, 4, media=True) for number in range(requests)]
        started = time.perf_counter()
        while len(_pass(connector, waiting)) < requests:
            time.sleep(STEP_S)
        took = time.perf_counter() - started
        counts = connector.get_ec_connector_stats().data
        connector.shutdown()
    missing = requests - counts["hits"]
    bound = requests * ANSWER_S / threads
    print(f"| burst | {requests} | {threads} | {missing} | {took:.2f} s | {took / bound:.2f} |")


def _memory(model: Path, requests: int = 1000) -> None:
    """Measure memory with nine entries of 10 MB to one of 3 MB; requests decode after prefill."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        budget = 512 * MIB
        connector = _connector(model, f"file://{folder}", memory_bytes=budget)
        sizes = [10_000_000 // (4 * COLUMNS), 3_000_000 // (4 * COLUMNS)]
        entries = [_entry(tokens) for tokens in sizes]
        waiting = [_request(n, 1, sizes[n % 10 == 0], media=False) for n in range(requests)]
        running: list[Request] = []
        few = Few(connector._store, connector.namespace, entries)  # noqa: SLF001
        before = _peak_bytes()
        connector._fetcher._store = few  # noqa: SLF001
        while waiting:
            ready = _pass(connector, running + waiting)
            for request in [
                waiting_request
                for waiting_request in waiting
                if waiting_request.request_id in ready
            ][:4]:
                waiting.remove(request)
                request.num_computed_tokens = 10**6
                running.append(request)
            time.sleep(0.002)
        peak = _peak_bytes() - before
        connector.shutdown()
    print(
        f"| memory | {len(running)} requests | budget {budget // MIB} MiB | "
        f"peak {peak / MIB:.0f} MiB | {peak / budget:.2f} |"
    )


def _step(model: Path, requests: int = 2000) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        connector = _connector(model, f"file://{folder}", memory_bytes=1024 * MIB)
        connector._fetcher._store = Slow()  # noqa: SLF001
        waiting = [_request(number, 2, 4, media=True) for number in range(requests)]
        first = _timed(lambda: _pass(connector, waiting))
        times = [first]
        while len(_pass(connector, waiting)) < requests:
            times.append(_timed(lambda: _pass(connector, waiting)))
            time.sleep(0.05)
        ready = [_timed(lambda: _pass(connector, waiting)) for _ in range(20)]
        connector.shutdown()
    print(
        f"| step | {requests} waiting | first {times[0] * 1e3:.1f} ms | while fetched median "
        f"{statistics.median(times[1:]) * 1e3:.1f}, most {max(times[1:]) * 1e3:.1f} ms | all ready "
        f"{statistics.median(ready) * 1e3:.1f} ms |"
    )


def _load(rounds: int = 60) -> None:
    """Measure one worker's load of an entry, on the thread that runs the model, and a plain copy.

    The entries take turns, so that none is in the processor's caches. The largest come first: the
    allocator could take their memory from what smaller ones have freed.
    """
    torch.set_num_threads(1)
    loader = Loader(0)
    print("| entry | load, us of CPU per MB | plain copy | ratio | page faults of a load |")
    print("| --- | --- | --- | --- | --- |")
    for size in (150, 33, 8, 1):
        count = max(3, 256 // size)
        shape = (size * 10**6 // (4 * COLUMNS), COLUMNS)
        blocks = [np.ones(payload_bytes("F32", shape), np.uint8) for _ in range(2 * count)]
        entries = [Entry(block.data, "F32", shape, "image", {}) for block in blocks[:count]]
        copies = blocks[count:]
        taken: list[tuple[float, float]] = []
        faults = []
        for number in range(max(rounds, count + 3)):
            entry, copy = entries[number % count], copies[(number + 1) % count]
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            step = partial(StepMetadata, items={}, learn={}, shared=None)
            loaded = _timed(lambda: load(loader, step(loads=make_loads({"a": entry})), {}))  # noqa: B023
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
            plain = _timed(lambda: np.copyto(copy, np.frombuffer(entry.data, np.uint8)))  # noqa: B023
            taken.append((loaded / size * 1e6, plain / size * 1e6))
        loads, plains = zip(*taken[3:], strict=True)  # the first ones allocate
        medians = statistics.median(loads), statistics.median(plains)
        print(
            f"| {size} MB | {medians[0]:.0f} | {medians[1]:.0f} | {medians[0] / medians[1]:.1f} "
            f"| {statistics.median(faults):.0f} |"
        )


def _hang(model: Path, url: str, pause: int | None, requests: int = 200) -> None:
    connector = _connector(model, url, role="ec_both")
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def timed(call: Callable[..., object], *arguments: Any) -> None:
        started, computing = time.perf_counter(), time.thread_time()
        call(*arguments)
        computed = time.thread_time() - computing
        taken[call.__name__].append((time.perf_counter() - started, computed))

    with _stopped(pause):
        for number in range(requests):
            request = _request(number, 1, 4, media=True)
            for _ in range(STEPS):
                timed(connector.ensure_cache_available, request, 0)
            timed(connector.has_cache_item, request.mm_features[0].identifier)
            timed(connector.update_state_after_alloc, request, 0)
            timed(connector.build_connector_meta, Step(request))
            timed(connector.take_unavailable_requests)
            timed(connector.request_finished, request)
            timed(connector.get_ec_connector_stats)
    with suppress(OSError):
        connector.shutdown()
    print("| call | median, us | 99th percentile, us | of them computing | calls |")
    print("| --- | --- | --- | --- | --- |")
    for name, both in taken.items():
        times, computed = zip(*both, strict=True)
        median, late = statistics.median(times) * 1e6, _late(times) * 1e6
        print(
            f"| `{name}` | {median:.0f} | {late:.0f} | {_late(computed) * 1e6:.0f} | {len(times)} |"
        )


def _late(times: Sequence[float]) -> float:
    """Return the 99th percentile of these times, in seconds."""
    return statistics.quantiles(times, n=100)[98]


@contextmanager
def _stopped(process: int | None) -> Iterator[None]:
    if process is None:
        yield
        return
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def _timed(call: Callable[[], object]) -> float:
    """Return the CPU time of this thread for the call, in seconds, without other processes."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


def _pass(connector: Any, requests: Sequence[Request]) -> set[str]:
    """Call the connector as `schedule()` does; return the ids of schedulable requests."""
    ready = {
        request.request_id
        for request in requests
        if connector.ensure_cache_available(request, request.num_computed_tokens)
    }
    connector.build_connector_meta(Step())
    return ready


def _connector(model: Path, url: str, role: str = "ec_consumer", **options: Any) -> Any:
    transfer = {
        "ec_connector": "ECStoreConnector",
        "ec_connector_module_path": "ec_store.vllm_connector",
        "ec_role": role,
        "ec_connector_extra_config": {"store": url, **options},
    }
    config = EngineArgs(model=str(model), dtype="float32", ec_transfer_config=transfer)
    return ECStoreConnector(config.create_engine_config(), ECConnectorRole.SCHEDULER)


def _entry(tokens: int) -> Entry:
    data = memoryview(bytes(payload_bytes("F32", (tokens, COLUMNS))))
    return Entry(data, "F32", (tokens, COLUMNS), "image", {"image_grid_thw": [1, 1, 1]})


def _request(number: int, pictures: int, tokens: int, *, media: bool) -> Request:
    shapes = {"image_grid_thw": (3,), **({"pixel_values": (4, 6)} if media else {})}
    data = MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(torch.ones(shape), MultiModalBatchedField())
            for name, shape in shapes.items()
        }
    )
    features = [
        MultiModalFeatureSpec(
            data, "image", f"picture-{number}-{place}", PlaceholderRange(place * tokens, tokens)
        )
        for place in range(pictures)
    ]
    prompt = [1] * 8
    name = f"request-{number}"
    return Request(name, prompt, SamplingParams(max_tokens=1), None, mm_features=features)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
