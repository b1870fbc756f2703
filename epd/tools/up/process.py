"""Server processes of a fleet: their ports, logs, start and end.

Two parts protect against leftover processes. Signals raise `KeyboardInterrupt`, so that contexts
stop their servers, but not between a start and the record of it (`hold_signals`). The guard, a
separate process, ends all servers if this process is killed.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from epd.tools.engine_ends import end_cause
from epd.tools.up import guard

STOP_TIMEOUT_S = 20.0
FRONT_STOP_TIMEOUT_S = 15.0
"""Time for the servers that stop first, such as the proxy."""
STORE_STOP_TIMEOUT_S = 5.0
"""Time for the service of the store, which stops last."""
POLL_S = 0.25
JOIN_POLL_S = 0.02
PROGRESS_S = 15.0
TAIL_LINES = 25
TAIL_BYTES = 65536
LINE_CHARACTERS = 160
_PROBE = re.compile(r'"GET /(?:health|metrics) HTTP/1\.[01]" 200\b')
"""Lines of an engine's access log for the proxy's probes, about one per second."""


class Guard:
    """Process that ends the servers if this process is killed.

    The guard (`guard.py`) waits for the end of a pipe. Linux can end children with their parent
    (PR_SET_PDEATHSIG), but not the engines' own children with them.
    """

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def start(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a process in its own group, which the guard knows before the command runs."""
        pipe = cast("IO[str]", self._popen.stdin).fileno()
        announced = (sys.executable, "-I", guard.__file__, str(pipe), *command)
        return subprocess.Popen(announced, pass_fds=[pipe], start_new_session=True, **options)

    def watch(self, group: int) -> None:
        self._send_line(f"+{group}\n")

    def forget_group(self, group: int) -> None:
        self._send_line(f"-{group}\n")

    def close(self) -> None:
        """End the guard without any action, after all groups have ended."""
        self._popen.kill()
        self._popen.communicate()

    def _send_line(self, line: str) -> None:
        # The guard was killed: the fleet runs without one.
        with suppress(BrokenPipeError):
            print(line, end="", file=self._popen.stdin, flush=True)


class ProcessDied(Exception):
    """Error of a server that has ended. The message has the last lines of its log."""


class Process:
    """Server in its own process group, so that its children can be stopped with it.

    Only `kill` reaps the server, after its last signal: a reaped process gives up its number, which
    is also the group's, and the kernel may give it to another program.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - all that a start needs
        self,
        name: str,
        url: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        guard: Guard | None = None,
    ) -> None:
        """Start the server; `/health` below `url` answers 200 once it is ready.

        `environment` has variables in addition to this process's own. The output is appended to
        `log`. The guard ends the server if this process is killed.
        """
        self.name = name
        self.url = url
        self.log = log
        self._guard = guard
        with log.open("ab") as output:
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
        """Id of the process and of its group."""
        return self._popen.pid

    def check_alive(self) -> None:
        """Raise `ProcessDied` if the server has ended."""
        code = self._exit_code()
        if code is not None:
            how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            cause = end_cause("\n".join(self._last_lines()))
            advice = "" if cause is None else f"\n{self.name}: {cause}."
            end = f"The end of {self.log}:\n{self.tail()}{advice}"
            raise ProcessDied(f"{self.name} ended {how}. {end}")

    def is_ready(self) -> bool:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def has_logged(self, words: str) -> bool:
        """Return whether the log has these words; the cost grows with the log."""
        return words.encode() in self.log.read_bytes()

    def tail(self) -> str:
        """Return the last lines of the log, without probes that were answered with 200."""
        messages = [line for line in self._last_lines() if not _PROBE.search(line)]
        return "\n".join(messages[-TAIL_LINES:])

    def last_message(self) -> str:
        """Return the last line of the log."""
        last = (self._last_lines() or ["its log is empty"])[-1]
        return "".join(filter(str.isprintable, last)).strip()[:LINE_CHARACTERS]

    def _last_lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()

    def join(self, deadline_s: float) -> None:
        """Wait until the server has ended, at most until `deadline_s` on the monotonic clock."""
        while self._exit_code() is None and time.monotonic() < deadline_s:
            time.sleep(JOIN_POLL_S)

    def kill(self) -> None:
        """Send SIGKILL to the server and its children, and wait for the server's end."""
        self.signal(signal.SIGKILL)
        if self._guard is not None:
            self._guard.forget_group(self.pid)
        self._popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its children, unless `kill` has ended them."""
        if self._popen.returncode is None:
            os.killpg(self.pid, number)

    def _exit_code(self) -> int | None:
        """Return the exit code, or minus the signal's number; None while the server runs."""
        code = self._popen.returncode
        if code is None:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            end = os.waitid(os.P_PID, self.pid, how)
            if end is not None:
                code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return code


