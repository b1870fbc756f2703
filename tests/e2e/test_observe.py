"""`epd observe` in front of a real engine."""

import json
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import openai
import pytest
from aiohttp.test_utils import unused_port

from epd.tools.model_config import VALUE_BYTES
from tests.e2e.asking import ask, picture, unseen
from tests.e2e.load import until
from tests.e2e.served import Served, stored
from tests.requests import text


@contextmanager
def observed(stack: Served, report: Path) -> Iterator[tuple[openai.OpenAI, list[str]]]:
    """Run `epd observe` before an engine; yield a client, and what it prints once it has ended."""
    printed: list[str] = []
    server, port = str(stack.baseline.base_url).removesuffix("/v1/"), unused_port()
    command = [sys.executable, "-m", "epd", "observe", "--servers-urls", server]
    command += ["--port", str(port), "--report", str(report)]
    with Popen(command, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "Ctrl-C" in line:
                    break
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none"), printed
            process.send_signal(signal.SIGTERM)
            printed.append(process.stdout.read())
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_answers_are_those_of_the_engine_and_repeats_are_counted(
    stack: Served, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    with observed(stack, report) as (through, printed):
        for _ in range(2):
            assert whole(stack, through) == whole(stack, stack.baseline)
            assert streamed(stack, through) == streamed(stack, stack.baseline)
    assert "75% of the media came again" in printed[0]
    counted = json.loads(report.read_text(encoding="utf-8"))
    assert (counted["items"], counted["distinct"]) == (4, 1)


def test_entries_have_the_sizes_of_those_in_the_store(stack: Served, tmp_path: Path) -> None:
    """The server reports the tokens of media, and its model."""
    report, before = tmp_path / "report.json", stored(stack)
    with observed(stack, report) as (through, _):
        usage = {"include_usage": True}
        ask(through, stack.model, unseen(stack), text(), stream=True, stream_options=usage)
        until(lambda: len(stored(stack)) > len(before))
    [written] = [info for name, info in stored(stack).items() if name not in before]

    counted = json.loads(report.read_text(encoding="utf-8"))
    assert (counted["unit"], counted["unsized"]) == ("bytes", 0)
    assert counted["mean_bytes"] == pytest.approx(VALUE_BYTES * math.prod(written.shape), rel=0.02)


def question(stack: Served) -> dict[str, Any]:
    messages = [{"role": "user", "content": [picture("cat.jpg"), text()]}]
    return {"model": stack.model, "messages": messages, "max_tokens": 8, "temperature": 0}


def whole(stack: Served, client: openai.OpenAI) -> str:
    answer: Any = client.chat.completions.create(**question(stack))
    return str(answer.choices[0].message.content)


def streamed(stack: Served, client: openai.OpenAI) -> str:
    stream: Any = client.chat.completions.create(**question(stack), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
