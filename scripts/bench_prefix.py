"""Prompt tokens that two prefill-decode engines compute, by the proxy's balance.

    .venv/bin/python scripts/bench_prefix.py --out docs/benchmarks/prefix.json

It starts 1e2pd on this machine's CPU, with a model of Qwen2.5-VL's architecture and random weights,
and one proxy for each balance before the same engines. Each balance gets pictures of its own, and
for each picture a first question and then follow-up questions, in rounds: the first question about
every picture, then the second, and so on. So other pictures come between two questions about one,
and each question repeats all of its prompt but a few tokens.

The engines' own metrics tell how many prompt tokens they computed and how many they had in their
prefix cache (`vllm:prompt_tokens_by_source_total`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from epd.routing.instances import Role
from epd.tools.bench.runs import machine
from epd.tools.fleet.process import free_ports
from epd.tools.fleet.settings import Topology
from epd.tools.fleet.stack import Stack
from scripts.bench_hits import MODEL, MODELS, PIXELS, ROOT, picture

SHAPE = (1184, 896)
"""Width and height of a picture: 1,344 prompt tokens."""

BALANCES = ("least_load", "content")
SOURCES = "vllm:prompt_tokens_by_source_total"
COMPUTED, CACHED = "local_compute", "local_cache_hit"

WIDE = {
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "vision_config": {"out_hidden_size": 1024},
}
"""Width of a model of half a billion parameters, so that a prefill takes a second."""


@dataclass(frozen=True, slots=True)
class BalanceResult:
    """What the engines did for the requests of one balance.

    Attributes:
        balance: value of `--decode-balance`.
        requests: number of requests.
        computed: prompt tokens that the engines computed.
        cached: prompt tokens that were in a prefix cache.
        first_p50_s, first_p90_s: time to the first token of all requests.
        later_p50_s, later_p90_s: the same of follow-up questions.
        share: requests of the busiest engine, as a part of all.
    """

    balance: str
    requests: int
    computed: int
    cached: int
    first_p50_s: float
    first_p90_s: float
    later_p50_s: float
    later_p90_s: float
    share: float


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=int, default=12, help="pictures of each balance (12)")
    parser.add_argument("--questions", type=int, default=8, help="follow-up questions (8)")
    parser.add_argument("--clients", type=int, default=4, help="requests at once (4)")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    args = parser.parse_args()
    subprocess.run([sys.executable, ROOT / "scripts" / "tiny_models.py", MODELS, MODEL], check=True)
    with tempfile.TemporaryDirectory(prefix="epd-prefix-", dir="/dev/shm") as folder:
        stack = Stack(
            MODELS / MODEL,
            Topology.parse("1e2pd"),
            Path(folder),
            local_media=ROOT / "examples" / "media",
            flags=dict.fromkeys((Role.ENCODE, Role.PREFILL_DECODE), engine_flags()),
        )
        with stack, ExitStack() as proxies:
            urls = {balance: proxies.enter_context(proxy(stack, balance)) for balance in BALANCES}
            for url in urls.values():  # engines compile at their first requests
                run_questions(url, ask_all(4, 1), args.clients)
            results = [
                measure(stack, balance, urls[balance], ask_all(args.pictures, args.questions), args)
                for balance in BALANCES
            ]
    print(table(results))
    if args.out is not None:
        made = {"date": datetime.now(UTC).date().isoformat(), "vllm": version("vllm")}
        what = {"machine": machine(), "pictures": args.pictures, "questions": args.questions}
        rows = {"clients": args.clients, "results": [asdict(result) for result in results]}
        args.out.write_text(json.dumps(made | what | rows, indent=1) + "\n")


def engine_flags() -> list[str]:
    """Return the flags of engines with a wide model and blocks that are small beside a question."""
    return [
        *("--load-format", "dummy", "--hf-overrides", json.dumps(WIDE)),
        *("--mm-processor-kwargs", json.dumps({"size": PIXELS})),
        *("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--block-size", "32"),
    ]


@contextmanager
def proxy(stack: Stack, balance: str) -> Iterator[str]:
    """Start a proxy with this balance before the engines of a stack; yield its URL."""

    def urls(role: Role) -> str:
        return ",".join(engine.url for engine in stack.of_role(role))

    [port] = free_ports(1)
    command = [
        *(sys.executable, "-m", "epd", "serve", "--host", "127.0.0.1", "--port", str(port)),
        *("--encode-servers-urls", urls(Role.ENCODE), "--ec-store", stack.store),
        *("--decode-servers-urls", urls(Role.PREFILL_DECODE), "--decode-balance", balance),
        *("--log-level", "warning", "--drain-delay-s", "0"),
    ]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None and not ready(url):
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def ready(url: str) -> bool:
    """Return whether a proxy and its engines answer."""
    try:
        return httpx.get(f"{url}/ready", timeout=10).is_success
    except httpx.TransportError:
        return False


def ask_all(pictures: int, questions: int) -> list[tuple[int, dict[str, Any]]]:
    """Return requests in rounds, each with the number of its round: 0 for a first question."""
    urls = [picture(SHAPE) for _ in range(pictures)]
    return [
        (number, request(url, f"{number}: what is this?"))
        for number in range(questions + 1)
        for url in urls
    ]


def request(url: str, text: str) -> dict[str, Any]:
    """Return a question about a picture."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
    }


