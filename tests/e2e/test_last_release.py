"""Engines of the last release beside those of this one, behind proxies of both.

All of them use one Redis. Every request that is answered must have the tokens of the engine that
answers it, for the same media without a proxy.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BytesIO
from itertools import product
from pathlib import Path
from secrets import token_bytes
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from scripts.ports import free_ports
from tests.compat.releases import Release, last_release, this_release
from tests.e2e.asking import ask
from tests.e2e.stacks import VISION
from tests.models import written
from tests.requests import Part, image, text
from tests.support.redis_server import RedisServer

READ = "vllm:ec_store_hits_total"
ENCODE, CONSUMER = "encode", "prefill-decode"
Engines = Mapping[tuple[str, str], str]
"""URL of each engine, by its release and its role."""


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Release, Release]:
    return last_release(tmp_path), this_release()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@contextmanager
def engines(release: Release, store: str, logs: Path) -> Iterator[Engines]:
    """Start the engines of `epd up` of a release; those of this one are forked."""
    flags = ("port", "encode-port", "prefill-decode-port", "ec-store-port")
    ports = dict(zip(flags, free_ports(len(flags)), strict=True))
    words = [
        *("-m", "epd" if release.name == "last" else "tests.e2e.forked_up", "up"),
        *("--device", "cpu", "--topology", "1e1pd", "--ec-store", store),
        *("--model", str(written() / VISION), "--log-path", str(logs)),
        *(f"--{flag}={port}" for flag, port in ports.items()),
    ]
    with release.process(*words) as up:
        assert up.stdout is not None
        lines = []
        for line in up.stdout:
            lines.append(line)
            if line.startswith("ready: "):
                break
        else:
            raise AssertionError("".join(lines))
        try:
            yield {
                (release.name, role): f"http://127.0.0.1:{ports[f'{role}-port']}"
                for role in (ENCODE, CONSUMER)
            }
        finally:
            up.terminate()
            up.communicate()


@pytest.mark.timeout(900)  # engines of the last release are executed: each imports vLLM twice
def test_every_pair_of_proxy_encode_engine_and_consumer_answers_as_one_engine_does(
    releases: tuple[Release, Release], redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        urls: dict[tuple[str, str], str] = {}
        for release in releases:
            logs = tmp_path / f"logs-{release.name}"
            urls |= stack.enter_context(engines(release, redis.url(), logs))
        for proxy, encode, consumer in product(releases, repeat=3):
            flags = [
                *("--encode-servers-urls", urls[encode.name, ENCODE]),
                *("--decode-servers-urls", urls[consumer.name, CONSUMER]),
                *("--ec-store", redis.url(), "--ec-store-budget-s", "5"),
            ]
            with proxy.proxy(*flags) as running:
                check(running.url, urls[consumer.name, CONSUMER], f"{proxy} {encode} {consumer}")


def check(server: str, consumer: str, names: str) -> None:
    """Check the answers about a new picture, and about the same one in the store."""
    new = noise()
    with opened(server) as proxy, opened(consumer) as alone:
        expected = answer(alone, new)
        before = metric(consumer, READ)

        assert found(proxy, new) == "encoded", names
        assert found(proxy, new) == "hit", names
        assert answer(proxy, new) == expected, names
        assert answer(proxy, noise()) != expected, names
        assert metric(consumer, READ) > before, names


def opened(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def answer(client: openai.OpenAI, part: Part) -> list[str]:
    return ask(client, VISION, part, text("what?"))


def found(client: openai.OpenAI, part: Part) -> str:
    """Return how the proxy found the item of a request."""
    messages: Any = [{"role": "user", "content": [part, text("what?")]}]
    reply = client.chat.completions.with_raw_response.create(
        model=VISION, messages=messages, max_tokens=1
    )
    counts = (pair.split("=") for pair in reply.headers["x-epd-items"].split(","))
    [name] = [name for name, count in counts if count != "0"]
    return name


def noise() -> Part:
    buffer = BytesIO()
    Image.frombytes("RGB", (112, 112), token_bytes(112 * 112 * 3)).save(buffer, "PNG")
    return image(buffer.getvalue())


def metric(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=60).text
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    assert samples, f"{url} has no metric {name}"
    return sum(sample.value for sample in samples)
