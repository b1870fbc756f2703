"""Read and look up entries in Mooncake and Redis as tiers, in turn, in one run.

    scripts/setup.sh
    .venv/bin/python -m scripts.bench_mooncake

It starts a Redis server, `mooncake_master`, and two tiers of Mooncake, all on 127.0.0.1. One tier
contributes the segment and writes; the other reads over TCP. First the kernel places all of them;
then those of each host have a core of their own, as two hosts do. Times are medians. Processor time
is that of the process that runs Mooncake's library for the reader, per read.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ec_store.arena.tier import Tier
from ec_store.entry import Entry
from ec_store.keys import EntryKey
from ec_store.mooncake.tier import MooncakeTier
from ec_store.redis.store import RedisStore
from tests.support.mooncake_server import MooncakeMaster, environment
from tests.support.redis_server import RedisServer

MB = 10**6
KEYS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="calls of each kind (default 30)")
    rounds = parser.parse_args().rounds
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    with (
        tempfile.TemporaryDirectory() as folder,
        MooncakeMaster(Path(folder), {"default_kv_lease_ttl": 5000}) as master,
        RedisServer(Path(folder)) as redis,
    ):
        owner = MooncakeTier.from_url(master.url("segment=512MiB"))
        reader = MooncakeTier.from_url(master.url())
        store = RedisStore.from_url(redis.url())
        try:
            for tier in (owner, reader):
                while tier.client.program.running is None or (
                    tier.segment and tier.segment.running is None
                ):
                    time.sleep(0.01)
            tiers: dict[str, tuple[Tier, Tier]] = {
                "Mooncake": (owner, reader),
                "Redis": (store, store),
            }
            compare_entries(tiers, rounds)
            compare_lookups(tiers, rounds)
            compare_calls(owner, reader, rounds)
            place_apart(reader, owner, redis)
            print("a core for each host:")
            compare_entries(tiers, rounds)
        finally:
            for each in (owner, reader, store):
                each.close()


def place_apart(reader: MooncakeTier, owner: MooncakeTier, redis: RedisServer) -> None:
    """Give the reading host and the other host a core each: on one, they would wait in turn.

    A write then has one core for the processes of Mooncake, which are on the other host.
    """
    first, second, *_ = sorted(os.sched_getaffinity(0))
    programs = [(reader.client.program, first), (owner.client.program, second)]
    if owner.segment is None or redis.process is None:
        raise RuntimeError("the other host has no server")
    cores = {os.getpid(): first, redis.process.pid: second}
    for program, core in [*programs, (owner.segment, second)]:
        if program.running is None:
            raise RuntimeError("a process of Mooncake has ended")
        cores[program.running.process.pid] = core
    for pid, core in cores.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def compare_entries(tiers: Mapping[str, tuple[Tier, Tier]], rounds: int) -> None:
    """Print the time of a write and of a read in each tier."""
    for size in (MB // 2, 9 * MB, 20 * MB, 100 * MB):
        entry = Entry(memoryview(os.urandom(size)), "BF16", (size // 2,), "image")
        times: dict[str, list[float]] = {}
        for number in range(rounds):
            key = EntryKey("bench", f"{size}-{number}")
            for name, (writer, reader) in tiers.items():
                timed(times, f"write {name}", partial(writer.put, key, entry))
                timed(times, f"read {name}", partial(reader.get, key))
                writer.remove([key.digest])
        show(f"{size / MB:g} MB", times)


def compare_lookups(tiers: Mapping[str, tuple[Tier, Tier]], rounds: int) -> None:
    """Print the time of a look-up in each tier."""
    small = Entry(memoryview(bytes(1024)), "BF16", (512,), "image")
    keys = [EntryKey("bench", str(number)) for number in range(KEYS)]
    times: dict[str, list[float]] = {}
    for writer, _ in tiers.values():
        for key in keys:
            writer.put(key, small)
    for number in range(rounds):
        for name, (_, reader) in tiers.items():
            missing = [EntryKey("none", f"{number}-{each}").digest for each in range(KEYS)]
            present = [key.digest for key in keys]
            timed(times, f"present {name}", partial(reader.find, present))
            timed(times, f"missing {name}", partial(reader.find, missing))
            timed(times, f"one missing {name}", partial(reader.find, missing[:1]))
    show(f"look-up of {KEYS}", times)


def compare_calls(writer: MooncakeTier, reader: MooncakeTier, rounds: int) -> None:
    """Print what a read of 20 MB takes as this tier does it, and by the library's own call."""
    entry = Entry(memoryview(os.urandom(20 * MB)), "BF16", (10 * MB,), "image")
    running = reader.client.program.running
    if running is None:
        raise RuntimeError("Mooncake's client has ended")
    times: dict[str, list[float]] = {}
    cpu_s = {"this tier": 0.0, "the library": 0.0}
    for number in range(rounds):
        key = EntryKey("calls", str(number))
        writer.put(key, entry)
        name = reader._names.value(key)  # noqa: SLF001
        with reader.client.lane() as lane:
            calls: dict[str, Callable[[], object]] = {
                "this tier": partial(lane.read, name),
                "the library": partial(lane.get, [name], len(lane.memory)),
            }
            for each in sorted(calls, reverse=number % 2 == 1):  # the second finds warm caches
                began_s = used_s(running.process.pid)
                timed(times, each, calls[each])
                cpu_s[each] += used_s(running.process.pid) - began_s
        writer.remove([key.digest])
    show("transfer of 20 MB", times)
    for each, seconds in cpu_s.items():
        print(f"  processor time, {each}: {seconds / rounds * 1e3:.1f} ms")


def used_s(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def timed(times: dict[str, list[float]], name: str, call: Callable[[], object]) -> None:
    since_s = time.perf_counter()
    found = call()
    times.setdefault(name, []).append(time.perf_counter() - since_s)
    if found is None:
        raise RuntimeError(f"{name}: a miss")


def show(title: str, times: Mapping[str, list[float]]) -> None:
    print(
        title, *(f"{n}: {statistics.median(t) * 1e3:.2f} ms" for n, t in times.items()), sep="\n  "
    )


if __name__ == "__main__":
    main()
