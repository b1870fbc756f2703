"""Scenarios of the benchmark: request bodies, measurements, and tables of results. Pure."""

import statistics
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from random import Random
from typing import Any

import orjson

from scripts.overhead.load import BenchLoad

KB = 1000
MB = 1000 * KB
MODEL = "measured"
PICTURE_SIDE = 1000
QUESTION = "What is in this picture? " * 4
MARK = 512
"""Distance of a picture's mark from the end of its base64 text. The mark makes it unique."""
MARK_LENGTH = 12
GAP = "gap_ms"
"""Argument in `vllm_xargs` with the delay between two chunks of a fake engine, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Kind of load.

    Attributes:
        name, title: name on the command line and in results, and in tables.
        clients: number of concurrent requests.
        picture_bytes: size of each picture before base64, in bytes.
        reuse: share of requests with pictures that were sent before.
        chunks: events of the streamed response; 0: the response is one JSON document.
        gap_s: time between two events, in seconds.
        prefill: whether there is a prefill instance.
        once: whether each client sends one request, all at the same time.
        connect: whether each client connects only at that time; the time to the first byte then
            includes the connection.
        fresh: whether each proxy is started only for this scenario, to measure its memory.
    """

    name: str
    title: str
    clients: int = 8
    pictures: int = 0
    picture_bytes: int = 0
    reuse: float = 0.0
    chunks: int = 0
    gap_s: float = 0.0
    prefill: bool = False
    once: bool = False
    connect: bool = False
    fresh: bool = False

    @property
    def events(self) -> int:
        """Return the number of events of a complete response: its chunks and `[DONE]`."""
        return self.chunks and self.chunks + 1


SCENARIOS = (
    Scenario("text-json", "text, JSON, 32 at once", clients=32),
    Scenario("text-sse", "text, SSE, 64 chunks", chunks=64),
    Scenario("picture-100kb", "1 picture 100 KB, unique", pictures=1, picture_bytes=100 * KB),
    Scenario("picture-2mb", "1 picture 2 MB, unique", 4, pictures=1, picture_bytes=2 * MB),
    Scenario("pictures-4x500kb", "4 pictures 500 KB", 4, pictures=4, picture_bytes=500 * KB),
    Scenario("picture-1mb-reuse", "1 picture 1 MB, 90% reuse", 4, 1, picture_bytes=MB, reuse=0.9),
    Scenario(
        "epd-sse", "E+P+D, 100 KB, SSE", pictures=1, picture_bytes=100 * KB, chunks=64, prefill=True
    ),
    Scenario("streams-64", "64 streams, 10 ms a token", 64, chunks=64, gap_s=0.01),
    Scenario("streams-512", "512 streams, 20 ms a token", 512, chunks=64, gap_s=0.02, once=True),
    Scenario(
        "burst-512",
        "512 clients connect, 100 ms a token",
        512,
        chunks=8,
        gap_s=0.1,
        once=True,
        connect=True,
    ),
    Scenario("one-client", "one client at a time, text, JSON", clients=1),
    Scenario(
        "memory-8x20mb",
        "8 pictures of 20 MB at once",
        8,
        pictures=1,
        picture_bytes=20 * MB,
        once=True,
        fresh=True,
    ),
)
"""All scenarios; each is measured separately."""


class Bodies:
    """Bodies of a scenario's requests. All pictures differ, except reused ones."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        """Build the template of all bodies; each seed gives other pictures."""
        self._random = Random(seed)  # noqa: S311 - a load, not a secret
        self._scenario = scenario
        self._prefix = f"{seed:06x}"
        body, self._marks = _template(scenario)
        self._template = bytearray(body)
        self._made = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            reused = self._made and self._random.random() < self._scenario.reuse
            number = self._random.randrange(self._made) if reused else self._made
            self._made += not reused
            for index, mark in enumerate(self._marks):
                word = f"{self._prefix}{number:05x}{index:x}".encode()
                self._template[mark : mark + MARK_LENGTH] = word
            yield bytes(self._template)


def _template(scenario: Scenario) -> tuple[bytes, list[int]]:
    """Return a body, and the offset of each picture's mark in it."""
    url = b"data:image/png;base64," + b64encode(png(scenario.picture_bytes))
    parts = [
        {"type": "image_url", "image_url": {"url": f"@{n}@"}} for n in range(scenario.pictures)
    ]
    content: object = [*parts, {"type": "text", "text": QUESTION}] if parts else QUESTION
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max(1, scenario.chunks),
        "temperature": 0,
        **({"stream": True} if scenario.chunks else {}),
        **({"vllm_xargs": {GAP: scenario.gap_s * 1000}} if scenario.gap_s else {}),
    }
    body = orjson.dumps(asked)
    marks = []
    for number in range(scenario.pictures):
        place = body.index(f"@{number}@".encode())
        body = body.replace(f"@{number}@".encode(), url)
        marks.append(place + len(url) - len(url) % 4 - MARK)
    return body, marks


