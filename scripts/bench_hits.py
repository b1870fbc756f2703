"""Cost of a picture for prefill: raw, new and seen before, by resolution, on real engines.

    .venv/bin/python scripts/bench_hits.py --out docs/benchmarks/hits.json

It starts 1e1pd with the tiny Qwen2.5-VL on this machine's CPU. For each resolution and number of
pictures it sends these requests. Each asks for one token, so that its time is the time to first
token:

- raw: sent to the prefill-decode instance itself, which preprocesses and encodes the pictures;
- new: sent to the proxy, with pictures that the store does not have;
- hit: the same request again, under another salt, so that no KV block is reused;
- text: a prompt of text with as many tokens, sent to the prefill-decode instance. The difference
  between a hit and this is the cost of the pictures.

The model is tiny: its encoder costs less than that of a real model. The costs that do not depend on
the model's size remain: decoding, preprocessing, hashing and moving tensors.
"""

import argparse
import base64
import io
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from epd.routing.instances import Role
from epd.tools.bench.runs import machine
from epd.tools.fleet.engine import Engine
from epd.tools.fleet.settings import Topology
from epd.tools.fleet.stack import Stack

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".run" / "models"
MODEL = "tiny-qwen2.5-vl"

SHAPES = {0.25: (592, 448), 0.5: (832, 624), 1.0: (1184, 896), 2.0: (1664, 1248), 4.0: (2368, 1776)}
"""Width and height by megapixels, multiples of 16, in the proportions of a photograph."""
PEER_SHAPE = (2560, 1440)
"""Resolution of the result that SGLang publishes for a hit."""
COUNTS = (1, 4)

WORD = "what? "
ITEMS = {"raw": "", "new": "encoded={}", "hit": "hit={}", "text": ""}
"""Required content of the proxy's `x-epd-items`, by kind of request; empty: sent without the proxy.
"""

TOKENS = 32768
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 4_300_000}
QUALITY = 90


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians of one kind of request.

    Attributes:
        kind: raw, new, hit or text.
        width, height: size of each picture, in pixels.
        pictures: number of pictures in the request; for text, the number that it stands for.
        prompt_tokens: tokens of the prompt.
        body_bytes: length of the request.
        first_token_s: time to the response, which has one token.
        encode_cpu_s: CPU time of the encode instance.
        prefill_cpu_s: CPU time of the prefill-decode instance.
        items: the proxy's `x-epd-items`.
    """

    kind: str
    width: int
    height: int
    pictures: int
    prompt_tokens: int
    body_bytes: int
    first_token_s: float
    encode_cpu_s: float
    prefill_cpu_s: float
    items: str


class Bench:
    """Client that sends requests to one stack, and reads the CPU time of its engines."""

    def __init__(self, stack: Stack, client: httpx.Client) -> None:
        self._client = client
        self._proxy_url = stack.url
        [encode], [prefill] = stack.of_role(Role.ENCODE), stack.of_role(Role.PREFILL_DECODE)
        self._prefill_url = prefill.url
        self._encode = tree(stack, encode)
        self._prefill = tree(stack, prefill)
        few, many = (self._cost("text", (0, 0), [], WORD * words) for words in (10, 1010))
        self._word_tokens = (many.prompt_tokens - few.prompt_tokens) / 1000
        self._template_tokens = few.prompt_tokens - 10 * self._word_tokens

    def costs(self, shape: tuple[int, int], count: int, rounds: int) -> Iterator[Cost]:
        """Measure each kind of request with `count` pictures of this shape, `rounds` times."""
        samples: dict[str, list[Cost]] = {kind: [] for kind in ITEMS}
        for _ in range(rounds):
            samples["raw"].append(self._cost("raw", shape, pictures(shape, count)))
            urls = pictures(shape, count)
            samples["new"].append(self._cost("new", shape, urls))
            hit = self._cost("hit", shape, urls)
            samples["hit"].append(hit)
            words = round((hit.prompt_tokens - self._template_tokens) / self._word_tokens)
            text = self._cost("text", shape, [], WORD * words)
            samples["text"].append(replace(text, pictures=count))
        for made in samples.values():
            yield median(made)

    def _cost(
        self, kind: str, shape: tuple[int, int], urls: Sequence[str], text: str = WORD
    ) -> Cost:
        body = json.dumps(request(urls, text)).encode()
        url = self._proxy_url if ITEMS[kind] else self._prefill_url
        encode_s, prefill_s = cpu_s(self._encode), cpu_s(self._prefill)
        started_s = time.monotonic()
        answer = self._client.post(
            f"{url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        seconds = time.monotonic() - started_s
        answer.raise_for_status()
        items = answer.headers.get("x-epd-items", "")
        if ITEMS[kind].format(len(urls)) not in items:
            raise RuntimeError(f"the request for {kind!r} had x-epd-items: {items!r}")
        return Cost(
            kind,
            *shape,
            len(urls),
            answer.json()["usage"]["prompt_tokens"],
            len(body),
            seconds,
            cpu_s(self._encode) - encode_s,
            cpu_s(self._prefill) - prefill_s,
            items,
        )


def median(samples: Sequence[Cost]) -> Cost:
    """Return the medians of equal requests."""
    first = samples[0]
    return Cost(
        first.kind,
        first.width,
        first.height,
        first.pictures,
        first.prompt_tokens,
        round(statistics.median([sample.body_bytes for sample in samples])),
        round(statistics.median([sample.first_token_s for sample in samples]), 4),
        round(statistics.median([sample.encode_cpu_s for sample in samples]), 3),
        round(statistics.median([sample.prefill_cpu_s for sample in samples]), 3),
        first.items,
    )


def pictures(shape: tuple[int, int], count: int) -> list[str]:
    """Return `data:` URLs of JPEG pictures that no other call returns."""
    return [picture(shape) for _ in range(count)]


def picture(shape: tuple[int, int]) -> str:
    """Return a picture with the detail of a photograph: noise at an eighth of its resolution."""
    width, height = shape
    small = (width // 8, height // 8)
    noise = Image.frombytes("RGB", small, secrets.token_bytes(3 * small[0] * small[1]))
    written = io.BytesIO()
    noise.resize(shape, Image.Resampling.BICUBIC).save(written, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def request(urls: Sequence[str], text: str) -> dict[str, Any]:
    """Return a request for one token, under a unique salt."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": secrets.token_hex(8),
    }


