"""Servers that encode, prefill and decode, with one store (topologies 2epd and 1e2epd)."""

import os
import secrets
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from ec_store import open_store
from tests.e2e.asking import PREPROCESSED, ask, check_equal, unseen
from tests.e2e.load import CLIENTS, QUESTIONS, Load, until
from tests.e2e.proxies import another_proxy
from tests.e2e.served import Served, metric, stored
from tests.requests import Part, text

KNOWN_WITHIN_S = 12
"""Time within which a new proxy has read that the servers write to the store."""

LARGE_SIDE = 896
"""Side of a picture that a server encodes for a while."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
        },
    },
}


def preprocessed(stack: Served) -> float:
    """Return the media items that the servers have preprocessed, to encode them."""
    return sum(metric(server, PREPROCESSED) for server in stack.consumers)


def items_at(url: str, stack: Served, *parts: Part) -> str:
    """Return the header `x-epd-items` of an answer by the proxy at this URL."""
    messages: Any = [{"role": "user", "content": list(parts)}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        reply = client.chat.completions.with_raw_response.create(
            model=stack.model, messages=messages, max_tokens=2
        )
    return reply.headers["x-epd-items"]


NEW, KNOWN = "hit=0,encoded=0,local=1", "hit=1,encoded=0,local=0"


def write_new(stack: Served, item: Part) -> None:
    """Send a new picture, and wait for its entry."""
    entries = len(stored(stack))
    assert items_at(stack.stack.url, stack, item, text("new")) == NEW
    until(lambda: len(stored(stack)) > entries)


def test_a_picture_that_one_server_encoded_is_known_to_both_and_to_every_proxy(
    stack: Served,
) -> None:
    item, before = unseen(stack), preprocessed(stack)
    write_new(stack, item)

    for server in stack.consumers:
        with another_proxy(stack, servers=[server]) as url:
            assert items_at(url, stack, item, text("again")) == KNOWN
    assert preprocessed(stack) == before + 1


def test_requests_at_two_proxies_for_one_new_picture_make_one_encode(stack: Served) -> None:
    item = unseen(stack, LARGE_SIDE)
    with another_proxy(stack, servers=stack.consumers) as other, ThreadPoolExecutor(4) as pool:
        time.sleep(KNOWN_WITHIN_S)
        before = preprocessed(stack)
        urls = [other, stack.stack.url] * 2
        items = list(pool.map(lambda url: items_at(url, stack, item, text()), urls))

    assert Counter(items) == {NEW: 1, KNOWN: 3}
    assert preprocessed(stack) == before + 1


def test_a_new_picture_beside_known_ones(stack: Served) -> None:
    known = [unseen(stack) for _ in range(2)]
    for item in known:
        write_new(stack, item)
    new = unseen(stack)

    assert items_at(stack.stack.url, stack, *known, new, text()) == "hit=2,encoded=0,local=1"
    check_equal(stack, *known, unseen(stack), text("which?"), stream=False)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "seed": 1, "temperature": 0.5},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True, "top_logprobs": 2},
    ],
    ids=["n", "tool", "json", "logprobs"],
)
def test_fields_of_requests_do_the_same_as_at_one_server(
    stack: Served, more: dict[str, Any], known: bool
) -> None:
    item = unseen(stack)
    if known:
        write_new(stack, item)
    alone, through = (_choices(client, stack, item, more) for client in _clients(stack))

    assert through == alone
    assert len(alone) == more.get("n", 1)


def _clients(stack: Served) -> tuple[openai.OpenAI, openai.OpenAI]:
    return stack.baseline, stack.client


def _choices(
    client: openai.OpenAI, stack: Served, item: Part, more: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the choices of an answer, without their random ids."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": [item, text("look")]}],
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"cache_salt": secrets.token_hex(8)},
        **more,
    }
    reply: ChatCompletion = client.chat.completions.create(model=stack.model, **fields)
    choices = [choice.model_dump() for choice in reply.choices]
    for choice in choices:
        for call in choice["message"].get("tool_calls") or ():
            call.pop("id")
    return choices


@pytest.mark.fault(130)
def test_a_picture_that_a_killed_server_was_to_encode_is_encoded_by_the_other(
    stack: Served,
) -> None:
    """Two requests want a picture; one waits for the server that has hung and is killed."""
    killed = stack.consumers[0]
    group = stack.stack.process_of(killed).pid
    expected = len(ask(stack.client, stack.model, unseen(stack), text()))
    with ThreadPoolExecutor(2) as pool:
        os.killpg(group, signal.SIGSTOP)
        try:
            while True:  # until the stopped server has one of them
                item = unseen(stack)
                asked = [
                    pool.submit(ask, stack.client, stack.model, item, text(str(number)))
                    for number in range(2)
                ]
                try:
                    [one.result(timeout=10) for one in asked]
                except TimeoutError:
                    break
        finally:
            stack.stack.kill(killed)
        try:
            answers = [one.result(timeout=120) for one in asked]
        finally:
            stack.stack.restart(killed)

    assert [len(answer) for answer in answers] == [expected] * 2
    assert items_at(stack.stack.url, stack, item, text()) == KNOWN


def test_a_restarted_server_has_hits_at_once(stack: Served) -> None:
    item, restarted = unseen(stack), stack.consumers[1]
    write_new(stack, item)
    stack.stack.kill(restarted)
    stack.stack.restart(restarted)

    with another_proxy(stack, servers=[restarted]) as url:
        assert items_at(url, stack, item, text("again")) == KNOWN
    assert metric(restarted, PREPROCESSED) == 0


@pytest.mark.fault(132)
def test_a_picture_that_the_store_lost_is_encoded_by_a_server_that_got_its_metadata(
    stack: Served,
) -> None:
    item, before = unseen(stack), stored(stack).keys()
    with another_proxy(stack, servers=stack.consumers[:1]) as url:
        time.sleep(KNOWN_WITHIN_S)
        for _ in range(2):
            assert items_at(url, stack, item, text("new")) == NEW
            until(lambda: len(stored(stack)) > len(before))
            assert items_at(url, stack, item, text("again")) == KNOWN
            with open_store(stack.stack.store) as store:
                rows = [row.info.key for row in store.ls() if row.info is not None]
                store.delete([key for key in rows if key.identifier not in before])


@pytest.mark.fault(131)
def test_every_answer_is_right_while_the_store_is_away(stack: Served) -> None:
    assert stack.memory is not None
    load = Load(stack, [ask(stack.baseline, stack.model, *question) for question in QUESTIONS])
    with load.running():
        load.ends(CLIENTS)
        stack.memory.kill()
        load.ends(3 * CLIENTS)
        stack.memory.start()
        load.ends(2 * CLIENTS)

    assert Counter(load.seen) == {"right": len(load.seen)}


def test_servers_encode_while_the_encode_instance_is_away(stack: Served) -> None:
    item, before = unseen(stack), preprocessed(stack)
    assert items_at(stack.stack.url, stack, item, text()) == "hit=0,encoded=1,local=0"
    assert items_at(stack.stack.url, stack, item, text("again")) == KNOWN
    assert preprocessed(stack) == before

    stack.stack.kill(stack.encode)
    try:
        item = unseen(stack)
        write_new(stack, item)
        assert items_at(stack.stack.url, stack, item, text("again")) == KNOWN
    finally:
        stack.stack.restart(stack.encode)
    assert preprocessed(stack) == before + 1


def test_workers_of_a_proxy_share_what_servers_write_to_redis(stack: Served) -> None:
    item = unseen(stack, LARGE_SIDE)
    with another_proxy(stack, "--workers", "2", servers=stack.consumers) as url:
        time.sleep(KNOWN_WITHIN_S)
        before = preprocessed(stack)
        with ThreadPoolExecutor(CLIENTS) as pool:
            items = list(pool.map(lambda _: items_at(url, stack, item, text()), range(CLIENTS)))

    assert Counter(items) == {NEW: 1, KNOWN: CLIENTS - 1}
    assert preprocessed(stack) == before + 1
