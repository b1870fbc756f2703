"""Consumer with tensors that are divided over two processes."""

import pytest

from tests.e2e.asking import check_equal, unseen
from tests.e2e.served import Served, metric
from tests.ec_store.arena.served import MIB
from tests.requests import text

HITS = "vllm:ec_store_hits_total"
SHARED = "all workers have mapped the shared memory"


@pytest.mark.parametrize("stream", [False, True])
def test_all_ranks_of_a_consumer_have_the_entries_of_a_step(stack: Served, stream: bool) -> None:
    """They come with the step."""
    [consumer] = stack.consumers
    before = metric(consumer, HITS)
    for count in (1, 1, 3):
        items = [unseen(stack) for _ in range(count)]
        first = check_equal(stack, *items, text("what?"), stream=stream)
        assert check_equal(stack, *items, text("what?"), stream=stream) == first

    assert metric(consumer, HITS) - before == 5
    check_alive(stack)


@pytest.mark.parametrize("stream", [False, True])
def test_all_ranks_of_a_consumer_read_the_memory_of_their_host(stack: Served, stream: bool) -> None:
    """A fetch may miss its deadline while all cores compute: then the proxy sends the media."""
    [consumer] = stack.consumers
    for count in (1, 1, 3):
        items = [unseen(stack) for _ in range(count)]
        first = check_equal(stack, *items, text("what?"), stream=stream)
        assert check_equal(stack, *items, text("what?"), stream=stream) == first

    log = stack.log(consumer)
    assert SHARED in log
    assert all(f"worker {number} has mapped" in log for number in range(2))
    assert "cannot map" not in log
    check_alive(stack)
    assert metric(consumer, HITS) > 0
    assert metric(consumer, "vllm:ec_store_host_connections") == 3  # scheduler and ranks
    assert metric(consumer, "vllm:ec_store_host_mapped_bytes") == 3 * 64 * MIB


def check_alive(stack: Served) -> None:
    [consumer] = stack.consumers
    assert metric(consumer, "vllm:ec_store_exceptions_total") == 0
    stack.stack.check_alive()
