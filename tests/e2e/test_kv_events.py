"""What the proxy knows of the prefix caches of real engines, by their KV events."""

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd.tools.up.engine import Engine
from tests.e2e.asking import unseen
from tests.e2e.load import until
from tests.e2e.proxies import another_proxy
from tests.e2e.served import Served, metric
from tests.requests import Part, text

HITS = "vllm:prefix_cache_hits_total"
MATCHED = "epd_prefix_tokens_matched_total"


def words() -> Part:
    """Return a text that no cache has; the model has a token for each byte."""
    return text(" ".join(secrets.token_hex(4) for _ in range(200)))


def ask(client: openai.OpenAI, stack: Served, *parts: Part) -> None:
    messages: Any = [{"role": "user", "content": list(parts)}]
    client.chat.completions.create(model=stack.model, messages=messages, max_tokens=1)


def figure(url: str, name: str, **labels: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=60).text
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    return sum(
        one.value for one in samples if one.name == name and labels.items() <= one.labels.items()
    )


def asked(client: openai.OpenAI, stack: Served, *parts: Part) -> tuple[Engine, float]:
    """Send a request. Return the engine that had it, and how many tokens were in its cache."""
    names = "vllm:prefix_cache_queries_total", HITS
    before = [[metric(engine, name) for name in names] for engine in stack.consumers]
    ask(client, stack, *parts)
    after = [[metric(engine, name) for name in names] for engine in stack.consumers]
    [found] = [at for at, one in enumerate(after) if one[0] > before[at][0]]
    return stack.consumers[found], after[found][1] - before[found][1]


def stored(url: str) -> float:
    return figure(url, "epd_kv_events_total", event="stored")


def more_stored(url: str, before: float) -> bool:
    return stored(url) > before


@pytest.fixture
def other(stack: Served) -> Iterator[str]:
    """Yield the URL of another proxy in front of the same engines."""
    named = ",".join(f"{one.url}={one.events_address}" for one in stack.consumers)
    flags = ["--decode-balance", "content", "--kv-events", "--kv-events-addrs", named]
    with another_proxy(stack, *flags, encode=False) as url:
        yield url


@pytest.mark.parametrize("pictures", [0, 1])
def test_a_prompt_goes_where_its_blocks_are(stack: Served, pictures: int) -> None:
    url = stack.stack.url
    parts = [*(unseen(stack) for _ in range(pictures)), words()]
    home, before = asked(stack.client, stack, *parts)
    assert before < 100
    until(lambda: figure(url, "epd_prefix_cache_precise", instance=home.url) == 1)

    for _ in range(3):
        engine, found = asked(stack.client, stack, *parts)
        assert engine is home
        assert found > 1500


def test_a_second_proxy_learns_prefixes_from_the_kv_events(stack: Served, other: str) -> None:
    with openai.OpenAI(base_url=f"{other}/v1", api_key="k", max_retries=0) as client:
        ask(client, stack, words())  # until both subscriptions are there
        prompts = [words() for _ in range(4)]
        for prompt in prompts:
            before = stored(other)
            home, _ = asked(stack.client, stack, prompt)
            until(partial(more_stored, other, before))
            matched = figure(other, MATCHED)
            engine, found = asked(client, stack, prompt)

            assert engine is home
            assert found > 1500
            assert figure(other, MATCHED) > matched + 300


def test_blocks_evicted_by_another_client_are_not_expected(stack: Served) -> None:
    url, prompt = stack.stack.url, words()
    home, _ = asked(stack.client, stack, prompt)
    matched = figure(url, MATCHED)
    with openai.OpenAI(base_url=f"{home.url}/v1", api_key="k", max_retries=0) as direct:
        for _ in range(4):
            ask(direct, stack, words())
    removed = {"instance": home.url, "event": "removed"}
    until(lambda: figure(url, "epd_kv_events_total", **removed) > 100)

    _, found = asked(stack.client, stack, prompt)
    assert found < 100
    assert figure(url, MATCHED) < matched + 100


def test_an_engine_that_restarts_is_followed_again(stack: Served) -> None:
    url, prompt = stack.stack.url, words()
    home, _ = asked(stack.client, stack, prompt)
    until(lambda: figure(url, "epd_prefix_cache_precise", instance=home.url) == 1)
    stack.stack.kill(home)
    try:
        until(lambda: figure(url, "epd_prefix_cache_precise", instance=home.url) == 0)
    finally:
        stack.stack.restart(home)
    assert figure(url, "epd_kv_event_faults_total", instance=home.url, reason="disconnected") >= 1

    def precise() -> bool:
        ask(stack.client, stack, words())
        return figure(url, "epd_prefix_cache_precise", instance=home.url) == 1

    until(precise)
