"""A server process with its children and its log."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

STOP_TIMEOUT_S = 20.0
POLL_S = 0.25
PROGRESS_S = 15.0
TAIL_LINES = 25


class ProcessDied(Exception):
    """A process ended that should be serving. Its message holds the end of its log."""


class Process:
    """A server in a process group of its own, so that its children can be stopped with it."""

    def __init__(
        self,
        name: str,
        url: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start it.

        Args:
            name: what messages call it.
            url: base URL; `/health` under it answers 200 once it serves.
            command: its command line.
            environment: what it needs beside this process's own.
            log: where its output goes.
        """
        self.name = name
        self.url = url
        self.log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        return self._popen.pid

    def check_alive(self) -> None:
        """Raise `ProcessDied` where it has ended."""
        code = self._popen.poll()
        if code is not None:
            raise ProcessDied(
                f"{self.name} ended with code {code}. The end of {self.log}:\n{self.tail()}"
            )

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
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

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
    started = time.monotonic()
    reported = started
    waiting = list(processes)
    while waiting:
        for process in processes:
            process.check_alive()
        for process in [one for one in waiting if one.is_ready()]:
            waiting.remove(process)
            report(f"{process.name} is ready after {time.monotonic() - started:.0f} s")
        now = time.monotonic()
        names = ", ".join(process.name for process in waiting)
        if waiting and now - started > timeout_s:
            raise TimeoutError(f"not ready after {timeout_s:.0f} s: {names}\n{waiting[0].tail()}")
        if waiting and now - reported > PROGRESS_S:
            report(f"waiting for {names}: {now - started:.0f} s")
            reported = now
        time.sleep(POLL_S)


def stop(processes: Sequence[Process]) -> None:
    """End all of them at once, with all their children.

    A second Ctrl-C does not wait for them, and leaves none behind either.
    """
    try:
        for process in processes:
            process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            process.join(deadline_s)
    finally:
        for process in processes:
            process.kill()
