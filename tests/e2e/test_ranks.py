"""Consumer with tensors that are divided over two processes."""

import pytest

from tests.e2e.asking import check_equal, unseen
from tests.e2e.served import Served, metric
from tests.e2e.stacks import MEMORY
from tests.requests import text

HITS = "vllm:ec_store_hits_total"
SHARED = "all workers have mapped the shared memory"


@pytest.mark.parametrize("stream", [False, True])
def test_all_ranks_of_a_consumer_have_the_entries_of_a_step(stack: Served, stream: bool) -> None:
    """The first entries come with the step, the later ones through shared memory."""
    [consumer] = stack.consumers
    before = metric(consumer, HITS)
    for count in (1, 1, 3):
        items = [unseen(stack) for _ in range(count)]
        first = check_equal(stack, *items, text("what?"), stream=stream)
        assert check_equal(stack, *items, text("what?"), stream=stream) == first

    # Entries in the memory of a host are not kept, and are pinned again for each request.
    hits = metric(consumer, HITS) - before
    assert hits >= 5 if stack.spec.store == MEMORY else hits == 5
    log = stack.log(consumer)
    assert SHARED in log
    assert all(f"worker {number} has mapped" in log for number in range(2))
    assert "cannot map" not in log
    assert metric(consumer, "vllm:ec_store_exceptions_total") == 0
    stack.stack.check_alive()
