"""Encode requests with one picture and with several, on real engines.

    .venv/bin/python scripts/bench_groups.py 1e1pd 2e1pd --rounds 12

It starts each topology with the tiny Qwen2.5-VL on this machine's CPU, and several proxies in front
of the same engines and store, which differ in `--encode-group-items` and `--encode-balance`. Each
round sends requests with new pictures to every proxy in turn, in an order that changes from round
to round. Each request asks for one token, so that its time is the time to first token.

- equal: four pictures of one size;
- mixed: one large picture and three small ones.

With `--vision DEPTH` the encoder has this many layers of realistic width, and no trained weights.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from epd.routing.instances import Role
from epd.tools.fleet.settings import Topology
from epd.tools.fleet.stack import Stack
from scripts.bench_hits import (
    MODEL,
    MODELS,
    ROOT,
    cpu_s,
    engine_flags,
    picture,
    request,
    tree,
)

PROXIES = {
    "one by one": (),
    "grouped": ("--encode-group-items", "16"),
    "least_load, one by one": ("--encode-balance", "least_load"),
    "least_load, grouped": ("--encode-balance", "least_load", "--encode-group-items", "16"),
}
"""Flags of each proxy, by its name in the table."""

PICTURES: Mapping[str, Sequence[tuple[int, int]]] = {
    "equal": [(592, 448)] * 4,
    "mixed": [(592, 448), (1184, 896), (592, 448), (592, 448)],
}
"""Width and height of the pictures of a request, in pixels."""

HEAD = """\
| pictures | at once | proxy | requests/s | ratio | quartiles | p50, ms | p90 | encode CPU, ms |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""

BATCH = 6
"""Number of requests to one proxy before the next one has its turn."""


class Sample(NamedTuple):
    """Requests of one turn.

    Attributes:
        seconds: time of each request.
        wall_s: time of all of them.
        cpu_s: CPU time of the encode instances for them.
    """

    seconds: Sequence[float]
    wall_s: float
    cpu_s: float


class Proxies(NamedTuple):
    """Running proxies of one stack.

    Attributes:
        client: client of all of them.
        urls: URL of each, by its name in the table.
        encoders: processes of the encode instances.
    """

    client: httpx.Client
    urls: Mapping[str, str]
    encoders: Sequence[psutil.Process]

    def send_batch(self, name: str, sizes: Sequence[tuple[int, int]], at_once: int) -> Sample:
        """Send `BATCH` requests with pictures of these sizes to a proxy, `at_once` at a time."""
        bodies = [
            json.dumps(request([picture(size) for size in sizes], "what? ")).encode()
            for _ in range(BATCH)
        ]
        before_s, started_s = cpu_s(self.encoders), time.monotonic()
        with ThreadPoolExecutor(at_once) as threads:
            asking = partial(ask, self.client, self.urls[name], pictures=len(sizes))
            seconds = [*threads.map(asking, bodies)]
        wall_s = time.monotonic() - started_s
        return Sample(seconds, wall_s, cpu_s(self.encoders) - before_s)


@contextmanager
def proxy(stack: Stack, flags: Sequence[str]) -> Iterator[str]:
    """Start a proxy in front of the engines of a stack; yield its URL."""

    def urls(role: Role) -> str:
        return ",".join(engine.url for engine in stack.of_role(role))

    command = [
        *(sys.executable, "-m", "epd", "serve", "--host", "127.0.0.1", "--port", "0"),
        *("--encode-servers-urls", urls(Role.ENCODE), "--prefill-servers-urls", "disable"),
        *("--decode-servers-urls", urls(Role.PREFILL_DECODE), "--ec-store", stack.store),
        *("--ec-store-budget-s", "2", "--log-format", "json", "--drain-delay-s", "0", *flags),
    ]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield wait_for_url(process, log.fileno())
        finally:
            process.terminate()
            process.wait()