def measure(
    stack: Stack,
    balance: str,
    url: str,
    requests: Sequence[tuple[int, dict[str, Any]]],
    args: argparse.Namespace,
) -> BalanceResult:
    """Send the requests, and return what the engines computed for them."""
    before = [sources(engine.url) for engine in stack.of_role(Role.PREFILL_DECODE)]
    seconds = run_questions(url, requests, args.clients)
    after = [sources(engine.url) for engine in stack.of_role(Role.PREFILL_DECODE)]
    spent = [new - old for new, old in zip(after, before, strict=True)]
    total = sum(spent, Counter[str]())
    first = sorted(second for _, second in seconds)
    later = sorted(second for number, second in seconds if number)
    prompts = [spending[COMPUTED] + spending[CACHED] for spending in spent]
    return BalanceResult(
        balance,
        len(requests),
        total[COMPUTED],
        total[CACHED],
        *percentiles(first),
        *percentiles(later),
        round(max(prompts) / sum(prompts), 2),
    )


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile."""
    return round(statistics.median(seconds), 3), round(statistics.quantiles(seconds, n=10)[8], 3)


def run_questions(
    url: str, requests: Sequence[tuple[int, dict[str, Any]]], clients: int
) -> list[tuple[int, float]]:
    """Send requests, `clients` at once; return the round of each and its time to first token."""
    with httpx.Client(timeout=600) as client, ThreadPoolExecutor(clients) as pool:

        def ask(numbered: tuple[int, dict[str, Any]]) -> tuple[int, float]:
            number, body = numbered
            started_s = time.monotonic()
            first_s = None
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
                reply.raise_for_status()
                for line in reply.iter_lines():
                    if first_s is None and line.startswith("data: {"):
                        first_s = time.monotonic() - started_s
            if first_s is None:
                raise RuntimeError("an answer has no event")
            return number, first_s

        return list(pool.map(ask, requests))


def sources(url: str) -> Counter[str]:
    """Return an engine's prompt tokens so far, by source."""
    page = httpx.get(f"{url}/metrics", timeout=60).text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == SOURCES:
                found[sample.labels["source"]] += round(sample.value)
    if not found:
        raise RuntimeError(f"{url} has no metric {SOURCES}")
    return found


def table(results: Sequence[BalanceResult]) -> str:
    """Return the results as a table of Markdown."""
    names = ["balance", "requests", "computed", "of least_load", "cached", "busiest engine's part"]
    names += ["first token p50, p90, s", "follow-ups p50, p90, s"]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    lines += [
        f"| {result.balance} | {result.requests} | {result.computed} "
        f"| {result.computed / results[0].computed:.2f} | {result.cached} | {result.share} "
        f"| {result.first_p50_s}, {result.first_p90_s} "
        f"| {result.later_p50_s}, {result.later_p90_s} |"
        for result in results
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
