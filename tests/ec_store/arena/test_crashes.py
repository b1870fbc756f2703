"""Clients and servers that are killed at steps of each operation.

A step is a line of `ec_store/arena` that the process runs; a trace function counts them. Clients
are killed at every third step and servers at every eighth, or at each with `CRASH_STEPS=all`.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ec_store import Entry
from ec_store.arena.extents import PAGE_BYTES, ExtentAllocator
from ec_store.arena.index import ArenaIndex
from ec_store.arena.memory import create_memory
from ec_store.arena.server import ArenaServer
from ec_store.arena.sockets import bind
from ec_store.arena.store import ArenaStore
from ec_store.errors import StoreUnavailable
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.arena.served import MIB, Serve, opened, stats, until

ARENA = f"{os.sep}ec_store{os.sep}arena{os.sep}"
KEPT = [key(f"kept/{n}") for n in range(3)]
ENTRY = sized(100_000, 7)
ALL_STEPS = os.environ.get("CRASH_STEPS") == "all"
KILLS = 300 if ALL_STEPS else 60

Operation = Callable[[ArenaStore], object]


def read(store: ArenaStore) -> None:
    held = [store.get(each) for each in KEPT]
    del held
    store.get(key())  # sends the releases
    store.get(KEPT[0])
    store.close()


def use_keys(store: ArenaStore) -> None:
    store.lookup(KEPT)
    store.lease(KEPT, 0.01)
    store.claim_or_find([key(), *KEPT], "owner", 60)
    store.claim([key("other")], "owner", 60)
    store.release([key(), key("other")], "owner")
    store.delete([key()])
    store.purge("another")
    store.register_namespace("model", "namespace")


OPERATIONS: Mapping[str, Operation] = {
    "connect and put": lambda store: store.put(key(), ENTRY),
    "replace": lambda store: store.put(key(), ENTRY, replace=True),
    "read": read,
    "use keys": use_keys,
    "verify": lambda store: list(store.verify()),
}


def kill_at(step: int) -> Callable[..., Any]:
    """Return a trace function that kills this process at a step."""
    steps = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if ARENA not in frame.f_code.co_filename:
            return None
        if event == "line" and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def is_killed(step: int, name: str, store: ArenaStore) -> bool:
    """Run an operation in a child; return whether it was killed, and had not ended before."""
    child = os.fork()
    if child == 0:
        try:
            if not name.startswith("connect"):
                store.check()
            sys.settrace(kill_at(step))
            OPERATIONS[name](store)
            sys.settrace(None)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, -signal.SIGKILL}
    return code != 0


@pytest.mark.fault(124)
@pytest.mark.fault(125)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_client_that_is_killed_at_any_step_spoils_and_holds_nothing(
    path: Path, served: Serve, name: str
) -> None:
    with opened(path) as store, opened(path) as of_child:
        for n, each in enumerate(KEPT):
            store.put(each, sized(50_000, n))
        kept_bytes = stats(path).taken_bytes
        for step in itertools.count(step=1 if ALL_STEPS else 3):
            killed = is_killed(step, name, of_child)
            until(path, clients=2, begun_bytes=0, pinned_bytes=0, gone_bytes=0)
            for n, each in enumerate(KEPT):
                assert_same(sized(50_000, n), store.get(each))
            found = store.get(key())
            if found is not None:
                assert_same(ENTRY, found)
            del found
            assert store.claim([key(), key("other")], "another", 60) == [True, True]
            store.release([key(), key("other")], "another")
            store.delete([key()])
            until(path, entries=len(KEPT), taken_bytes=kept_bytes, pinned_bytes=0)
            if not killed:
                break
        assert step > 10
        store.delete(KEPT)
        assert stats(path).taken_bytes == 0


def serve(path: Path, step: int, pipe: Connection) -> None:
    """Serve in a child, which is killed at a step after a message of the parent."""

    def arm() -> None:
        pipe.send(pipe.recv())
        sys.settrace(kill_at(step))

    async def run() -> None:
        memory = create_memory(MIB)
        server = ArenaServer(memory, ArenaIndex(ExtentAllocator(MIB, MIB // 4)))
        await server.start(bind(path, 0o600))
        asyncio.get_running_loop().add_reader(pipe.fileno(), arm)
        pipe.send("ready")
        await asyncio.Event().wait()

    try:
        asyncio.run(run())
    finally:
        os._exit(1)


@contextmanager
def dying_server(path: Path, step: int) -> Iterator[Callable[[], None]]:
    """Run a server; yield a function after which it is killed at a step."""
    ours, theirs = Pipe()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            serve(path, step, theirs)
        try:
            assert ours.poll(30)
            ours.recv()

            def arm() -> None:
                ours.send("arm")
                ours.recv()

            yield arm
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.fault(120)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_server_that_is_killed_at_any_step_ends_no_client(path: Path, name: str) -> None:
    """An entry that is read stays, the call fails or is right, and the next server is used."""
    with opened(path) as store:
        for step in itertools.count(step=1 if ALL_STEPS else 8):
            with dying_server(path, step) as arm:
                for n, each in enumerate(KEPT):
                    store.put(each, sized(50_000, n))
                held = store.get(KEPT[0])
                if name.startswith("connect"):
                    store.close()
                arm()
                found, killed = None, False
                try:
                    OPERATIONS[name](store)
                    found = store.get(key())
                except StoreUnavailable:
                    killed = True
                assert_same(sized(50_000, 0), held)
                if found is not None:
                    assert_same(ENTRY, found)
                del held, found
            if not killed:
                break
        assert step > 10


def content(name: str) -> Entry:
    return sized(2 * random.Random(name).randrange(4000), int(name.partition("/")[0]))  # noqa: S311


def names_of_killed_writer(store: ArenaStore, number: int, after_s: float) -> set[str]:
    """Kill a writer after a time; return the names of the entries that it has written."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for n in itertools.count():
                name = f"{number}/{n}"
                assert store.put(key(name), content(name))
                os.write(write, f"{name} ".encode())
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as names:  # noqa: PTH123 - a descriptor
        written = names.read(1)
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return set((written + names.read()).decode().split())


@pytest.mark.fault(124)
def test_writers_that_are_killed_lose_nothing_and_hold_nothing(path: Path) -> None:
    chance = random.Random(1)  # noqa: S311
    served = Serve(path, max_bytes=128 * MIB)
    served.start()
    written: set[str] = set()
    with opened(path) as store:
        for number in range(KILLS):
            written |= names_of_killed_writer(store, number, chance.uniform(0, 0.02))
        until(path, clients=1, begun_bytes=0, pinned_bytes=0, gone_bytes=0, evictions=0)
        rows = [row.info.key.identifier for row in store.ls() if row.info is not None]
        for name in rows:
            assert_same(content(name), store.get(key(name)))
        # An entry without bytes takes a page too.
        pages = sum(max(1, -(-content(name).data.nbytes // PAGE_BYTES)) for name in rows)

        assert len(written) > KILLS
        assert written <= set(rows)
        assert store.stats().bytes == pages * PAGE_BYTES
    served.kill()