def wait_until_ready(
    processes: Sequence[Process],
    timeout_s: float,
    report: Callable[[str], None],
    start_due: Callable[[Collection[str]], Sequence[str]] | None = None,
    progress_s: float = PROGRESS_S,
) -> None:
    """Wait until all servers are ready, and report their progress every `progress_s` seconds.

    `start_due` gets the names of the servers that are ready, adds further ones to `processes`, and
    returns the names of those that it has not started yet. The last server, which waits for the
    others, is reported only when they are ready.

    Raises:
        ProcessDied: a server ended.
        TimeoutError: not all were ready within `timeout_s` seconds.
    """
    progress = _Progress(report, progress_s)
    ready = set[str]()
    while True:
        later = start_due(ready) if start_due is not None else ()
        for process in processes:
            process.check_alive()
        waiting = [process for process in processes if process.name not in ready]
        for process in [process for process in waiting if process.is_ready()]:
            waiting.remove(process)
            ready.add(process.name)
            report(f"{process.name} is ready after {progress.seconds:.0f} s")
        if not waiting and not later:
            return
        if progress.seconds > timeout_s:
            names = ", ".join([*(process.name for process in waiting), *later])
            ends = (f"The end of {process.log}:\n{process.tail()}" for process in waiting)
            raise TimeoutError("\n".join([f"not ready after {timeout_s:.0f} s: {names}.", *ends]))
        progress.report_progress(waiting if later else waiting[:-1] or waiting)
        time.sleep(POLL_S)


class _Progress:
    """Progress report of starting servers, every `every_s` seconds, without repetitions."""

    def __init__(self, report: Callable[[str], None], every_s: float) -> None:
        self._report = report
        self._every_s = every_s
        self._started = self._told = time.monotonic()
        self._reported: dict[str, str] = {}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def report_progress(self, waiting: Sequence[Process]) -> None:
        if time.monotonic() - self._told < self._every_s:
            return
        self._told = time.monotonic()
        doing = {process.name: process.last_message() for process in waiting}
        news = {
            name: message for name, message in doing.items() if self._reported.get(name) != message
        }
        for name, message in news.items():
            self._report(f"{name} after {self.seconds:.0f} s: {message}")
        if doing and not news:
            self._report(f"waiting for {', '.join(doing)}: {self.seconds:.0f} s")
        self._reported |= news


def stop(
    processes: Sequence[Process],
    front: Sequence[Process] = (),
    store: Sequence[Process] = (),
    timeout_s: float = STOP_TIMEOUT_S,
) -> None:
    """Stop servers and their children: first those in `front`, which use the others, `store` last.

    `processes` have `timeout_s` seconds to end before they are killed.
    A second Ctrl-C ends the wait; all servers are then killed.
    """
    try:
        _terminate(front, FRONT_STOP_TIMEOUT_S)
        _terminate(processes, timeout_s)
        _terminate(store, STORE_STOP_TIMEOUT_S)
    finally:
        for process in (*front, *processes, *store):
            process.kill()


def _terminate(processes: Sequence[Process], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        process.signal(signal.SIGTERM)
    for process in processes:
        process.join(deadline_s)
