"""Compare servers with a store (topology 2epd) with one plain vLLM server of the same flags.

Real vLLM on the CPU, with a tiny Qwen2.5-VL. All servers run at once, and requests go to one
of them at a time, in turns. It prints a table of medians and their ratios.

    PYTHONPATH=. .venv/bin/python scripts/bench_servers.py --rounds 9
"""

import argparse
import base64
import io
import itertools
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

from epd.routing.instances import Role
from epd.routing.reports import samples
from epd.tools.up.topology import Topology
from scripts.forked import ForkedStack
from scripts.memory_server import serving

MODEL = "tiny-qwen2.5-vl"
SIZES = ((1280, 720), (2560, 1440))
FLAGS = {Role.PREFILL_DECODE: ["--max-model-len", "8192", "--max-num-batched-tokens", "8192"]}
MISSES = b"vllm:ec_store_misses_total"
"""Counter of the items that a server did not find in the store, and so encoded."""

Part = Mapping[str, Any]


def picture(width: int, height: int, kind: str = "jpeg") -> Part:
    """Return a new picture of smooth noise, of about the size of a photograph in bytes."""
    small = np.random.default_rng().integers(0, 255, (height // 8, width // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(file, kind, quality=90)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


class Timed(NamedTuple):
    """Time to the first token of a request in seconds, and the items by source if known."""

    ttft_s: float
    items: str


def ask(url: str, parts: Sequence[Part], tokens: int = 1) -> Timed:
    """Send a streamed request with a prompt that is in no prefix cache."""
    content = [*parts, {"type": "text", "text": "What is it?"}]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "cache_salt": secrets.token_hex(8),
    }
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    began_s = time.perf_counter()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)  # noqa: S310
    with urllib.request.urlopen(request) as reply:  # noqa: S310 - a server of this script
        while b'"content":"' not in reply.readline().replace(b'""', b""):
            pass
        ttft_s = time.perf_counter() - began_s
        reply.read()
        return Timed(ttft_s, reply.headers.get("x-epd-items") or "")


class Measured(NamedTuple):
    """URL that is measured, and the processes that work for it, with their children."""

    url: str
    pids: Sequence[int]

    def cpu_s(self) -> float:
        """Return the seconds of CPU that the processes have used."""
        parents = [psutil.Process(pid) for pid in self.pids]
        children = [child for parent in parents for child in parent.children(recursive=True)]
        times = [process.cpu_times() for process in parents + children]
        return sum(each.user + each.system for each in times)


@contextmanager
def running(model: Path) -> Iterator[tuple[ForkedStack, Measured]]:
    """Start servers with a store behind the proxy, and a plain server; yield both."""
    with tempfile.TemporaryDirectory() as folder:
        given: Mapping[str, Any] = {"local_media": Path(folder), "flags": FLAGS}
        flags = ["--ec-store-budget-s", "2"]
        with (
            serving("1GiB") as (memory, _),
            ForkedStack(
                model,
                Topology.parse("2epd"),
                Path(folder) / "servers",
                store=f"shm://{memory}",
                proxy_flags=flags,
                **given,
            ) as servers,
            ForkedStack(model, Topology.parse("1pd"), Path(folder) / "plain", **given) as plain,
        ):
            time.sleep(12)  # the proxy has read that the servers write
            server = plain.all_engines[0]
            yield servers, Measured(server.url, [plain.process_of(server).pid])


def misses(stack: ForkedStack) -> float:
    """Return how many items the servers have not found in the store, and so encoded."""
    total = 0.0
    for engine in stack.all_engines:
        with urllib.request.urlopen(f"{engine.url}/metrics") as reply:  # noqa: S310
            total += sum(value for _, value in samples(reply.read(), MISSES))
    return total


