"""Endpoints other than chat on real engines: same answers, and pictures are encoded once."""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.e2e.asking import ask, both_ways, unseen
from tests.e2e.served import ENCODED, Served, metric
from tests.requests import Part, text

WORDS = "what is it?"
HITS = "vllm:ec_store_hits_total"


@pytest.fixture
def claude(stack: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.stack.url, api_key="k", max_retries=0) as client:
        yield client


def alone(stack: Served, item: Part) -> str:
    """Return the engine's own answer in a chat, with the item under an unused key."""
    return "".join(
        ask(stack.baseline, stack.model, {**item, "uuid": secrets.token_hex(16)}, text())
    )


def salt() -> dict[str, str]:
    return {"cache_salt": secrets.token_hex(8)}


def respond(stack: Served, item: Part, *, stream: bool = False) -> str:
    content = [
        {"type": "input_image", "image_url": item["image_url"]["url"]},
        {"type": "input_text", "text": WORDS},
    ]
    asked: dict[str, Any] = {
        "model": stack.model,
        "input": [{"role": "user", "content": content}],
        "max_output_tokens": 16,
        "temperature": 0,
        "extra_body": salt(),
    }
    if not stream:
        return str(stack.client.responses.create(**asked).output_text)
    with stack.client.responses.create(**asked, stream=True) as events:
        return "".join(it.delta for it in events if it.type == "response.output_text.delta")


def converse(
    claude: anthropic.Anthropic, stack: Served, item: Part, *, stream: bool = False
) -> str:
    head, _, data = item["image_url"]["url"].partition(";base64,")
    source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": WORDS}]
    asked: dict[str, Any] = {
        "model": stack.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "extra_body": {"temperature": 0, **salt()},
    }
    if not stream:
        return "".join(block.text for block in claude.messages.create(**asked).content)
    with claude.messages.create(**asked, stream=True) as events:
        return "".join(it.delta.text for it in events if it.type == "content_block_delta")


@both_ways
def test_a_response_about_a_picture_is_the_engines_own(stack: Served, stream: bool) -> None:
    item = unseen(stack)

    assert respond(stack, item, stream=stream) == alone(stack, item)


@both_ways
def test_a_message_about_a_picture_is_the_engines_own(
    stack: Served, claude: anthropic.Anthropic, stream: bool
) -> None:
    item = unseen(stack)

    assert converse(claude, stack, item, stream=stream) == alone(stack, item)


def test_a_picture_is_encoded_once_for_chat_and_responses_and_no_consumer_encodes(
    stack: Served,
) -> None:
    item, [consumer, *_] = unseen(stack), stack.consumers
    encoded, hits = metric(stack.encode, ENCODED), metric(consumer, HITS)
    answers = {"".join(ask(stack.client, stack.model, item, text(WORDS)))}
    answers |= {respond(stack, item), respond(stack, item, stream=True)}

    assert len(answers) == 1
    assert metric(stack.encode, ENCODED) - encoded == 1
    assert metric(consumer, HITS) - hits >= 1


def test_a_picture_of_messages_is_encoded_once_and_no_consumer_encodes(
    stack: Served, claude: anthropic.Anthropic
) -> None:
    """Engines derive the key from the content, so the encoder output is found without a name."""
    item, [consumer, *_] = unseen(stack), stack.consumers
    encoded, hits = metric(stack.encode, ENCODED), metric(consumer, HITS)
    answers = {converse(claude, stack, item) for _ in range(3)}

    assert len(answers) == 1
    assert metric(stack.encode, ENCODED) - encoded == 1
    assert metric(consumer, HITS) - hits >= 1


@both_ways
def test_a_completion_is_the_engines_own(stack: Served, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": stack.model,
        "prompt": "once upon a time",
        "max_tokens": 16,
        "temperature": 0,
    }

    def said(client: Any) -> str:
        answer = client.completions.create(**asked, stream=stream, extra_body=salt())
        events = answer if stream else [answer]
        return "".join(choice.text for event in events for choice in event.choices)

    assert said(stack.client) == said(stack.baseline) != ""


