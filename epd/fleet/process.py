"""A server process with its children and its log."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from epd.fleet.guarding import Guard

STOP_TIMEOUT_S = 20.0
FRONT_STOP_TIMEOUT_S = 15.0
"""How long those may take that others are stopped after."""
POLL_S = 0.25
PROGRESS_S = 15.0
TAIL_LINES = 25
TAIL_BYTES = 65536
DOING_CHARACTERS = 100
_RECORD = re.compile(
    r"(?:\([^)]*\) )*"  # the process
    r"(?:[A-Z]+ [\d-]+ [\d:]+ (?:\[[^]]*\] )?"  # vLLM's level, time, and place in the source
    r"|[\d-]+T[\d:.]+Z \[\w+ *\] "  # the proxy's
    r"|(?=.*\d%))"  # a progress bar
)
"""What is before the message of a log line that says what its process does."""


_PROBE = re.compile(r'"GET /(?:health|metrics) HTTP/1\.[01]" 200\b')
"""In a line of an engine's access log: the proxy asks so every second or so."""


class ProcessDied(Exception):
    """A process ended that should be serving. Its message holds the end of its log."""


class Process:
    """A server in a process group of its own, so that its children can be stopped with it."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a server is started with
        self,
        name: str,
        url: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        guard: Guard | None = None,
    ) -> None:
        """Start it.

        Args:
            name: what messages call it.
            url: base URL; `/health` under it answers 200 once it serves.
            command: its command line.
            environment: what it needs beside this process's own.
            log: where its output goes.
            guard: ends it if this process is killed.
        """
        self.name = name
        self.url = url
        self.log = log
        with log.open("wb") as output:
            start = partial(subprocess.Popen, start_new_session=True)
            self._popen = (start if guard is None else guard.start)(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        return self._popen.pid

    def check_alive(self) -> None:
        """Raise `ProcessDied` where it has ended."""
        code = self._popen.poll()
        if code is not None:
            how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            raise ProcessDied(f"{self.name} ended {how}. The end of {self.log}:\n{self.tail()}")

    def is_ready(self) -> bool:
        """Whether `/health` answers 200."""
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def tail(self) -> str:
        """Return the last lines of its log, without probes that it answered with 200."""
        told = [line for line in self._last_lines() if not _PROBE.search(line)]
        return "\n".join(told[-TAIL_LINES:])

    def doing(self) -> str:
        """What the last message of its log says, without its time and place in the source."""
        lines = self._last_lines()
        records = (line for line in reversed(lines) if _RECORD.match(line))
        said = _RECORD.sub("", next(records, lines[-1] if lines else "its log is empty"), count=1)
        return "".join(filter(str.isprintable, said)).strip()[:DOING_CHARACTERS]

    def _last_lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()

    def terminate(self) -> None:
        """Ask it and its children to end."""
        self.signal(signal.SIGTERM)

    def join(self, deadline_s: float) -> None:
        """Wait until it has ended, at most until a time on the monotonic clock."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, deadline_s - time.monotonic()))

    def kill(self) -> None:
        """End what is left of it and its children."""
        self.signal(signal.SIGKILL)
        self._popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def wait_until_ready(
    processes: Sequence[Process], timeout_s: float, report: Callable[[str], None]
) -> None:
    """Wait until all of them serve.

    Raises:
        ProcessDied: one ended.
        TimeoutError: they did not serve within `timeout_s` seconds.
    """
    progress = _Progress(report)
    waiting = list(processes)
    while waiting:
        for process in processes:
            process.check_alive()
        for process in [one for one in waiting if one.is_ready()]:
            waiting.remove(process)
            report(f"{process.name} is ready after {progress.seconds:.0f} s")
        if waiting and progress.seconds > timeout_s:
            names = ", ".join(process.name for process in waiting)
            ends = (f"The end of {process.log}:\n{process.tail()}" for process in waiting)
            raise TimeoutError("\n".join([f"not ready after {timeout_s:.0f} s: {names}.", *ends]))
        progress.tell(waiting)
        time.sleep(POLL_S)


class _Progress:
    """Tells every `PROGRESS_S` seconds what those do that are waited for, where it is news."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._started = self._told = time.monotonic()
        self._said: dict[str, str] = {}

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self._started

    def tell(self, waiting: Sequence[Process]) -> None:
        """Report, where it is time."""
        if time.monotonic() - self._told < PROGRESS_S:
            return
        self._told = time.monotonic()
        doing = {process.name: process.doing() for process in waiting}
        news = {name: said for name, said in doing.items() if self._said.get(name) != said}
        for name, said in news.items():
            self._report(f"{name} after {self.seconds:.0f} s: {said}")
        if doing and not news:
            self._report(f"waiting for {', '.join(doing)}: {self.seconds:.0f} s")
        self._said |= news


def stop(processes: Sequence[Process], front: Sequence[Process] = ()) -> None:
    """End all of them at once, with all their children, after those in front.

    A second Ctrl-C does not wait for them, and leaves none behind either.

    Args:
        processes: those to end.
        front: what ends before them, as it still uses them.
    """
    try:
        _terminate(front, FRONT_STOP_TIMEOUT_S)
        _terminate(processes, STOP_TIMEOUT_S)
    finally:
        for process in (*front, *processes):
            process.kill()


def _terminate(processes: Sequence[Process], timeout_s: float) -> None:
    """Ask them to end, and wait until they have, for `timeout_s` seconds at most."""
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(deadline_s)