def first_tokens(proxy: str, plain: str, rounds: int) -> None:
    """Print the TTFT of a hit over one server's first and over its own again."""
    for size, kind in itertools.product(SIZES, ("jpeg", "png")):
        times: dict[str, list[float]] = {"hit": [], "new": [], "first": [], "again": []}
        for _ in range(rounds):
            cached, repeated = picture(*size, kind), picture(*size, kind)
            times["new"].append(ask(proxy, [cached]).ttft_s)
            times["first"].append(ask(plain, [repeated]).ttft_s)
            time.sleep(0.5)
            hit = ask(proxy, [cached])
            if not hit.items.startswith("hit=1"):
                raise RuntimeError(f"no hit, but {hit.items}")
            times["hit"].append(hit.ttft_s)
            times["again"].append(ask(plain, [repeated]).ttft_s)
        medians = {name: statistics.median(values) for name, values in times.items()}
        shown = ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in medians.items())
        ratios = ", ".join(
            f"{over}/{name} {statistics.median(map(truediv, times[over], times[name])):.2f}"
            for over, name in (("hit", "first"), ("hit", "again"), ("new", "first"))
        )
        print(f"TTFT {size[0]}x{size[1]} {kind}: {shown}; {ratios}", flush=True)


def throughput(ours: Measured, plain: Measured, rounds: int, requests: int = 16) -> None:
    """Print requests/s and CPU of new pictures at one server with a store, over the plain one.

    CPU is that of server and proxy. Unlike requests/s it is comparable on a busy machine.
    """
    rates: list[list[float]] = [[], []]
    used_s: list[list[float]] = [[], []]
    for _ in range(rounds):
        for number, measured in enumerate((ours, plain)):
            new = [[picture(*SIZES[0])] for _ in range(requests)]
            began_s, used = time.perf_counter(), measured.cpu_s()
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda parts, url=measured.url: ask(url, parts, 8), new))
            rates[number].append(requests / (time.perf_counter() - began_s))
            used_s[number].append(measured.cpu_s() - used)
    for what, (with_store, without) in (("requests/s", rates), ("CPU", used_s)):
        ratio = statistics.median(map(truediv, with_store, without))
        print(f"new pictures, {what} over the plain server: {ratio:.2f}", flush=True)


@contextmanager
def proxy_of_one(servers: ForkedStack) -> Iterator[Measured]:
    """Start a proxy before the first of the servers; yield both, by the proxy's URL."""
    flags = ["--servers-urls", servers.all_engines[0].url, "--ec-store", servers.store]
    command = [sys.executable, "-m", "epd", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE) as process:
        if process.stderr is None:
            raise RuntimeError("the proxy has no log")
        server = servers.process_of(servers.all_engines[0]).pid
        yield Measured(json.loads(process.stderr.readline())["url"], [process.pid, server])
        process.terminate()


def window(stack: ForkedStack, conversations: int = 4, turns: int = 8) -> None:
    """Print the encodes per distinct picture of conversations with a window of five pictures."""

    def converse(_: int) -> int:
        shown = [picture(*SIZES[0]) for _ in range(5)]
        for turn in range(turns):
            ask(stack.url, shown[turn : turn + 5], 16)
            shown.append(picture(*SIZES[0]))
        return 5 + turns - 1

    before = misses(stack)
    with ThreadPoolExecutor(conversations) as pool:
        distinct = sum(pool.map(converse, range(conversations)))
    each = (misses(stack) - before) / distinct
    print(f"window: {each:.3f} encodes for each of {distinct} distinct pictures")


def main() -> None:
    """Start the servers, and print each comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".run/models", MODEL))
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    rounds = given.rounds
    with running(given.model) as (servers, plain):
        for url in itertools.chain([servers.url] * 2, [plain.url]):
            ask(url, [picture(*SIZES[0])])
        with proxy_of_one(servers) as one_server:
            time.sleep(5)
            throughput(one_server, plain, rounds)
        first_tokens(servers.url, plain.url, rounds)
        window(servers)


if __name__ == "__main__":
    main()