def tree(stack: Stack, engine: Engine) -> list[psutil.Process]:
    """Return the processes of an engine."""
    root = psutil.Process(stack.process_of(engine).pid)
    return [root, *root.children(recursive=True)]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time of these processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def engine_flags() -> dict[Role, list[str]]:
    """Return the flags of engines that take four pictures of four megapixels in one prompt."""
    size = json.dumps({"size": PIXELS})
    every = [
        *("--max-model-len", str(TOKENS), "--max-num-batched-tokens", str(TOKENS)),
        *("--mm-processor-kwargs", size, "--max-num-seqs", "2"),
        *("--hf-overrides", json.dumps({"text_config": {"max_position_embeddings": TOKENS}})),
    ]
    return {Role.ENCODE: every, Role.PREFILL_DECODE: every}


def table(costs: Sequence[Cost]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        "| pictures | request | tokens | body, MB | first token, ms | E CPU, s | PD CPU, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {cost.pictures} of {cost.width}x{cost.height} | {cost.kind} "
        f"| {cost.prompt_tokens} | {cost.body_bytes / 1e6:.2f} "
        f"| {cost.first_token_s * 1000:.0f} | {cost.encode_cpu_s:.2f} | {cost.prefill_cpu_s:.2f} |"
        for cost in costs
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="requests of each kind (5)")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    args = parser.parse_args()
    subprocess.run([sys.executable, ROOT / "scripts" / "tiny_models.py", MODELS, MODEL], check=True)
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory(prefix="epd-hits-", dir="/dev/shm") as folder:
        stack = Stack(
            MODELS / MODEL,
            Topology.parse("1e1pd"),
            Path(folder),
            local_media=ROOT / "examples" / "media",
            flags=engine_flags(),
            proxy_flags=["--ec-store-budget-s", "2"],
        )
        with stack, httpx.Client(timeout=600) as client:
            bench = Bench(stack, client)
            list(bench.costs(SHAPES[0.25], 1, 2))  # engines compile at their first requests
            for shape in (*SHAPES.values(), PEER_SHAPE):
                for count in COUNTS:
                    costs += bench.costs(shape, count, args.rounds)
                    print("\n".join(table(costs).splitlines()[-4:]), flush=True)
    print(table(costs))
    if args.out is not None:
        made = {"date": datetime.now(UTC).date().isoformat(), "vllm": version("vllm")}
        results = made | {"machine": machine(), "costs": [asdict(cost) for cost in costs]}
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
