"""Compare E+PD and E+P+D with one vLLM engine on this machine, and print the results as JSON.

    python -m scripts.gpu.measure --model /dev/shm/qwen2.5-vl-7b > results.json
    python -m scripts.gpu.measure --model .run/models/tiny-qwen2.5-vl --short -- --device cpu

`scripts.gpu.model` writes a missing model. `epd up` starts one fleet after the other. Each gets the
same requests: one at a time, with pictures that are new and then repeated; then 32 at once.
"""

import argparse
import base64
import io
import json
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import requests
from PIL import Image

from epd.tools.bench.answer import Answer, differences, read_answer, read_events
from epd.tools.bench.dataset import rng
from epd.tools.bench.runs import machine
from epd.version import __version__
from scripts.ports import free_ports

HTTP = requests.Session()
HTTP.trust_env = False  # no proxy of the environment
EPD, PD = [sys.executable, "-m", "epd"], "prefill-decode-port"
FLEETS = {"mono": "1pd", "e1pd": "1e1pd", "e1p1d": "1e1p1d"}
"""Topologies by name. `mono` is the engine of 1pd: its requests bypass the proxy."""
PORTS = ("port", "ec-store-port", "encode-port", "prefill-port", "decode-port", "nixl-port", PD)
SIZES, SHORT_SIZES = ((1280, 720), (2560, 1440)), ((112, 112), (224, 112))
Answers = dict[str, list[Answer]]


def picture(name: str, size: tuple[int, int]) -> str:
    """Return a unique JPEG as data URL: patches of colour with soft edges."""
    width, height = size[0] // 16, size[1] // 16
    patches = Image.frombytes("RGB", (width, height), rng(name).randbytes(3 * width * height))
    patches.resize(size, Image.Resampling.BICUBIC).save(buffer := io.BytesIO(), "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(fleet: str, urls: Sequence[str], text: str, tokens: int = 16) -> Answer:
    """Return an answer at temperature 0; its `seconds` are those to the first token."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]
    body: Any = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": True, "stream": True}
    events, first_s, started = list[Any](), 0.0, time.perf_counter()
    with HTTP.post(f"{fleet}/v1/chat/completions", json=body, stream=True, timeout=300) as reply:
        if not reply.ok:
            return Answer(reply.status_code, error=reply.text)
        for line in reply.iter_lines():
            events += read_events(line)
            if not first_s and b'"logprob":' in line:
                first_s = time.perf_counter() - started
    return read_answer(events, reply.headers.get("x-epd-items", ""), first_s)


def one_by_one(fleet: str, sizes: Sequence[tuple[int, int]]) -> Answers:
    """Return the answers by kind of request: text, a picture of each size, four large pictures."""
    answers = {"text": [ask(fleet, [], f"How are you, {n}?") for n in range(5)]}
    for size, count, number in ((sizes[0], 1, 5), (sizes[1], 1, 5), (sizes[1], 4, 3)):
        kind = f"{count} x {size[0]}x{size[1]}"
        items = [[picture(f"{kind} {n} {at}", size) for at in range(count)] for n in range(number)]
        for turn in ("first", "again"):
            asked = [ask(fleet, urls, f"{turn} {n}:") for n, urls in enumerate(items)]
            answers[f"{kind}, {turn}"] = asked
    return answers


def at_once(fleet: str, turn: str, urls: Sequence[str]) -> dict[str, Any]:
    """Return throughput and times to the first token of requests with a picture, 32 at once."""
    texts, started = [f"{turn} {n}:" for n in range(len(urls))], time.perf_counter()
    with ThreadPoolExecutor(32) as senders:
        answers = list(senders.map(lambda url, text: ask(fleet, [url], text, 32), urls, texts))
    took_s = time.perf_counter() - started
    ttft = sorted(answer.seconds for answer in answers if answer.tokens)
    late = {f"ttft_p{p}_ms": 1000 * ttft[len(ttft) * p // 100] for p in (50, 99) if ttft}
    return {"asked": len(urls), "answered": len(ttft), "per_s": len(ttft) / took_s, **late}


@contextmanager
def running(name: str, args: argparse.Namespace) -> Iterator[str]:
    """Start a fleet, yield the URL to ask, and stop it."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    words = ["--model", args.model, "--served-model-name", "m", "--topology", FLEETS[name]]
    words += [f"--{flag}={port}" for flag, port in ports.items()]
    with subprocess.Popen([*EPD, "up", *words, *args.up], stdout=subprocess.PIPE, text=True) as up:
        try:
            if not any(line.startswith("ready: ") for line in up.stdout or ()):
                raise RuntimeError(f"epd up --topology {FLEETS[name]} ended with {up.wait()}")
            yield f"http://127.0.0.1:{ports[PD if name == 'mono' else 'port']}"
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate()


def measure(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], Answers]:
    """Return the times of a fleet, and its answers to the requests one by one."""
    sizes, count = (SHORT_SIZES, 8) if args.short else (SIZES, 128)
    started = time.perf_counter()
    with running(name, args) as fleet:
        ready_s = time.perf_counter() - started
        for n in range(4):
            ask(fleet, [picture(f"warm-up {n}", sizes[n % 2])], "Warm up:")
        answers = one_by_one(fleet, sizes)
        pool = [picture(f"pool {n}", sizes[0]) for n in range(48)]
        again = rng("order").choices(pool, k=count)
        unique = [picture(f"unique {n}", sizes[0]) for n in range(count // 2)]
        turns = {"pool, first pass": again, "pool, second pass": again, "unique": unique}
        load = {turn: at_once(fleet, turn, urls) for turn, urls in turns.items()}
    ttft = {
        kind: 1000 * statistics.median([answer.seconds for answer in some if answer.tokens] or [0])
        for kind, some in answers.items()
    }
    return {"vllm": version("vllm"), "ready_s": ready_s, "ttft_ms": ttft, "load": load}, answers


def main() -> None:
    """Print the results of all fleets; the answers are compared with those of the first one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=[*FLEETS])
    parser.add_argument("--short", action="store_true", help="few requests, small pictures")
    parser.add_argument("up", nargs="*", help="flags of `epd up`, after --")
    args = parser.parse_args()
    if not Path(args.model).exists():
        subprocess.run([sys.executable, "-m", "scripts.gpu.model", args.model], check=True)
    gpus = [gpu.read_text() for gpu in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    results: dict[str, Any] = {"epd": __version__, "machine": machine(), "gpus": gpus}
    mono: Answers = {}
    try:
        for name in args.fleets:
            results[name], answers = measure(name, args)
            mono = mono or answers
            pairs = list(zip(chain(*mono.values()), chain(*answers.values()), strict=True))
            found = [list(differences(*pair, 0.0)) for pair in pairs]
            distinct = len({tuple(answer.tokens) for answer, _ in pairs})
            items = Counter(answer.items for _, answer in pairs if answer.items)
            counts = {"asked": len(pairs), "equal": found.count([]), "distinct": distinct}
            results[name]["answers"] = {**counts, "differences": [*chain(*found)], "items": items}
    finally:  # a fleet that does not start ends the run, with the results of those before it
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
