"""Server of a host's memory, and its engines, that are killed, restarted and stopped under load."""

import signal
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.asking import ask, check_equal, unseen
from tests.e2e.load import CLIENTS, QUESTIONS, Load, until
from tests.e2e.served import Served, metric
from tests.ec_store.arena.served import until as until_stats
from tests.requests import text

HITS = "vllm:ec_store_hits_total"


@pytest.mark.fault(120)
@pytest.mark.fault(121)
def test_every_answer_is_right_while_the_memorys_server_ends_and_hangs(stack: Served) -> None:
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
        load.recovers()

    assert Counter(load.seen) == {"right": len(load.seen)}
    stack.stack.check_alive()
    item = unseen(stack)
    first = check_equal(stack, item, text("what?"), stream=False)
    assert check_equal(stack, item, text("what?"), stream=False) == first


@pytest.mark.fault(124)
@pytest.mark.fault(125)
def test_memory_of_killed_engines_is_free_and_the_others_answer(stack: Served) -> None:
    load = Load(stack, [ask(stack.baseline, stack.model, *question) for question in QUESTIONS])
    for engine in (stack.encode, stack.consumers[0]):
        with load.running():
            load.ends(CLIENTS)
            stack.stack.kill(engine)
            try:
                load.ends(CLIENTS)
            finally:  # other tests use the stack too
                stack.stack.restart(engine)
            load.recovers()

    assert set(load.seen) <= {"right", "error 502", "error 503", "broken off"}
    path = Path(urlsplit(stack.stack.store).path)
    until_stats(path, pinned_bytes=0, begun_bytes=0, gone_bytes=0)


@pytest.mark.fault(124)
def test_memory_of_a_killed_rank_is_free_and_its_engine_answers_again(stack: Served) -> None:
    """An engine that loses a rank ends, so that no step has only some of its tensors."""
    load = Load(stack, [ask(stack.baseline, stack.model, *question) for question in QUESTIONS])
    [consumer] = stack.consumers
    engine = psutil.Process(stack.stack.process_of(consumer).pid)
    ranks = [
        child
        for child in engine.children(recursive=True)
        if not child.children() and "resource_tracker" not in " ".join(child.cmdline())
    ]  # the core of the engine is their parent
    assert len(ranks) == 2
    with load.running():
        load.ends(CLIENTS)
        ranks[1].kill()
        try:
            assert psutil.wait_procs(ranks, timeout=60)[1] == []
            load.ends(CLIENTS)
        finally:  # other tests use the stack too
            stack.stack.kill(consumer)
            stack.stack.restart(consumer)
        load.recovers()

    assert set(load.seen) <= {"right", "error 502", "error 503", "broken off"}
    path = Path(urlsplit(stack.stack.store).path)
    until_stats(path, pinned_bytes=0, begun_bytes=0, gone_bytes=0)
