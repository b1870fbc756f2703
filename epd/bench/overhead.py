"""`epd bench overhead`: what a proxy itself costs, beside others, in one run."""

import asyncio
import gc
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from epd.bench import load
from epd.bench.contenders import EPD, RELAY, Contender, Measured
from epd.bench.load import Load
from epd.bench.scenarios import SCENARIOS, Bodies, Scenario
from epd.fleet import Process, ProcessDied, free_ports, stop, wait_until_ready
from epd.version import __version__

READY_S = 60.0
WARM_S = 0.5
DIRECT = "direct"
"""The load without a proxy: what its own latency is."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one contender did in one round of a scenario.

    Attributes:
        cpu_ms: CPU time of its processes for each request, in milliseconds.
        rps: requests a second.
        p50_ms: until the first byte of an answer, the median.
        p99_ms: the same, of the slowest hundredth.
        gap_ms: the longest time between two arrivals of one answer.
        resident_bytes: the most it has had in memory so far.
        done: requests answered in full.
        failed: others, by what became of them.
    """

    cpu_ms: float
    rps: float
    p50_ms: float
    p99_ms: float
    gap_ms: float
    resident_bytes: int
    done: int
    failed: tuple[str, ...]


def sample(outcome: Load, cpu_s: float, resident_bytes: int) -> Sample:
    """A round's figures."""
    first = sorted(one.first_s for one in outcome.done) or [0.0]
    count = max(1, len(outcome.done))
    return Sample(
        cpu_ms=cpu_s * 1000 / count,
        rps=len(outcome.done) / outcome.seconds,
        p50_ms=statistics.median(first) * 1000,
        p99_ms=first[int(0.99 * (len(first) - 1))] * 1000,
        gap_ms=max((one.gap_s for one in outcome.done), default=0.0) * 1000,
        resident_bytes=resident_bytes,
        done=len(outcome.done),
        failed=tuple(outcome.failed[:3]),
    )


class Bench:
    """Fake engines, the contenders in front of them, and a load on one after the other."""

    def __init__(self, contenders: Sequence[Contender], folder: Path, ec_store: str | None) -> None:
        """Start nothing yet.

        Args:
            contenders: who is measured.
            folder: where logs go, and the encoder cache where it has no URL.
            ec_store: URL of the encoder cache.
        """
        cores = sorted(os.sched_getaffinity(0))
        # The proxies have a core of their own; what loads them has the others.
        self._theirs, self._ours = {cores[0]}, set(cores[1:] or cores)
        self._contenders = contenders
        self._folder = folder
        self._store = ec_store or f"file://{folder}/store?max_bytes=256MiB"
        self._seed = 0

    @contextmanager
    def running(self, *, prefill: bool) -> Iterator[tuple[str, list[Measured]]]:
        """The engines' URL and the contenders, until the context is left.

        Raises:
            ProcessDied: one ended meanwhile.
            TimeoutError: one did not serve in time.
        """
        roles = ("encode", "prefill", "decode")
        ports = dict(zip(roles, free_ports(len(roles)), strict=True))
        urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
        os.sched_setaffinity(0, self._ours)
        started: list[Process] = []
        with ExitStack() as stack:
            stack.callback(stop, started)
            command = [sys.executable, "-m", "epd.bench.engines", "--ec-store", self._store]
            instances = [f"{role}:{port}" for role, port in ports.items()]
            log = self._folder / "engines.log"
            started.append(Process("engines", urls["decode"], [*command, *instances], {}, log))
            wait_until_ready(started, READY_S, lambda _: None)
            measured = []
            for contender in self._contenders:
                places = {
                    "port": str(free_ports(1)[0]),
                    "encode_urls": urls["encode"],
                    "prefill_urls": urls["prefill"] if prefill else "disable",
                    "decode_urls": urls["decode"],
                    "ec_store": self._store,
                }
                log = self._folder / f"{contender.name}.log"
                measured.append(Measured(contender, places, log, self._theirs))
                started.append(measured[-1].process)
            wait_until_ready(started, READY_S, lambda _: None)
            yield urls["decode"], measured

    def round(self, scenario: Scenario, one: Measured, seconds: float) -> Sample:
        """One contender's turn."""
        self._seed += 1
        bodies = iter(Bodies(scenario, self._seed))
        before_s = one.cpu_s()
        outcome = _put(one.url, bodies, scenario, seconds)
        return sample(outcome, one.cpu_s() - before_s, one.resident_bytes())

    def direct(self, scenario: Scenario, url: str, seconds: float) -> Sample:
        """The same load without a proxy."""
        return sample(_put(url, iter(Bodies(scenario, 0)), scenario, seconds), 0.0, 0)


def _put(url: str, bodies: Iterator[bytes], scenario: Scenario, seconds: float) -> Load:
    limit_s = None if scenario.once else seconds
    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(load.run(url, bodies, scenario.clients, seconds=limit_s))
    finally:
        gc.enable()
