"""Prefill and decode on separate engines, with and without an encode stage.

Answers through the proxy equal those of the decode engine alone.
"""

import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.asking import PREPROCESSED, ask, both_ways, check_equal, picture, unseen
from tests.e2e.proxies import another_proxy
from tests.e2e.served import Served, metric
from tests.requests import text

PULLED = "vllm:nixl_bytes_transferred_count"
"""Counter of the times that an engine has read another's blocks."""


@pytest.fixture(scope="module")
def pd(stack: Served) -> Iterator[Served]:
    """Yield the same engines behind a proxy without an encode stage."""
    with (
        another_proxy(stack, encode=False) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield replace(stack, client=client)


@both_ways
def test_pictures_without_an_encode_stage(pd: Served, stream: bool) -> None:
    before = metric(pd.encode, "vllm:request_success_total")
    check_equal(pd, picture("cat.jpg"), text("and"), picture("coffee.jpg"), text(), stream=stream)

    assert metric(pd.encode, "vllm:request_success_total") == before


def test_prefill_encodes_a_picture_and_decode_reads_its_blocks(pd: Served) -> None:
    prefill, decode = pd.consumers
    before = metric(prefill, PREPROCESSED), metric(decode, PULLED)
    ask(pd.client, pd.model, unseen(pd), text("look!"))

    assert (metric(prefill, PREPROCESSED), metric(decode, PULLED)) == (before[0] + 1, before[1] + 1)


def test_decode_logs_no_warning_about_encoder_outputs(stack: Served) -> None:
    decode = stack.consumers[1]

    def warnings() -> int:
        return stack.log(decode).count("no ECConnector found")

    before = warnings()
    ask(stack.client, stack.model, unseen(stack), text("look!"))
    ask(stack.client, stack.model, picture("cat.jpg"), text("look!"))
    assert warnings() == before

    messages: Any = [{"role": "user", "content": "Hello"}]
    told = {"ec_transfer_params": {"key": {}}, "max_tokens": 1}
    stack.baseline.chat.completions.create(model=stack.model, messages=messages, extra_body=told)
    assert warnings() == before + 1


def tokens(stack: Served, words: str) -> list[int]:
    body = {"model": stack.model, "prompt": words}
    reply = httpx.post(f"{stack.consumers[0].url}/tokenize", json=body, timeout=60)
    found: list[int] = reply.json()["tokens"]
    return found


def completed(client: openai.OpenAI, model: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a completion, or of its events if it is streamed."""
    fixed: dict[str, Any] = {"model": model, "max_tokens": 12, "temperature": 0, **fields}
    more = {"cache_salt": secrets.token_hex(8), **fixed.pop("extra_body", {})}
    answer = client.completions.create(**fixed, extra_body=more)
    events = answer if fields.get("stream") else [answer]
    return [choice.model_dump() for event in events for choice in event.choices]


def near(value: Any) -> Any:
    """Return the value with floating-point numbers rounded, since they vary between runs."""
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, list):
        return [near(one) for one in value]
    return {key: near(one) for key, one in value.items()} if isinstance(value, dict) else value


WORDS = "once upon a time there was a proxy that knew where everything was " * 8
ASKED: dict[str, dict[str, Any]] = {
    "text": {"prompt": WORDS},
    "a-list-of-one": {"prompt": [WORDS]},
    "tokens": {"prompt": ...},
    "log-probabilities": {"prompt": WORDS, "logprobs": 3},
    "stopped-at-once": {"prompt": WORDS, "stop": ...},
    "two-prompts": {"prompt": [WORDS, "and then"]},
    "two-answers": {"prompt": WORDS, "n": 2, "temperature": 1, "seed": 7},
    "echo": {"prompt": WORDS, "echo": True, "logprobs": 1},
    "prompt-log-probabilities": {"prompt": WORDS, "extra_body": {"prompt_logprobs": 0}},
    "beam-search": {"prompt": WORDS, "n": 2, "extra_body": {"use_beam_search": True}},
}
BY_ONE_ENGINE = {"two-prompts", "two-answers", "echo", "prompt-log-probabilities", "beam-search"}


def together(choices: list[dict[str, Any]]) -> dict[int, str]:
    """Return the text of each answer, joined from its pieces."""
    texts: dict[int, str] = {}
    for choice in choices:
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("name", ASKED)
def test_a_completion_equals_that_of_one_engine(pd: Served, name: str) -> None:
    fields = dict(ASKED[name])
    if name == "tokens":
        fields["prompt"] = tokens(pd, WORDS)
    if name == "stopped-at-once":
        [unstopped] = completed(pd.baseline, pd.model, prompt=WORDS)
        fields["stop"] = unstopped["text"][0]
    alone = completed(pd.baseline, pd.model, **fields)
    pulled = metric(pd.consumers[1], PULLED)
    through = completed(pd.client, pd.model, **fields)

    assert near(alone) == near(through)
    assert any(together(alone).values()) == ("stop" not in fields)
    assert metric(pd.consumers[1], PULLED) == pulled + (name not in BY_ONE_ENGINE)


@pytest.mark.parametrize("name", ["text", "tokens", "two-answers", "log-probabilities"])
def test_a_streamed_completion_equals_that_of_one_engine(pd: Served, name: str) -> None:
    fields = {**ASKED[name], "stream": True, "stream_options": {"include_usage": True}}
    if name == "tokens":
        fields["prompt"] = tokens(pd, WORDS)
    alone = completed(pd.baseline, pd.model, **fields)
    through = completed(pd.client, pd.model, **fields)

    assert together(alone) == together(through)
    assert any(together(alone).values())


@pytest.mark.parametrize(
    "more", [{"n": 2, "temperature": 1, "seed": 7}, {"extra_body": {"prompt_logprobs": 0}}]
)
def test_a_chat_is_answered_by_a_single_engine(stack: Served, more: dict[str, Any]) -> None:
    messages: Any = [{"role": "user", "content": [picture("coffee.jpg"), text()]}]
    fixed = {"model": stack.model, "max_tokens": 8, "temperature": 0, "messages": messages}
    alone, through = (
        client.chat.completions.create(**{**fixed, **more})
        for client in (stack.baseline, stack.client)
    )

    assert [choice.message.content for choice in alone.choices] == [
        choice.message.content for choice in through.choices
    ]
    assert near(alone.model_dump().get("prompt_logprobs")) == near(
        through.model_dump().get("prompt_logprobs")
    )
    assert alone.usage is not None
    assert through.usage is not None
    assert alone.usage.completion_tokens == through.usage.completion_tokens
