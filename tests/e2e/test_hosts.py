"""Two hosts, each with an engine, a proxy and a memory, and a tier behind both memories.

A host is a memory of its own: its engine and its proxy use no other. A third proxy uses both
servers over TCP, as one on another host does.
"""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.errors import StoreUnavailable
from epd.routing.instances import Role
from epd.tools.up.topology import Topology
from scripts.forked import ForkedStack
from tests.e2e.asking import picture
from tests.e2e.proxies import started_proxy
from tests.e2e.served import metric
from tests.e2e.stacks import VISION
from tests.ec_store.waiting import until
from tests.paths import MEDIA
from tests.requests import Part, text
from tests.support.mooncake_server import MooncakeMaster, environment, why_not
from tests.support.redis_server import RedisServer, free_port

MISSES = "vllm:ec_store_misses_total"
FLAGS = {Role.PREFILL_DECODE: ["--max-model-len", "4096"]}
PROXY = ["--ec-store-budget-s", "2"]


class Answer(NamedTuple):
    """Answer of a proxy: its text, and the items of its request by source."""

    text: str
    items: str


def ask(url: str, part: Part) -> Answer:
    body = {
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": [part, text("what?")]}],
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return Answer(reply.json()["choices"][0]["message"]["content"], reply.headers["x-epd-items"])


@dataclass
class Host:
    """Host: its stack, and a client of its memory."""

    stack: ForkedStack
    memory: ArenaStore

    def misses(self) -> float:
        return metric(self.stack.all_engines[0], MISSES)

    def has_all_of(self, other: "Host") -> bool:
        """Read the entries of another host, which come from the tier."""
        keys = [row.info.key for row in other.memory.ls() if row.info is not None]
        return bool(keys) and all(self.memory.get(key) is not None for key in keys)


@dataclass
class Hosts:
    """The hosts, what is behind their memories, and the proxy of a third host."""

    a: Host
    b: Host
    tier: RedisServer | MooncakeMaster
    remote: str


def answers(memory: ArenaStore) -> bool:
    """Return whether the server listens: its socket is there a moment earlier."""
    try:
        memory.namespaces()
    except StoreUnavailable:
        return False
    return True


@contextmanager
def host(folder: Path, address: str, tier: str, models: Path) -> Iterator[Host]:
    """Start a memory that listens at an address, with an engine and a proxy that use it."""
    folder.mkdir(mode=0o700)
    socket = folder / "arena.sock"
    command = [
        *(sys.executable, "-m", "ec_store", "serve", f"shm://{socket}?max_bytes=128MiB"),
        *("--port", str(free_port()), "--listen", f"{address}:{free_port()}", "--tier", tier),
    ]
    with ExitStack() as opened:
        process = opened.enter_context(subprocess.Popen(command, env=environment()))
        opened.callback(process.terminate)
        memory = opened.enter_context(ArenaStore(ArenaOptions(str(socket), timeout_s=20)))
        until(lambda: answers(memory))
        stack = ForkedStack(
            models / VISION,
            Topology.parse("1epd"),
            folder,
            local_media=MEDIA,
            store=f"shm://{socket}",
            flags=FLAGS,
            proxy_flags=PROXY,
        )
        yield Host(opened.enter_context(stack), memory)


@pytest.fixture(scope="module", params=["redis", "mooncake"])
def hosts(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patched:
        patched.setenv("EC_STORE_API_KEY", "key-of-both-servers")
        tier: RedisServer | MooncakeMaster
        if request.param == "redis":
            tier = opened.enter_context(RedisServer(folder))
            url = tier.url()
        else:
            if reason := why_not():
                pytest.skip(reason)
            tier = opened.enter_context(MooncakeMaster(folder))
            url = tier.url("segment=128MiB")
        a, b = (
            opened.enter_context(host(folder / name, address, url, models))
            for name, address in (("a", "127.0.0.2"), ("b", "127.0.0.3"))
        )
        servers = [each.stack.all_engines[0].url for each in (a, b)]
        flags = ("--servers-urls", ",".join(servers), "--ec-store", "shm+tcp://", *PROXY)
        yield Hosts(a, b, tier, opened.enter_context(started_proxy(*flags)))


def test_a_picture_of_one_host_is_not_encoded_on_the_other(hosts: Hosts) -> None:
    first = ask(hosts.a.stack.url, picture("cat.jpg"))
    until(lambda: hosts.b.has_all_of(hosts.a))
    again = ask(hosts.b.stack.url, picture("cat.jpg"))
    other = ask(hosts.b.stack.url, picture("coffee.jpg"))

    assert [first.items, again.items] == [
        "hit=0,encoded=0,local=1",
        "hit=1,encoded=0,local=0",
    ]
    assert again.text == first.text != other.text
    assert hosts.b.misses() == 1  # of the other picture


def test_a_proxy_of_a_third_host_finds_what_either_host_has(hosts: Hosts) -> None:
    names = ("astronaut.jpg", "chart.png")
    first = {
        name: ask(each.stack.url, picture(name))
        for name, each in zip(names, (hosts.a, hosts.b), strict=True)
    }
    found = {name: ask(hosts.remote, picture(name)) for name in names * 3}

    assert {answer.items for answer in found.values()} == {"hit=1,encoded=0,local=0"}
    assert all(found[name].text == first[name].text for name in names)


@pytest.mark.fault(110)
def test_hosts_answer_while_the_tier_is_killed_and_started_again(hosts: Hosts) -> None:
    names = ("cat.jpg", "coffee.jpg", "astronaut.jpg", "chart.png")
    urls = (hosts.a.stack.url, hosts.b.stack.url, hosts.remote)
    expected = {name: ask(hosts.a.stack.url, picture(name)).text for name in names}
    wrong: list[Any] = []
    ended = [0]
    running = [True]

    def load(number: int) -> None:
        while running[0]:
            name = names[number % len(names)]
            answer = ask(urls[number % len(urls)], picture(name))
            if answer.text != expected[name]:
                wrong.append((name, answer))
            ended[0] += 1
            number += 1

    def more(count: int) -> None:
        least = ended[0] + count
        until(lambda: ended[0] >= least)

    with ThreadPoolExecutor(3) as clients:
        loads = [clients.submit(load, number) for number in range(3)]
        try:
            more(6)
            hosts.tier.kill()
            more(12)
            hosts.tier.start()
            more(6)
        finally:
            running[0] = False
        for each in loads:
            each.result()

    assert wrong == []
