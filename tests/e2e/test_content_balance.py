"""Questions about the same pictures on two real engines, by balance, without KV events."""

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.asking import unseen
from tests.e2e.proxies import another_proxy
from tests.e2e.served import Served
from tests.requests import Part, text

SOURCES = "vllm:prompt_tokens_by_source_total"
QUESTIONS = 4


def prompt_tokens(stack: Served) -> Counter[str]:
    """Return the prompt tokens of all engines so far, by source."""
    found: Counter[str] = Counter()
    for engine in stack.consumers:
        page = httpx.get(f"{engine.url}/metrics", timeout=60).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == SOURCES:
                    found[sample.labels["source"]] += round(sample.value)
    return found


def answers(url: str, model: str, prompts: Sequence[Sequence[Part]]) -> list[str | None]:
    """Ask each question about each prompt, in turn, under a salt that no cache knows."""
    salt = {"cache_salt": secrets.token_hex(8)}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        found = []
        for number in range(QUESTIONS):
            for parts in prompts:
                content: Any = [*parts, text(f"{number}?")]
                reply = client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": content}],
                    max_tokens=8,
                    temperature=0,
                    extra_body=salt,
                )
                found.append(reply.choices[0].message.content)
        return found


def test_engines_compute_less_where_questions_go_to_their_picture(stack: Served) -> None:
    story = " ".join(secrets.token_hex(4) for _ in range(120))
    prompts = [[unseen(stack), text(f"{number} {story}")] for number in range(3)]
    spent, found = {}, {}
    for balance in ("least_load", "content"):
        before = prompt_tokens(stack)
        with another_proxy(stack, "--decode-balance", balance, encode=False) as url:
            found[balance] = answers(url, stack.model, prompts)
        spent[balance] = prompt_tokens(stack) - before

    assert found["content"] == found["least_load"]
    assert spent["content"].total() == spent["least_load"].total()
    assert spent["content"]["local_compute"] < 0.7 * spent["least_load"]["local_compute"]
    assert spent["content"]["local_cache_hit"] > 0.6 * spent["content"].total()
