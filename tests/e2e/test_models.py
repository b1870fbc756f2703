"""Models other than the two that most tests use: an item seen before is a hit.

In vLLM, the classes of PaddleOCR-VL, PaliGemma, Pixtral and Qwen3-Omni write into the configuration
they receive. Those of Qwen2.5-Omni do not, on a CPU; its processor rejects a mixture of raw and
metadata-only items. That of Qwen3-VL accepts it; InternVL's items are all forwarded raw.
"""

import logging
import re
import secrets
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from epd.routing.reports import read_namespace
from scripts.matrix.media import frames
from tests.e2e.asking import PICTURES, SOUNDS, picture, sound
from tests.e2e.served import ENCODED, Served, metric
from tests.requests import Part, text

log = logging.getLogger(__name__)


LOST = ("misses", "timeouts", "errors", "misfits", "failed_requests", "exceptions")
"""Metrics of the connector for entries that a consumer did not get."""
NAMESPACE = re.compile(r"encoder store in \S+, namespace (\S+)")
WORDS = text("what?")


@dataclass
class Answer:
    """Answer, and the proxy's report on its items.

    Attributes:
        tokens: its tokens.
        logprobs: log-probability of each token.
        items: header `x-epd-items`, empty without a proxy.
        media: header `x-epd-media`, empty without a proxy.
        seconds: duration of the request.
    """

    tokens: list[str]
    logprobs: list[float]
    items: str
    media: str
    seconds: float

    def check_equal(self, other: "Answer") -> None:
        """Check that both have the same tokens with the same log-probabilities."""
        assert self.tokens == other.tokens
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def answer(client: openai.OpenAI, model: str, *parts: Part, **options: Any) -> Answer:
    """Ask for 16 tokens at temperature 0, with a salt that no other request has."""
    messages: Any = [{"role": "user", "content": list(parts)}]
    started = time.monotonic()
    reply = client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,
        max_tokens=16,
        temperature=0,
        logprobs=True,
        extra_body={"cache_salt": secrets.token_hex(8), **options},
    )
    seconds = time.monotonic() - started
    logprobs = reply.parse().choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    return Answer(
        [token.token for token in content],
        [token.logprob for token in content],
        reply.headers.get("x-epd-items", ""),
        reply.headers.get("x-epd-media", ""),
        seconds,
    )


def alone(stack: Served, *parts: Part, **options: Any) -> Answer:
    """Return the answer of the engine that receives the media directly, under unused keys."""
    own = [part if part["type"] == "text" else {**part, "uuid": uuid4().hex} for part in parts]
    return answer(stack.baseline, stack.model, *own, **options)


def lost(stack: Served) -> dict[str, float]:
    """Return how many entries the consumer did not get, by reason."""
    [consumer] = stack.consumers
    return {name: metric(consumer, f"vllm:ec_store_{name}_total") for name in LOST}


def check_second_is_a_hit(stack: Served, part: Part) -> None:
    """Ask twice about a new item, and compare the answers with the engine's own."""
    [consumer] = stack.consumers
    expected = alone(stack, part, WORDS)
    before = lost(stack)
    hits = metric(consumer, "vllm:ec_store_hits_total")

    first = answer(stack.client, stack.model, part, WORDS)
    encodes = metric(stack.encode, ENCODED)
    second = answer(stack.client, stack.model, part, WORDS)
    log.info("%s: first %.3f s, second %.3f s", stack.model, first.seconds, second.seconds)

    first.check_equal(expected)
    second.check_equal(expected)
    assert first.items == "hit=0,encoded=1,local=0"
    assert second.items == "hit=1,encoded=0,local=0"
    assert metric(stack.encode, ENCODED) == encodes
    assert metric(consumer, "vllm:ec_store_hits_total") > hits
    assert lost(stack) == before


@pytest.mark.fault(70)
def test_a_picture_seen_before_is_a_hit(stack: Served) -> None:
    check_second_is_a_hit(stack, picture("coffee.jpg"))


@pytest.mark.fault(70)
def test_a_sound_heard_before_is_a_hit(stack: Served) -> None:
    check_second_is_a_hit(stack, sound("chord.wav"))


@pytest.mark.fault(70)
def test_all_processes_of_all_engines_have_one_namespace(stack: Served) -> None:
    """Scheduler and worker of each engine log the namespace, and its API server reports it."""
    logged = [NAMESPACE.findall(stack.log(engine)) for engine in stack.stack.all_engines]
    pages = [httpx.get(f"{engine.url}/metrics").content for engine in stack.stack.all_engines]

    assert [len(names) for names in logged] == [2] * len(stack.stack.all_engines)
    [namespace] = {name for names in logged for name in names}
    assert {read_namespace(page) for page in pages} == {namespace}


@pytest.mark.fault(75)
def test_a_picture_and_a_video_in_one_request(stack: Served) -> None:
    """A processor that builds dummy text for all items needs the media of all items."""
    parts = picture("cat.jpg"), picture("ball.gif", "video_url"), WORDS
    expected = alone(stack, *parts)
    answer(stack.client, stack.model, *parts).check_equal(expected)
    again = answer(stack.client, stack.model, *parts)

    again.check_equal(expected)
    assert again.items == "hit=2,encoded=0,local=0"


def test_a_video_with_timestamps_is_sent_as_metadata(stack: Served) -> None:
    """Qwen3-VL writes the times of frames into the prompt, and its encode reply reports them."""
    film = frames(1)
    options = [{"media_io_kwargs": {"video": {"fps": rate}}} for rate in (1, 2, 8)]
    expected = [alone(stack, film, WORDS, **each) for each in options]
    answers = [answer(stack.client, stack.model, film, WORDS, **each) for each in options]
    again = answer(stack.client, stack.model, film, WORDS, **options[0])

    assert len({tuple(one.tokens) for one in expected}) == len(options)
    for one, other in zip([*answers, again], [*expected, expected[0]], strict=True):
        one.check_equal(other)
        assert one.media == "metadata=1,raw=0"
    assert again.items == "hit=1,encoded=0,local=0"


def test_different_media_give_different_answers(stack: Served) -> None:
    """If different media had the same answer, the comparisons above would prove nothing."""
    pictures = [alone(stack, picture(name), WORDS) for name in PICTURES]
    sounds = [alone(stack, sound(name), WORDS) for name in SOUNDS * ("omni" in stack.model)]
    answers = {tuple(one.tokens) for one in [*pictures, *sounds]}

    assert len(answers) == len(pictures) + len(sounds)
