"""A server process with its children and its log.

Ports that nobody listens on.

Signals that ask this process to end: they leave its contexts, but not amid a step.

The guard of a fleet, seen from the process that starts it.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import IO, Any, cast
from urllib.parse import urlsplit

from epd.tools.fleet import guard

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on, all different.

    They lie below the range that the kernel hands out, from which vLLM's processes take theirs
    while they start. vLLM listens with SO_REUSEPORT: two instances given one port would share it
    without a word.
    """
    first_ephemeral = int(EPHEMERAL_PORTS.read_text().split()[0])
    candidates = range(max(1024, first_ephemeral - 16384), first_ephemeral)
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(candidates, len(candidates)):
            one = held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"no {count} free ports in {candidates}")


def check_free(host: str, port: int) -> None:
    """Raise `OSError` where the address cannot be listened on now."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as one:
        # What another server's connections left behind is not in the way.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_contexts_on_signals() -> None:
    """Have them raise `KeyboardInterrupt`: whatever ends this process must end its servers too."""
    # A shell starts what it runs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    # nohup: the terminal's end is not this one's.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _as_ctrl_c)


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    # A loop of asyncio has a handler of its own for that one, as what is raised in a callback is
    # lost.
    signal.raise_signal(signal.SIGINT)


@contextmanager
def held() -> Iterator[None]:
    """Keep them until the context is left; what they do, they do then.

    A process that was started, and of which nobody has taken note yet, would be left behind. They
    are not blocked, as processes that are started would have them blocked for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python's handlers run in the main thread alone
        return
    came: list[int] = []

    def keep(number: int, _: FrameType | None) -> None:
        came.append(number)

    handlers = {number: signal.getsignal(number) for number in ENDING}
    kept = {it: how for it, how in handlers.items() if how not in {signal.SIG_IGN, None}}
    for number in kept:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class Guard:
    """Ends what this process started, should it be killed and have no chance to.

    It is a process of its own (`guard.py`) that waits for the end of a pipe. Linux could end
    children with their parent (PR_SET_PDEATHSIG), but not the engines' own children with them.
    """

    def __init__(self) -> None:
        """Start it."""
        self._popen = subprocess.Popen(
            [sys.executable, "-I", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def start(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a process that leads a group, which the guard knows of before the command runs.

        Args:
            command: its command line.
            options: for `subprocess.Popen`.
        """
        pipe = cast("IO[str]", self._popen.stdin).fileno()
        announced = (sys.executable, "-I", guard.__file__, str(pipe), *command)
        return subprocess.Popen(announced, pass_fds=[pipe], start_new_session=True, **options)

    def watch(self, group: int) -> None:
        """End this process group too."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """It has ended."""
        self._say(f"-{group}\n")

    def delete(self, folder: Path) -> None:
        """Delete a folder too, an absolute path, once they have ended."""
        self._say(f"{folder}\n")

    def close(self) -> None:
        """All groups have ended: the guard ends without doing anything."""
        self._popen.kill()
        self._popen.communicate()

    def _say(self, line: str) -> None:
        # Whoever killed the guard wants none.
        with suppress(BrokenPipeError):
            print(line, end="", file=self._popen.stdin, flush=True)


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
