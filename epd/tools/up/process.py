"""Server processes of a fleet: their logs, start and end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from epd.tools.up import parent
from epd.tools.up.engine_ends import end_cause

STOP_TIMEOUT_S = 20.0
POLL_S = 0.25
JOIN_POLL_S = 0.02
PROGRESS_S = 15.0
TAIL_LINES = 25
KILLED_LINES = 3
"""The same for a killed server: its log has no reason."""
KILLED = "the kernel or an operator killed it, most often for lack of memory (see dmesg)"
TAIL_BYTES = 65536
LINE_CHARACTERS = 160
_PROBE = re.compile(r'"GET /(?:health|metrics) HTTP/1\.[01]" 200\b')
"""Lines of an engine's access log for the proxy's probes, about one per second."""


class ProcessDied(Exception):
    """Error of a server that has ended. The message has the last lines of its log."""


class Process:
    """Server in its own process group, so that its children can be stopped with it.

    Only `kill` reaps the server, after its last signal: a reaped process gives up its number, which
    is also the group's, and the kernel may give it to another program.
    """

    def __init__(
        self,
        name: str,
        url: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start the server; `/health` below `url` answers 200 once it is ready.

        `environment` has variables in addition to this process's own. The output is appended to
        `log`. The server gets SIGTERM when the thread that starts it ends, so also when this
        process is killed: start it from the main thread.
        """
        self.name = name
        self.url = url
        self.log = log
        with log.open("ab") as output:
            self._popen: subprocess.Popen[Any] = subprocess.Popen(
                (sys.executable, "-I", parent.__file__, str(os.getpid()), *command),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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
            if code == -signal.SIGKILL:
                end = f"The end of {self.log}:\n{self.tail(KILLED_LINES)}"
                raise ProcessDied(f"{self.name} ended {how}: {KILLED}. {end}")
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

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of the log, without probes that were answered with 200."""
        messages = [line for line in self._last_lines() if not _PROBE.search(line)]
        return "\n".join(messages[-lines:])

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
    start_due: Callable[[set[str]], Sequence[str]] = lambda _ready: (),
    progress_s: float = PROGRESS_S,
) -> None:
    """Wait until all servers are ready, and report their progress every `progress_s` seconds.

    The progress of a server is the last line of its log, reported when it changed.

    `start_due` gets the names of the servers that are ready, adds further ones to `processes`, and
    returns the names of those that it has not started yet. The last server, which waits for the
    others, is reported only when they are ready.

    Raises:
        ProcessDied: a server ended.
        TimeoutError: not all were ready within `timeout_s` seconds.
    """
    started_s = told_s = time.monotonic()
    ready, messages = set[str](), dict[str, str]()
    while True:
        later = start_due(ready)
        for process in processes:
            process.check_alive()
        waiting = [process for process in processes if process.name not in ready]
        now_s = time.monotonic()
        for process in [process for process in waiting if process.is_ready()]:
            waiting.remove(process)
            ready.add(process.name)
            report(f"{process.name} is ready after {now_s - started_s:.0f} s")
        if not waiting and not later:
            return
        if now_s - started_s > timeout_s:
            names = ", ".join([*(process.name for process in waiting), *later])
            ends = (f"The end of {process.log}:\n{process.tail()}" for process in waiting)
            raise TimeoutError("\n".join([f"not ready after {timeout_s:.0f} s: {names}.", *ends]))
        if now_s - told_s >= progress_s:
            told_s = now_s
            for process in waiting if later else waiting[:-1] or waiting:
                if messages.get(process.name) != (message := process.last_message()):
                    messages[process.name] = message
                    report(f"{process.name} after {now_s - started_s:.0f} s: {message}")
        time.sleep(POLL_S)


def stop(*stages: tuple[Sequence[Process], float]) -> None:
    """Stop the servers of each stage and their children, one stage after the other.

    A stage has a number of seconds to end before its servers are killed. A second Ctrl-C ends the
    wait; all servers are then killed.
    """
    try:
        for processes, timeout_s in stages:
            deadline_s = time.monotonic() + timeout_s
            for process in processes:
                process.signal(signal.SIGTERM)
            for process in processes:
                process.join(deadline_s)
    finally:
        for processes, _ in stages:
            for process in processes:
                process.kill()