def wait_for_url(process: subprocess.Popen[bytes], log: int) -> str:
    """Return the URL in the first line of a proxy's log."""
    path = Path(f"/proc/self/fd/{log}")
    while process.poll() is None:
        line, end, _ = path.read_text().partition("\n")
        if end:
            return str(json.loads(line)["url"])
        time.sleep(0.05)
    raise RuntimeError(path.read_text())


def ask(client: httpx.Client, url: str, body: bytes, pictures: int) -> float:
    """Send a request with new pictures; return its time in seconds."""
    started_s = time.monotonic()
    answer = client.post(
        f"{url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    seconds = time.monotonic() - started_s
    answer.raise_for_status()
    if f"encoded={pictures}," not in answer.headers["x-epd-items"]:
        raise RuntimeError(f"x-epd-items: {answer.headers['x-epd-items']}")
    return seconds


def measure(fleet: Proxies, kind: str, at_once: int, rounds: int) -> Iterator[str]:
    """Yield a row of the table for each proxy."""
    samples: dict[str, list[Sample]] = {name: [] for name in fleet.urls}
    names = [*fleet.urls]
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(fleet.send_batch(name, PICTURES[kind], at_once))
    before = [sample.wall_s for sample in samples[names[0]]]
    for name, turns in samples.items():
        seconds = sorted(seconds_of_turn for each in turns for seconds_of_turn in each.seconds)
        walls = [each.wall_s for each in turns]
        ratios = [old / new for old, new in zip(before, walls, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cpu_ms = 1000 * statistics.median([each.cpu_s for each in turns]) / BATCH
        yield (
            f"| {kind} | {at_once} | {name} | {BATCH / statistics.median(walls):.2f} "
            f"| {middle:.2f} | {low:.2f}-{high:.2f} | {1000 * statistics.median(seconds):.0f} "
            f"| {1000 * seconds[int(0.9 * len(seconds))]:.0f} | {cpu_ms:.0f} |"
        )


def flags_of(vision: int) -> dict[Role, list[str]]:
    """Return the engines' flags, with an encoder of this depth if it is not 0."""
    if not vision:
        return engine_flags()
    wide = {"depth": vision, "hidden_size": 640, "num_heads": 8, "intermediate_size": 1708}
    text = {"max_position_embeddings": 32768}
    more = ["--load-format", "dummy", "--hf-overrides"]
    return {
        role: [*flags, *more, json.dumps({"vision_config": wide, "text_config": text})]
        for role, flags in engine_flags().items()
    }


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("topologies", nargs="+", help="such as 1e1pd")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each proxy (12)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4], help="requests at a time")
    parser.add_argument("--kinds", nargs="+", choices=PICTURES, default=[*PICTURES])
    parser.add_argument("--vision", type=int, default=0, help="layers of a wider encoder")
    args = parser.parse_args()
    subprocess.run([sys.executable, ROOT / "scripts" / "tiny_models.py", MODELS, MODEL], check=True)
    for topology in args.topologies:
        single = topology.startswith("1e")
        proxies = {
            name: flags for name, flags in PROXIES.items() if not (single and "least" in name)
        }
        with (
            tempfile.TemporaryDirectory(prefix="epd-groups-", dir="/dev/shm") as folder,
            Stack(
                MODELS / MODEL,
                Topology.parse(topology),
                Path(folder),
                local_media=ROOT / "examples" / "media",
                flags=flags_of(args.vision),
            ) as stack,
            ExitStack() as running,
        ):
            urls = {
                name: running.enter_context(proxy(stack, flags)) for name, flags in proxies.items()
            }
            client = running.enter_context(httpx.Client(timeout=600))
            encoders = [
                process for engine in stack.of_role(Role.ENCODE) for process in tree(stack, engine)
            ]
            fleet = Proxies(client, urls, encoders)
            for name in urls:  # engines compile at their first requests
                for sizes in PICTURES.values():
                    fleet.send_batch(name, sizes, 4)
            print(f"\n{topology}\n\n{HEAD}", flush=True)
            for kind in args.kinds:
                for at_once in args.at_once:
                    for row in measure(fleet, kind, at_once, args.rounds):
                        print(row, flush=True)


if __name__ == "__main__":
    main()
