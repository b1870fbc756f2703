"""`epd observe` in front of a real engine."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
from aiohttp.test_utils import unused_port

from tests.e2e.asking import picture
from tests.e2e.served import Served
from tests.requests import text


def test_answers_are_those_of_the_engine_and_repeats_are_counted(
    stack: Served, tmp_path: Path
) -> None:
    server, port = str(stack.baseline.base_url).removesuffix("/v1/"), unused_port()
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "epd", "observe", "--servers-urls", server]
    command += ["--port", str(port), "--report", str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "Ctrl-C" in line:
                    break
            through = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            for _ in range(2):
                assert whole(stack, through) == whole(stack, stack.baseline)
                assert streamed(stack, through) == streamed(stack, stack.baseline)
            process.send_signal(signal.SIGTERM)
            assert "75% of the media came again" in process.stdout.read()
            assert process.wait(60) == 0
        finally:
            process.kill()

    counted = json.loads(report.read_text(encoding="utf-8"))
    assert (counted["items"], counted["distinct"]) == (4, 1)


def question(stack: Served) -> dict[str, Any]:
    messages = [{"role": "user", "content": [picture("cat.jpg"), text()]}]
    return {"model": stack.model, "messages": messages, "max_tokens": 8, "temperature": 0}


def whole(stack: Served, client: openai.OpenAI) -> str:
    answer: Any = client.chat.completions.create(**question(stack))
    return str(answer.choices[0].message.content)


def streamed(stack: Served, client: openai.OpenAI) -> str:
    stream: Any = client.chat.completions.create(**question(stack), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
