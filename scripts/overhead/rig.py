"""Test rig: fake engines, the proxies to compare in front of them, and a load on each in turn.

A proxy to compare is a command line, run as a process.
"""

import asyncio
import gc
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import psutil
import uvloop

from epd.tools.up.process import STOP_TIMEOUT_S, Process, stop, wait_until_ready
from scripts.overhead import load
from scripts.overhead.load import BenchLoad
from scripts.overhead.scenarios import Bodies, Sample, Scenario, sample
from scripts.ports import free_ports

PYTHON = shlex.quote(sys.executable)
EPD = (
    f"{PYTHON} -m epd serve --port {{port}} --encode-servers-urls {{encode_urls}} "
    "--prefill-servers-urls {prefill_urls} --decode-servers-urls {decode_urls} "
    "--ec-store {ec_store} --drain-delay-s 0"
)
NAME = re.compile(r"[\w.+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Contender:
    """Name of a proxy, and its command line with placeholders such as `{port}`."""

    name: str
    command: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name=command line`; raise `ValueError` for another form."""
        name, _, command = text.partition("=")
        words = tuple(shlex.split(command))
        if not NAME.fullmatch(name) or not words:
            raise ValueError(f"{text!r} is not of the form name=command")
        return cls(name, words)

    def argv(self, places: Mapping[str, str]) -> list[str]:
        return [word.format(**places) for word in self.command]


class Measured:
    """Running contender, bound to its own cores."""

    def __init__(
        self, contender: Contender, places: Mapping[str, str], log: Path, cores: set[int]
    ) -> None:
        """Start the contender with the values of its placeholders, and bind it to the cores."""
        self.name = contender.name
        self.url = f"http://127.0.0.1:{places['port']}"
        self.process = Process(self.name, self.url, contender.argv(places), {}, log)
        with suppress(ProcessLookupError):  # the process has ended; `wait_until_ready` reports it
            os.sched_setaffinity(self.process.pid, cores)

    def cpu_s(self) -> float:
        """Return the CPU time of the process and its children so far, in seconds."""
        return sum(map(_cpu_s, self._tree()))

    def resident_bytes(self) -> int:
        """Return the sum of the peak memory of the running processes, in bytes."""
        return sum(map(_peak_bytes, self._tree()))

    def _tree(self) -> list[psutil.Process]:
        # Children first: the time of a child that ends meanwhile is then counted in its parent's.
        root = psutil.Process(self.process.pid)
        return [*reversed(root.children(recursive=True)), root]


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:4])  # its own time, and that of children it has waited for
    return 0.0


def _peak_bytes(process: psutil.Process) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


READY_S = 60.0
ROLES = ("encode", "prefill", "decode")
WARM_S = 0.5


@dataclass(frozen=True, slots=True)
class Running:
    """Running contenders, and the URL of their decode engine for the load without a proxy."""

    url: str
    contenders: Sequence[Measured]


class Rig:
    """Test rig that starts the proxies on their own cores, and measures them."""

    def __init__(
        self, contenders: Sequence[Contender], folder: Path, store: str, *, proxy_cores: int
    ) -> None:
        """Prepare the rig without starting a process.

        The load uses the cores beside the `proxy_cores` of a proxy, if there are any.
        """
        cores = sorted(os.sched_getaffinity(0))
        self._theirs = set(cores[:proxy_cores])
        self._ours = set(cores[proxy_cores:] or cores)
        self._contenders = contenders
        self._folder = folder
        self._store = store
        self._seed = 0

    @contextmanager
    def run_contenders(self, *, prefill: bool) -> Iterator[Running]:
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
            processes: list[Process] = []
            stack.callback(stop, (processes, STOP_TIMEOUT_S))
            processes.append(self._engines(ports))
            wait_until_ready(processes, READY_S, _no_report)
            measured: list[Measured] = []
            for contender in self._contenders:
                measured.append(self._start(contender, urls, prefill=prefill))
                processes.append(measured[-1].process)
            wait_until_ready(processes, READY_S, _no_report)
            yield Running(urls["decode"], measured)

    def _engines(self, ports: dict[str, int]) -> Process:
        program = (sys.executable, "-m", "scripts.overhead.engines", "--ec-store", self._store)
        instances = (f"{role}:{port}" for role, port in ports.items())
        url = f"http://127.0.0.1:{ports['decode']}"
        return Process("engines", url, [*program, *instances], {}, self._folder / "engines.log")

    def _start(self, contender: Contender, urls: dict[str, str], *, prefill: bool) -> Measured:
        places = {
            "port": str(free_ports(1)[0]),
            "encode_urls": urls["encode"],
            "prefill_urls": urls["prefill"] if prefill else "disable",
            "decode_urls": urls["decode"],
            "ec_store": self._store,
        }
        return Measured(contender, places, self._folder / f"{contender.name}.log", self._theirs)

    def warm_up(self, scenario: Scenario, measured: Measured) -> None:
        """Put a short load on a contender, to open connections and fill caches, as `measure`."""
        self._turn(measured, scenario, WARM_S)

    def measure(self, scenario: Scenario, measured: Measured, seconds: float) -> Sample:
        """Measure one turn of a contender.

        Raises:
            ProcessDied: the contender has ended.
            TimeoutError: requests got no response.
        """
        before_s = measured.cpu_s()
        outcome = self._turn(measured, scenario, seconds)
        if failed := outcome.failed:
            print(f"{measured.name}: {len(failed)} failed, the first: {failed[0]}", file=sys.stderr)
        return sample(outcome, measured.cpu_s() - before_s, measured.resident_bytes())

    def _turn(self, measured: Measured, scenario: Scenario, seconds: float) -> BenchLoad:
        try:
            return self._put(measured.url, scenario, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{measured.name}: {scenario.title}: {error}") from None
        finally:
            measured.process.check_alive()

    def measure_direct(self, scenario: Scenario, url: str, seconds: float) -> Sample:
        return sample(self._put(url, scenario, seconds), 0.0, 0)

    def _put(self, url: str, scenario: Scenario, seconds: float) -> BenchLoad:
        self._seed += 1  # the pictures of all turns differ
        bodies = iter(Bodies(scenario, self._seed))
        limit_s = None if scenario.once else seconds
        put = partial(load.run, events=scenario.events, seconds=limit_s, connect=scenario.connect)
        gc.collect()
        gc.disable()  # its pauses would be counted as the proxy's
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(put(url, bodies, scenario.clients))
        finally:
            gc.enable()


def _no_report(_: str) -> None:
    """Report no progress: the processes start within a second."""
