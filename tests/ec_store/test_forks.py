"""Methods that run in a child of `fork`, and that objects registered for it can be collected."""

import gc
import os

from ec_store import counts


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
