"""Test rig: fake engines, contenders in front of them, and a load on each contender in turn."""

import asyncio
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import uvloop

from epd.bench import load
from epd.bench.contenders import Contender, Measured
from epd.bench.figures import Sample, sample
from epd.bench.load import Load
from epd.bench.scenarios import Bodies, Scenario
from epd.fleet import Guard, Process, free_ports, held, stop, wait_until_ready

READY_S = 60.0
ROLES = ("encode", "prefill", "decode")
WARM_S = 0.5


@dataclass(frozen=True, slots=True)
class Running:
    """Running engines and contenders.

    Attributes:
        url: base URL of the decode engine, for the load without a proxy.
        contenders: running proxies.
    """

    url: str
    contenders: Sequence[Measured]


class _Started:
    """Started processes, stopped with the context; if this process dies, the folder goes too."""

    def __init__(self, folder: Path) -> None:
        self.processes: list[Process] = []
        self._guard = Guard()
        self._guard.delete(folder)

    def take(self, process: Process) -> None:
        """Add a process to stop with the others."""
        self.processes.append(process)
        self._guard.watch(process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.processes)
        self._guard.close()


class Rig:
    """Test rig that starts the proxies on their own cores, and measures them."""

    def __init__(
        self, contenders: Sequence[Contender], folder: Path, store: str, *, proxy_cores: int
    ) -> None:
        """Prepare the rig without starting a process.

        Args:
            contenders: proxies to measure.
            folder: folder for logs, an absolute path; it is deleted if this process is killed.
            store: URL of the encoder-cache store.
            proxy_cores: number of cores of a proxy; the load uses the others, if there are any.
        """
        cores = sorted(os.sched_getaffinity(0))
        self._theirs = set(cores[:proxy_cores])
        self._ours = set(cores[proxy_cores:] or cores)
        self._contenders = contenders
        self._folder = folder
        self._store = store
        self._seed = 0

    @contextmanager
    def running(self, *, prefill: bool) -> Iterator[Running]:
        """Start new engines and contenders, and stop them at the end of the context.

        Raises:
            ProcessDied: a process ended early.
            TimeoutError: a process did not serve within `READY_S`.
            OSError: a process could not be started.
        """
        ports = dict(zip(ROLES, free_ports(len(ROLES)), strict=True))
        urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
        with ExitStack() as stack:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, self._ours)
            started = stack.enter_context(_Started(self._folder))
            with held():
                started.take(self._engines(ports))
            wait_until_ready(started.processes, READY_S, _silently)
            measured: list[Measured] = []
            for contender in self._contenders:
                with held():
                    measured.append(self._start(contender, urls, prefill=prefill))
                    started.take(measured[-1].process)
            wait_until_ready(started.processes, READY_S, _silently)
            yield Running(urls["decode"], measured)

    def _engines(self, ports: dict[str, int]) -> Process:
        instances = [f"{role}:{port}" for role, port in ports.items()]
        return Process(
            "engines",
            f"http://127.0.0.1:{ports['decode']}",
            [sys.executable, "-m", "epd.bench.engines", "--ec-store", self._store, *instances],
            {},
            self._folder / "engines.log",
        )

    def _start(self, contender: Contender, urls: dict[str, str], *, prefill: bool) -> Measured:
        places = {
            "port": str(free_ports(1)[0]),
            "encode_urls": urls["encode"],
            "prefill_urls": urls["prefill"] if prefill else "disable",
            "decode_urls": urls["decode"],
            "ec_store": self._store,
        }
        return Measured(contender, places, self._folder / f"{contender.name}.log", self._theirs)

    def warm(self, scenario: Scenario, one: Measured) -> None:
        """Put a short load on a contender, so that it opens its connections and fills its caches.

        Raises:
            ProcessDied: the contender has ended.
            TimeoutError: requests got no response.
        """
        self._turn(one, scenario, WARM_S)

    def measure(self, scenario: Scenario, one: Measured, seconds: float) -> Sample:
        """Measure one turn of a contender.

        Raises:
            ProcessDied: the contender has ended.
            TimeoutError: requests got no response.
        """
        before_s = one.cpu_s()
        outcome = self._turn(one, scenario, seconds)
        for failure in outcome.failed[:1]:
            print(
                f"{one.name}: {len(outcome.failed)} failed, the first: {failure}", file=sys.stderr
            )
        return sample(outcome, one.cpu_s() - before_s, one.resident_bytes())

    def _turn(self, one: Measured, scenario: Scenario, seconds: float) -> Load:
        try:
            return self._put(one.url, scenario, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{one.name}: {scenario.title}: {error}") from None
        finally:
            one.process.check_alive()

    def measure_direct(self, scenario: Scenario, url: str, seconds: float) -> Sample:
        """Measure the same load without a proxy."""
        return sample(self._put(url, scenario, seconds), 0.0, 0)

    def _put(self, url: str, scenario: Scenario, seconds: float) -> Load:
        self._seed += 1  # the pictures of all turns differ
        bodies = iter(Bodies(scenario, self._seed))
        limit_s = None if scenario.once else seconds
        gc.collect()
        gc.disable()  # its pauses would be counted as the proxy's
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(
                    load.run(
                        url,
                        bodies,
                        scenario.clients,
                        events=scenario.events,
                        seconds=limit_s,
                        connect=scenario.connect,
                    )
                )
        finally:
            gc.enable()


def _silently(_: str) -> None:
    """Report no progress: the processes start within a second."""
