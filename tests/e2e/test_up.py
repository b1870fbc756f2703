"""`epd up` with real vLLM. It forks the engines here; `test_demo.py` executes them."""

import base64
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from scripts.ports import free_ports
from tests.e2e.stacks import VISION
from tests.paths import MEDIA
from tests.tools.up.processes import left, marked, new_mark, processes_with_output


@pytest.fixture
def command(models: Path, tmp_path: Path) -> list[str]:
    """Return the command of an `epd up` on free ports."""
    flags = ("port", "encode-port", "prefill-decode-port", "ec-store-port")
    ports = dict(zip(flags, free_ports(len(flags)), strict=True))
    return [
        *(sys.executable, "-m", "tests.e2e.forked_up", "up", "--device", "cpu"),
        *("--model", str(models / VISION)),
        *(f"--{flag}={port}" for flag, port in ports.items()),
        *("--topology", "2e1pd"),
        *("--allowed-local-media-path", str(MEDIA), "--log-path", str(tmp_path)),
    ]


@pytest.mark.fault(76)
def test_up_serves_rejects_dead_urls_names_a_killed_engine_and_leaves_nothing(
    command: list[str], tmp_path: Path
) -> None:
    mark = new_mark()
    with (
        subprocess.Popen(
            command, env=marked(mark), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as up,
        ExitStack() as stack,
    ):
        stack.callback(up.send_signal, signal.SIGINT)  # in case the test fails
        assert up.stdout is not None
        said: list[str] = []
        for line in up.stdout:
            said.append(line)
            if found := re.fullmatch(r"ready: (http://127\.0\.0\.1:\d+)\n", line):
                break
        assert found is not None, "".join(said)
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="k", max_retries=0) as client:
            first = answer(client)
            with ThreadPoolExecutor() as threads:
                dead = [threads.submit(dead_url, client, number) for number in range(6)]
                beside = threads.submit(answer, client)
                assert [one.result() for one in dead] == ["media_fetch_failed encode"] * 6
                assert beside.result() == first
            figures = httpx.get(f"{found[1]}/metrics").text
            assert 'state="ejected"' not in figures
            assert 'failed="true"' not in figures
            [log, _] = tmp_path.rglob("encode-*.log")
            [server, *_] = sorted(processes_with_output(log))
            os.kill(server, signal.SIGKILL)
            for line in up.stdout:
                said.append(line)
                if line.startswith("The other servers continue without encode-"):
                    break
            assert answer(client) == first
        up.send_signal(signal.SIGINT)
        said.append(up.stdout.read())

    assert "ended by SIGKILL: the kernel or an operator killed it" in "".join(said)
    assert up.returncode == 0
    assert left(mark, 0) == {}
    assert processes_with_output(tmp_path) == set()


def answer(client: openai.OpenAI) -> str:
    """Return the fleet's answer about a picture in a file."""
    [model] = client.models.list()
    picture = {"type": "image_url", "image_url": {"url": (MEDIA / "cat.jpg").as_uri()}}
    reply = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}],  # type: ignore[list-item,misc]
        max_tokens=8,
        temperature=0,
    )
    assert reply.choices[0].message.content
    return reply.choices[0].message.content


def test_an_engine_that_refuses_its_flags_ends_all(command: list[str], tmp_path: Path) -> None:
    mark = new_mark()
    ran = subprocess.run(
        [*command, "--topology", "1e1pd", "--decode-flags", "--no-such-flag 1"],
        env=marked(mark),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )

    assert ran.returncode == 1
    assert "epd up: prefill-decode-" in ran.stderr
    assert "unrecognized arguments: --no-such-flag 1" in ran.stderr
    assert left(mark, 0) == {}
    assert processes_with_output(tmp_path) == set()


def dead_url(client: openai.OpenAI, number: int) -> str:
    """Ask about a picture on a host without an address; return the proxy's error."""
    [model] = client.models.list()
    picture = {
        "type": "image_url",
        "image_url": {"url": f"https://dead-{number}.example.invalid/x.png"},
    }
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": [picture]}],  # type: ignore[list-item,misc]
            max_tokens=8,
        )
    said = raised.value.response.headers
    return f"{said['x-epd-error']} {said['x-epd-stage']}"


@pytest.mark.fault(115)
def test_a_killed_memory_is_survived_and_found_again(command: list[str], tmp_path: Path) -> None:
    mark = new_mark()
    command = [*command, "--topology", "1e1pd", "--ec-store-memory", "256MiB"]
    with (
        subprocess.Popen(
            command, env=marked(mark), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as up,
        ExitStack() as stack,
    ):
        stack.callback(up.send_signal, signal.SIGINT)  # in case the test fails
        sockets = read_until(up, r"store: shm://(\S+)/arena\.sock")
        url = read_until(up, r"ready: (http://127\.0\.0\.1:\d+)\n")
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
            ThreadPoolExecutor() as threads,
        ):
            first, items = answer_items(client)
            assert items == "hit=0,encoded=1,local=0"
            assert answer_items(client) == (first, "hit=1,encoded=0,local=0")
            [log] = tmp_path.rglob("store.log")
            [server] = processes_with_output(log)
            os.kill(server, signal.SIGKILL)
            meanwhile = [threads.submit(answer_items, client) for _ in range(8)]
            read_until(up, "(store is started again) in 1 s")
            assert {one.result()[0] for one in meanwhile} == {first}
            read_until(up, "(starting store): ")
            deadline_s = time.monotonic() + 60
            while answer_items(client) != (first, "hit=1,encoded=0,local=0"):
                assert time.monotonic() < deadline_s
        up.send_signal(signal.SIGINT)
        assert up.stdout is not None
        up.stdout.read()

    assert up.returncode == 0
    assert left(mark, 0) == {}
    assert processes_with_output(tmp_path) == set()
    assert not Path(sockets).exists()


def read_until(up: subprocess.Popen[str], pattern: str) -> str:
    """Read lines until one matches; return its group."""
    assert up.stdout is not None
    said: list[str] = []
    for line in up.stdout:
        said.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError("".join(said))


def answer_items(client: openai.OpenAI) -> tuple[str, str]:
    """Return the answer about a picture in the request, and what became of the item."""
    [model] = client.models.list()
    data = base64.b64encode((MEDIA / "cat.jpg").read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
    raw = client.chat.completions.with_raw_response.create(
        model=model.id,
        messages=[{"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}],  # type: ignore[list-item,misc]
        max_tokens=8,
        temperature=0,
    )
    content = raw.parse().choices[0].message.content
    assert content
    return content, raw.headers["x-epd-items"]
