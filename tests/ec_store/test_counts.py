"""Methods that run in a child of `fork`, and that objects registered for it can be collected."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ec_store import counts
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import key, sized
from tests.ec_store.disk.on_disk import (
    opened,
)


class Renewed:
    def __init__(self) -> None:
        self.times = 0

    def renew(self) -> None:
        self.times += 1


def test_fork_hooks_run_in_the_child_while_their_object_exists() -> None:
    """Registered objects must not stay alive: a proxy waiting for its store grew."""
    gc.collect()  # garbage of other tests
    kept, before = Renewed(), len(counts._renewed)  # noqa: SLF001
    counts.after_fork(kept.renew)
    for _ in range(100):
        counts.after_fork(Renewed().renew)
    gc.collect()
    assert len(counts._renewed) == before + 1  # noqa: SLF001
    child = os.fork()
    if child == 0:
        os._exit(kept.times)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert kept.times == 0


FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("call", ["get", "put", "lookup", "stats", "evict"])
def test_child_of_a_fork_waits_for_no_lock_of_its_parent(root: Path, call: str) -> None:
    calls: dict[str, Callable[[SharedDiskStore], object]] = {
        "get": lambda store: store.get(key()),
        "put": lambda store: store.put(key("new"), sized(2**20 + 2)),
        "lookup": lambda store: store.lookup([key()]),
        "stats": lambda store: store.stats(),
        "evict": lambda store: store.evict(),
    }
    with opened(root) as store:
        store.put(key(), sized(2**20 + 2))
        assert store.get(key()) is not None
        held = store._files  # noqa: SLF001
        locks = [
            held._buffers._lock.mutex,  # noqa: SLF001
            store.counts._lock.mutex,  # noqa: SLF001
        ]
        for lock in locks:
            lock.acquire()
        child = FORK.Process(target=calls[call], args=(store,))
        child.start()
        for lock in locks:
            lock.release()
        child.join(60)
        if child.exitcode is None:
            child.kill()
            child.join()

        assert child.exitcode == 0
        assert store.get(key()) is not None
