"""Conversations of several turns: prefill reads decode's KV blocks of the previous turn.

Answers through the proxy equal those of the decode engine alone, and prefill's metrics show how
many tokens it computed.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import orjson
import pytest

from epd.routing.instances import Role
from tests.e2e.asking import PICTURES, picture
from tests.e2e.load import until
from tests.e2e.proxies import another_proxy
from tests.e2e.served import READ, Served, metric
from tests.requests import Part, text

TTL = ("--conversation-ttl", "40")
"""Shorter than decode's own TTL, `BLOCKS_TTL_S`."""

FETCHED = Path(sys.prefix, "share", "vllm-multi-turn-0.33.0")
MULTI_TURN = FETCHED / "benchmark_serving_multi_turn.py"
"""Unpacked by `scripts/fetch_multi_turn.sh`."""

TALKS, TURNS = 3, 3

VLLM = tuple(map(int, version("vllm").split(".")[:2])) if find_spec("vllm") else (0, 0)
"""Major and minor version of the engines' vLLM; (0, 0) without vLLM."""

WORDS = "what is it, and what was it before? " * 4


class Turn(NamedTuple):
    """Result of a turn.

    Attributes:
        answer: answer through the proxy.
        expected: answer of the decode engine alone.
        prompt_tokens: number of tokens in its prompt.
        read: number of those tokens that prefill read instead of computing.
    """

    answer: str
    expected: str
    prompt_tokens: int
    read: float


class Talk:
    """Conversation that compares each answer with that of one engine alone."""

    def __init__(self, stack: Served) -> None:
        self._stack = stack
        self._messages: list[Any] = []
        self._id = secrets.token_hex(8)
        # Separate salts: no prefix cache contains turns of other tests, or of the other engine.
        self._salts = secrets.token_hex(8), secrets.token_hex(8)

    def turn(self, client: openai.OpenAI, *parts: Part, stream: bool = False) -> Turn:
        """Send the next turn through the proxy, and the same conversation to one engine."""
        prefill = self._stack.consumers[0]
        self._messages.append({"role": "user", "content": [*parts, text(WORDS)]})
        before = metric(prefill, READ)
        ask = self._streamed if stream else self._whole
        said, prompt_tokens = ask(client, self._salts[0], conversation_id=self._id)
        read = metric(prefill, READ) - before
        expected, _ = self._whole(self._stack.baseline, self._salts[1])
        self._messages.append({"role": "assistant", "content": said})
        return Turn(said, expected, prompt_tokens, read)

    def _whole(self, client: openai.OpenAI, salt: str, **more: str) -> tuple[str, int]:
        answer = self._ask(client, salt, {}, **more)
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens

    def _streamed(self, client: openai.OpenAI, salt: str, **more: str) -> tuple[str, int]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, last = self._ask(client, salt, options, **more)
        said = [choice.delta.content or "" for event in events for choice in event.choices]
        return "".join(said), last.usage.prompt_tokens

    def _ask(self, client: openai.OpenAI, salt: str, options: dict[str, Any], **more: str) -> Any:
        return client.chat.completions.create(
            **options,
            model=self._stack.model,
            messages=self._messages,
            max_tokens=16,
            temperature=0,
            extra_body={"cache_salt": salt, **more},
        )


