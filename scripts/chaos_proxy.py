"""Proxy that `chaos.py` runs in one or several processes: their resources, and kills of workers."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import psutil
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from epd.observe.metric_defs import BODY_BYTES, IN_FLIGHT, INSTANCE_REQUESTS, INSTANCE_UP, QUEUED
from epd.observe.metric_sums import load
from epd.shared_page import PageUnreadable, SharedPage
from epd.tools.up.process import Process
from scripts.chaos_fleet import ENVIRONMENT, READY_S, wait_for
from scripts.chaos_load import MOST_TOLD

STOPPED_S = 5.0
ENDS_WITHIN_S = 10.0
"""Time for which workers may outlive the process that started them, in seconds."""

PAGE_S = 3.0
"""Time after a scrape until every worker has written its metrics page, in seconds, on a busy
machine."""

SURPRISES = ("Traceback", "never retrieved", "was destroyed but it is pending")

UNDER_WAY = {metric.name for metric in (BODY_BYTES, IN_FLIGHT, INSTANCE_REQUESTS, QUEUED)}
"""Gauges that are 0 while no request is served."""

CHAT = {"path": "/v1/chat/completions", "status": "200"}
FIRST_PROCESS = "first process"

Page = Mapping[str, Metric]
"""Metrics of one process, by the names of their families."""


@dataclass(frozen=True)
class Cut:
    """Record of a worker's kill.

    Attributes:
        at_s: time on the loop's clock, in seconds.
        ports: clients' ports of the connections that the worker had accepted.
    """

    at_s: float
    ports: frozenset[int]


class Proxy:
    """Process of `epd serve`, with or without workers.

    Attributes:
        url: base URL.
        killable: workers that may be killed: all but the first one, so that its memory and
            descriptors cover the whole run.
        cuts: kills of workers so far.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, workers: int) -> None:
        """Start the proxy with its log as JSON lines."""
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._process = Process("proxy", self.url, command, ENVIRONMENT, log)
        self._count = workers
        self._serving = _Serving(log)
        self.cuts: list[Cut] = []
        self.killable = [Worker(self, number, port) for number in range(2, workers + 1)]

    async def ready(self) -> None:
        """Wait until all processes serve.

        Raises:
            TimeoutError: a worker did not serve within `READY_S`.
        """
        await wait_for(self._process)
        deadline_s = time.monotonic() + READY_S
        while self._count > 1 and len(self.processes) <= self._count:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"of {self._count} workers, only {list(self.processes)} serve")
            await asyncio.sleep(0.05)

    def check_alive(self) -> None:
        """Raise `ProcessDied` if the proxy has ended."""
        self._process.check_alive()

    @property
    def processes(self) -> Mapping[str, int]:
        """Return the process ids, by the names of the processes."""
        if self._count == 1:
            return {"proxy": self._process.pid}
        workers = {f"worker {number}": pid for number, pid in self._serving.workers().items()}
        return {FIRST_PROCESS: self._process.pid, **workers}

    def rss_mb(self) -> Mapping[tuple[str, int], float]:
        """Return the resident memory of each process in MB, by name and pid."""
        found = {}
        for name, pid in self.processes.items():
            with suppress(psutil.NoSuchProcess):  # just killed
                found[name, pid] = psutil.Process(pid).memory_info().rss / 2**20
        return found

    def fds(self) -> Mapping[str, int]:
        return {name: psutil.Process(pid).num_fds() for name, pid in self.processes.items()}

    async def pages(self) -> Mapping[str, Page]:
        """Return the metrics of each serving process, at most a few seconds old."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.url}/metrics", raise_for_status=True) as reply,
        ):
            page = await reply.text()
        if self._count == 1:
            return {"proxy": _by_name(text_string_to_metric_families(page))}
        await asyncio.sleep(PAGE_S)
        pages = dict(zip(self._workers(), _metrics_pages(self._process.pid), strict=False))
        return {name: _by_name(load(orjson.loads(found))) for name, found in pages.items()}

    def _workers(self) -> list[str]:
        return [f"worker {number}" for number in range(1, self._count + 1)]

    def surprises(self) -> list[str]:
        """Return log lines that no fault explains: tracebacks and unretrieved errors."""
        with self._log.open(encoding="utf-8", errors="replace") as log:
            return [line[:MOST_TOLD] for line in log if any(word in line for word in SURPRISES)]

    def stop(self) -> list[str]:
        """Kill the proxy; return the workers that outlived it, which are killed too."""
        workers = {name: pid for name, pid in self.processes.items() if name.startswith("worker")}
        self._process.kill()
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while any(map(_lives, workers.values())) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        left = [name for name, pid in workers.items() if _lives(pid)]
        for name in left:
            with suppress(ProcessLookupError):
                os.kill(workers[name], signal.SIGKILL)
        return left


class Worker:
    """Serving process, one of several, as a target of kills."""

    role, kinds = "worker", ("kill",)

    def __init__(self, proxy: Proxy, number: int, port: int) -> None:
        self.name = f"worker {number}"
        self._proxy, self._port = proxy, port

    @asynccontextmanager
    async def broken(self, _: str) -> AsyncIterator[None]:
        """Kill the worker; at the end of the context, wait until its replacement serves."""
        pid = self._proxy.processes[self.name]
        self._proxy.cuts.append(self._kill(pid))
        yield
        async with asyncio.timeout(READY_S):
            while self._proxy.processes[self.name] == pid:
                self._proxy.check_alive()
                await asyncio.sleep(0.05)

    def _kill(self, pid: int) -> Cut:
        """Stop the worker, record its connections, and kill it: it accepts no more in between."""
        os.kill(pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + STOPPED_S
        while (
            psutil.Process(pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline_s
        ):
            time.sleep(0.0005)
        cut = Cut(asyncio.get_running_loop().time(), _accepted(pid, self._port))
        os.kill(pid, signal.SIGKILL)
        return cut


def under_way(pages: Mapping[str, Page]) -> list[str]:
    """Return the gauges that are not 0 without a request, by process."""
    return [
        f"{process}: {sample.name}{sample.labels or ''} {sample.value:g}"
        for process, page in pages.items()
        for name in sorted(UNDER_WAY & page.keys())
        for sample in page[name].samples
        if sample.value
    ]


def not_asked_by(pages: Mapping[str, Page]) -> list[str]:
    return [
        f"{sample.labels} by {process}"
        for process, page in pages.items()
        for sample in page[INSTANCE_UP.name].samples
        if not sample.value
    ]


def answered(page: Page) -> float:
    """Return the number of chat requests that a process has answered."""
    samples = page["epd_requests"].samples if "epd_requests" in page else ()
    return sum(sample.value for sample in samples if CHAT.items() <= sample.labels.items())


class _Serving:
    """Process ids of the workers, read from the growing log."""

    def __init__(self, log: Path) -> None:
        self._log, self._at = log, 0
        self._pids: dict[int, int] = {}

    def workers(self) -> Mapping[int, int]:
        with self._log.open("rb") as log:
            log.seek(self._at)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                if b'"serving"' in line:
                    record = orjson.loads(line)
                    self._pids[record["worker"]] = record["pid"]
        return self._pids


def _by_name(families: Iterable[Metric]) -> Page:
    return {family.name: family for family in families}


def _metrics_pages(pid: int) -> list[bytes]:
    """Return the contents of the shared pages with metrics, in the order of their descriptors."""
    pages = []
    folder = Path(f"/proc/{pid}/fd")
    for path in sorted(folder.iterdir(), key=lambda path: int(path.name)):
        if not str(path.readlink()).startswith("/memfd:epd"):
            continue
        with closing(SharedPage(os.open(path, os.O_RDONLY))) as page, suppress(PageUnreadable):
            found = page.read()
            if found and found.startswith(b'[["epd_'):
                pages.append(found)
    return pages


def _accepted(pid: int, port: int) -> frozenset[int]:
    """Return the clients' ports of the connections that a process has accepted at a port."""
    found = psutil.Process(pid).net_connections("tcp")
    accepted = (each for each in found if each.status != psutil.CONN_LISTEN)
    return frozenset(each.raddr.port for each in accepted if each.laddr.port == port)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False