def png(size_bytes: int) -> bytes:
    """Return a PNG of this size in bytes: a valid header, and noise in place of pixels."""
    header = struct.pack(">IIBBBBB", PICTURE_SIDE, PICTURE_SIDE, 8, 2, 0, 0, 0)
    noise = Random(0).randbytes(max(MARK, size_bytes - 57))  # noqa: S311
    chunks = ((b"IHDR", header), (b"IDAT", noise), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


DIRECT = "direct"
"""Name of the load without a proxy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one turn of a contender, or the medians of its turns.

    Attributes:
        cpu_ms: CPU time of its processes per request, in milliseconds.
        cpu_chunk_us: CPU time per event of a stream, in microseconds; 0 without streams.
        first_p50_ms: median time to the first byte of a response's body, in milliseconds.
        first_p99_ms: 99th percentile of the same time.
        gap_ms: longest time between two arrivals of one response, in milliseconds.
        resident_bytes: peak memory so far, in bytes.
    """

    cpu_ms: float
    cpu_chunk_us: float
    rps: float
    first_p50_ms: float
    first_p99_ms: float
    gap_ms: float
    resident_bytes: float
    done: float
    failed: float


def sample(load: BenchLoad, cpu_s: float, resident_bytes: int) -> Sample:
    first = sorted(answer.first_s for answer in load.done) or [0.0]
    events = sum(answer.events for answer in load.done)
    return Sample(
        cpu_ms=cpu_s * 1e3 / max(1, len(load.done)),
        cpu_chunk_us=cpu_s * 1e6 / events if events else 0.0,
        rps=len(load.done) / load.seconds,
        first_p50_ms=statistics.median(first) * 1e3,
        first_p99_ms=first[int(0.99 * (len(first) - 1))] * 1e3,
        gap_ms=max((answer.gap_s for answer in load.done), default=0.0) * 1e3,
        resident_bytes=resident_bytes,
        done=len(load.done),
        failed=len(load.failed),
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a scenario: the turns of each contender, in order.

    The contenders alternate; `DIRECT` is one of them.
    """

    scenario: Scenario
    turns: Mapping[str, Sequence[Sample]]

    def median(self, name: str) -> Sample:
        """Return the median of each measurement over the turns; `failed` is the sum."""
        columns = [asdict(turn) for turn in self.turns[name]]
        medians = {field: statistics.median(row[field] for row in columns) for field in columns[0]}
        return Sample(**{**medians, "failed": sum(row["failed"] for row in columns)})

    def ratio(self, name: str, other: str) -> float:
        """Return the ratio of one contender's CPU time to another's: the median over rounds.

        The result is NaN if the kernel has counted no CPU time for the other contender.
        """
        rounds = zip(self.turns[name], self.turns[other], strict=True)
        return statistics.median([a.cpu_ms / b.cpu_ms for a, b in rounds if b.cpu_ms] or [nan])

    def added_ms(self, name: str) -> tuple[float, float]:
        """Return the time added to the first byte, in ms: median and 99th percentile."""
        median, direct = self.median(name), self.median(DIRECT)
        return median.first_p50_ms - direct.first_p50_ms, median.first_p99_ms - direct.first_p99_ms

    def json(self, reference: str) -> dict[str, Any]:
        """Return the result as JSON, with the ratio of `reference` to each contender."""
        contenders = {}
        for name in self.turns:
            p50_ms, p99_ms = self.added_ms(name)
            contenders[name] = asdict(self.median(name))
            if name != DIRECT:
                ratio = round(self.ratio(reference, name), 4)
                added = {"added_p50_ms": p50_ms, "added_p99_ms": p99_ms}
                contenders[name] |= {f"{reference}_ratio": ratio, **added}
        return {"scenario": asdict(self.scenario), "contenders": contenders}


def table(results: Sequence[Result], reference: str) -> Iterator[str]:
    """Yield the lines of a Markdown table: CPU milliseconds, and ratios to other contenders."""
    others = [name for name in results[0].turns if name not in {reference, DIRECT}]
    ratios = [f"/ {name}" for name in others]
    names = [reference, *others]
    yield _row("CPU ms per request", *names, *ratios)
    yield _row(*["---"] * (1 + len(names) + len(ratios)))
    for result in results:
        cpu = (f"{result.median(name).cpu_ms:.3f}" for name in names)
        ratio = (f"{result.ratio(reference, name):.2f}" for name in others)
        yield _row(result.scenario.title, *cpu, *ratio)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