def test_completions_responses_and_messages_are_prefilled_first(
    stack: Served, claude: anthropic.Anthropic
) -> None:
    fixed: dict[str, Any] = {"model": stack.model, "max_tokens": 2}
    hello: Any = [{"role": "user", "content": "hello"}]
    raw: list[Any] = [
        stack.client.completions.with_raw_response.create(**fixed, prompt="hello"),
        stack.client.responses.with_raw_response.create(
            model=stack.model, input="hello", max_output_tokens=2
        ),
        claude.messages.with_raw_response.create(**fixed, messages=hello),
    ]

    assert all("prefill;dur=" in answer.headers["Server-Timing"] for answer in raw)


@both_ways
def test_usage_of_the_prefix_cache_is_that_of_one_engine(stack: Served, stream: bool) -> None:
    prefill, end = stack.consumers[0], {"stream": stream}

    def usages(server: str, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the usage of an answer, or of the events of a stream, to a new prompt."""
        new = "".join(secrets.choice("abcdefgh") for _ in range(600))
        body = {"model": stack.model, "input": new, "messages": [{"role": "user", "content": new}]}
        said = httpx.post(server + path, json={**body, **fields, **end}, timeout=60).text
        lines = [line.removeprefix("data: ") for line in said.splitlines() if '"usage":{' in line]
        events = [json.loads(line) for line in lines]
        holders = [event.get("response") or event.get("message") or event for event in events]
        return [holder["usage"] for holder in holders]

    options = {"stream_options": {"include_usage": True}} if stream else {}
    limits: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"max_tokens": 1, **options},
        "/v1/responses": {"max_output_tokens": 1},
        "/v1/messages": {"max_tokens": 1},
    }
    for path, fields in limits.items():
        expected = usages(prefill.url, path, **fields)
        through = usages(stack.stack.url, path, **fields)

        assert expected
        assert through == expected
        assert any(
            f'"{name}": {number}' in json.dumps(expected)
            for name in (
                "created_cache_tokens",
                "cache_write_tokens",
                "cache_creation_input_tokens",
            )
            for number in (128, 256, 384, 512)
        )


def test_passthrough_answers_equal_those_of_the_engine(stack: Served) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "hello"},
        "/detokenize": {"tokens": [104, 105]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    }
    through, beside = (
        [
            httpx.post(server + path, json=body | {"model": stack.model}, timeout=60).json()
            for path, body in asked.items()
        ]
        for server in (stack.stack.url, stack.consumers[0].url)
    )

    assert through == beside
    assert [*through[0]][:1] == ["count"]


def test_tokens_of_a_conversation_with_a_picture_are_the_engines(stack: Served) -> None:
    body = {"model": stack.model, "messages": [{"role": "user", "content": [unseen(stack)]}]}
    through, beside = (
        httpx.post(f"{server}/tokenize", json=body, timeout=60).json()["tokens"]
        for server in (stack.stack.url, stack.consumers[0].url)
    )

    assert through == beside


def test_vllms_own_benchmark_of_completions_runs_unchanged(
    stack: Served, models: Path, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--backend", "openai", "--endpoint", "/v1/completions"),
            *("--base-url", stack.stack.url, "--model", stack.model),
            *("--tokenizer", str(models / stack.model), "--dataset-name", "random"),
            *("--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "6"),
            *("--ignore-eos", "--save-result", "--result-dir", str(tmp_path)),
            *("--result-filename", result.name),
        ],
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    said = json.loads(result.read_bytes())
    assert (said["completed"], said["total_output_tokens"]) == (6, 48)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4}, "choices"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}, "output"),
    ],
)
def test_curl_is_answered(stack: Served, path: str, body: dict[str, Any], field: str) -> None:
    curl = shutil.which("curl")
    assert curl is not None
    sent = json.dumps({"model": stack.model, **body})
    ran = subprocess.run(
        [curl, "-sS", stack.stack.url + path, "-H", "Content-Type: application/json", "-d", sent],
        capture_output=True,
        timeout=60,
        check=True,
    )

    assert json.loads(ran.stdout)[field]
