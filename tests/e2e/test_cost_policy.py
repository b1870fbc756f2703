"""Pictures that the policy `cost` leaves to a consumer with the `ec_role` ec_both."""

import time

import httpx

from tests.e2e.asking import PREPROCESSED, check_equal, unseen
from tests.e2e.served import ENCODED, Served, metric, stored
from tests.e2e.test_encoder_cache import items_of
from tests.requests import Part, text

SMALL_SIDE = 112


def wait_until_left(stack: Served) -> None:
    """Wait until the proxy has read that the consumer writes to the store."""
    until_s = time.monotonic() + 120
    while items_of(stack, unseen(stack, SMALL_SIDE)) != {"local": 1}:
        assert time.monotonic() < until_s
        time.sleep(0.5)


def wait_for_entries(stack: Served, count: int) -> None:
    until_s = time.monotonic() + 120
    while len(stored(stack)) < count:
        assert time.monotonic() < until_s
        time.sleep(0.1)


def decisions(stack: Served) -> list[str]:
    page = httpx.get(f"{stack.stack.url}/metrics", timeout=60).text
    return [line for line in page.splitlines() if line.startswith("epd_encode_decisions_total{")]


def test_small_picture_is_encoded_by_its_consumer_and_found_by_the_next_request(
    stack: Served,
) -> None:
    wait_until_left(stack)
    wait_for_entries(stack, 1)
    item, words = unseen(stack, SMALL_SIDE), text("what?")
    [consumer, *_] = stack.consumers
    encoded, entries = metric(stack.encode, ENCODED), len(stored(stack))

    first = check_equal(stack, item, words, stream=False)
    # The engine that `check_equal` asks alone has written its own entry, if it prefills.
    wait_for_entries(stack, entries + 1 + (len(stack.consumers) == 1))
    preprocessed = metric(consumer, PREPROCESSED)
    found = items_of(stack, item, words)
    again = metric(consumer, PREPROCESSED) - preprocessed

    assert (found, again) == ({"hit": 1}, 0)
    assert check_equal(stack, item, words, stream=True) == first
    assert metric(stack.encode, ENCODED) == encoded
    assert any('decision="local"' in line and "below_pixels" in line for line in decisions(stack))


def test_small_picture_beside_a_large_one_gives_the_engines_own_answer(stack: Served) -> None:
    wait_until_left(stack)
    parts: list[Part] = [unseen(stack, SMALL_SIDE), unseen(stack), text("which?")]

    assert items_of(stack, *parts) == {"local": 1, "encoded": 1}
    check_equal(stack, unseen(stack, SMALL_SIDE), unseen(stack), text("which?"), stream=False)


def test_answer_to_the_client_names_no_entries(stack: Served) -> None:
    wait_until_left(stack)
    content = [unseen(stack, SMALL_SIDE), text()]
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
    }
    reply = httpx.post(f"{stack.stack.url}/v1/chat/completions", json=body, timeout=300)

    assert reply.status_code == 200
    assert reply.json().get("ec_transfer_params") is None
