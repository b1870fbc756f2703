"""Server of a host's memory that is killed, restarted and stopped under load."""

import signal

import pytest

from tests.e2e.asking import ask, check_equal, unseen
from tests.e2e.load import CLIENTS, QUESTIONS, Load, until
from tests.e2e.served import Served, metric
from tests.requests import text

HITS = "vllm:ec_store_hits_total"


@pytest.mark.fault(120)
@pytest.mark.fault(121)
def test_every_request_is_answered_while_the_memorys_server_ends_and_hangs(stack: Served) -> None:
    """No engine and no proxy is restarted, and they use the memory of the next server."""
    assert stack.memory is not None
    load = Load(stack, [ask(stack.baseline, stack.model, *question) for question in QUESTIONS])
    with load.running():
        load.ends(2 * CLIENTS)
        for _ in range(2):
            stack.memory.kill()
            load.ends(2 * CLIENTS)
            stack.memory.start()
            load.ends(2 * CLIENTS)
        stack.memory.signal(signal.SIGSTOP)
        try:
            load.ends(2 * CLIENTS)
        finally:
            stack.memory.signal(signal.SIGCONT)
        before = metric(stack.consumers[0], HITS)
        until(lambda: metric(stack.consumers[0], HITS) > before)

    assert set(load.seen) == {"right"}
    stack.stack.check_alive()
    item = unseen(stack)
    first = check_equal(stack, item, text("what?"), stream=False)
    assert check_equal(stack, item, text("what?"), stream=False) == first
