"""The store without the proxy: requests go directly to two servers (docs/guides/store-alone.md)."""

import time

import openai
import pytest

from epd.tools.up.engine import Engine
from tests.e2e.asking import ask, unseen
from tests.e2e.load import until
from tests.e2e.served import Served, metric, stored
from tests.requests import Part, text

HITS, MISSES = "vllm:ec_store_hits_total", "vllm:ec_store_misses_total"


def answer_of(server: Engine, stack: Served, item: Part) -> list[str]:
    """Return the tokens of a server's answer about a picture."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        return ask(client, stack.model, item, text("what is it?"))


def counts(server: Engine) -> tuple[float, float]:
    """Return the hits and the misses of a server's lookups."""
    return metric(server, HITS), metric(server, MISSES)


def write_new(server: Engine, stack: Served, item: Part) -> list[str]:
    """Send a new picture to a server, wait for its entry, and return the answer."""
    entries = len(stored(stack))
    answer = answer_of(server, stack, item)
    until(lambda: len(stored(stack)) > entries)
    return answer


@pytest.fixture(autouse=True)
def used_store(stack: Served) -> None:
    """Wait until both servers use the store, which an earlier test may have stopped."""
    first, second = stack.consumers

    def is_hit() -> bool:
        item = unseen(stack)
        answer_of(first, stack, item)
        time.sleep(0.2)
        hits, _ = counts(second)
        answer_of(second, stack, item)
        return counts(second)[0] > hits

    until(is_hit)


def test_a_second_and_a_restarted_server_do_not_encode_again(stack: Served) -> None:
    first, second = stack.consumers
    item = unseen(stack)
    answer = write_new(first, stack, item)
    hits, misses = counts(second)

    assert answer_of(second, stack, item) == answer
    assert counts(second) == (hits + 1, misses)

    stack.stack.kill(second)
    stack.stack.restart(second)
    assert answer_of(second, stack, item) == answer
    assert counts(second) == (1, 0)


def test_a_uuid_of_a_client_names_the_entry_of_another_client(stack: Served) -> None:
    """The threat model says so; with the proxy, a client's `uuid` reaches no server."""
    first, second = stack.consumers
    item, other = unseen(stack), unseen(stack)
    answer = write_new(first, stack, {**item, "uuid": "logo"})

    assert "logo" in stored(stack)
    assert answer_of(second, stack, {**other, "uuid": "logo"}) == answer
    assert answer_of(second, stack, other) != answer