@contextmanager
def proxy(stack: Served, *flags: str, encode: bool = True) -> Iterator[openai.OpenAI]:
    """Start a new proxy of the stack's engines; yield its client."""
    with (
        another_proxy(stack, *TTL, *flags, encode=encode) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


def check_right(turns: Sequence[Turn]) -> None:
    assert [turn.answer for turn in turns] == [turn.expected for turn in turns]
    assert all(turn.answer for turn in turns)


@pytest.mark.parametrize("encode", [True, False], ids=["E+P+D", "P+D"])
def test_prefill_computes_only_the_new_part_of_five_turns_with_pictures(
    stack: Served, encode: bool
) -> None:
    talk = Talk(stack)
    with proxy(stack, encode=encode) as client:
        turns = [talk.turn(client, picture(name)) for name in (*PICTURES, "cat.jpg")]

    check_right(turns)
    assert turns[0].read == 0
    for last, turn in pairwise(turns):
        assert 0.8 * last.prompt_tokens <= turn.read < turn.prompt_tokens


@pytest.mark.skipif(
    VLLM < (0, 33), reason="decode of vLLM 0.32 does not report its KV blocks in streams"
)
def test_prefill_reads_the_blocks_of_streamed_turns(stack: Served) -> None:
    talk = Talk(stack)
    with proxy(stack) as client:
        turns = [talk.turn(client, picture(name), stream=True) for name in PICTURES]

    check_right(turns)
    assert turns[0].read == 0
    for last, turn in pairwise(turns):
        assert 0.8 * last.prompt_tokens <= turn.read < turn.prompt_tokens


def test_a_restarted_decode_engine_has_lost_its_kept_blocks(stack: Served) -> None:
    talk, [engine] = Talk(stack), stack.stack.of_role(Role.DECODE)
    with proxy(stack) as client:
        turns = [talk.turn(client, picture("cat.jpg")) for _ in range(2)]
        ready = str(client.base_url).replace("/v1/", "/ready")
        stack.stack.kill(engine)
        # The proxy must notice the restart, or it would ask the new engine for blocks that are
        # gone.
        until(lambda: httpx.get(ready, timeout=60).status_code == 503)
        stack.stack.restart(engine)
        until(lambda: httpx.get(ready, timeout=60).status_code == 200)
        turns += [talk.turn(client, picture("coffee.jpg")) for _ in range(2)]

    check_right(turns)
    assert [turn.read > 0 for turn in turns] == [False, True, False, True]


@pytest.mark.parametrize("named", [True, False], ids=["with ids", "without ids"])
def test_vllms_multi_turn_benchmark_runs_unchanged(
    stack: Served, models: Path, tmp_path: Path, named: bool
) -> None:
    """With ids only without streams, since vLLM 0.32 does not report its blocks in streams."""
    assert MULTI_TURN.exists(), "scripts/fetch_multi_turn.sh fetches the benchmark"
    talks = tmp_path / "conversations.json"
    talks.write_bytes(orjson.dumps([questions(number) for number in range(TALKS)]))
    flags = ["--no-stream", "--send-conversation-id"] if named else []
    prefill = stack.consumers[0]
    with another_proxy(stack, *TTL, encode=False) as url:
        read = metric(prefill, READ)
        said = output_of(
            [
                *(sys.executable, str(MULTI_TURN), "--model", str(models / stack.model)),
                *("--served-model-name", stack.model, "--url", url, "--input-file", str(talks)),
                *("--num-clients", "2", "--max-active-conversations", "2", "--no-early-stop"),
                *("--limit-min-tokens", "8", "--limit-max-tokens", "8", *flags),
            ],
            tmp_path / "benchmark.log",
        )
        turns = httpx.get(f"{url}/metrics").text
        read = metric(prefill, READ) - read

    # Statistics of its clients; its own summary loses results that arrive at the end.
    done = re.findall(r"num_successes=(\d+), num_failures=(\d+)", said)
    assert [sum(map(int, counts)) for counts in zip(*done, strict=True)] == [TALKS * TURNS, 0]
    hits = 'epd_conversation_turns_total{result="hit"} '
    assert (f"{hits}{TALKS * (TURNS - 1)}.0" in turns) is named
    assert (read > 0) is named


def output_of(command: Sequence[str], log: Path) -> str:
    """Run a program that must succeed, end its children, and return its output."""
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text()
    assert code == 0, said
    return said


def questions(number: int) -> dict[str, Any]:
    """Return a conversation in the benchmark's format; the benchmark replaces the answers."""
    turn = [
        {"role": "user", "content": f"In story {number}, {WORDS * 4}"},
        {"role": "assistant", "content": "What it was."},
    ]
    return {"id": f"talk-{number}", "messages": turn * TURNS}
