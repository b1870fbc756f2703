"""`epd` as a program that is forked from one process that has imported it.

The imports take most of the time in which `epd serve` starts. A forked program runs the same
`main` and has its own environment, working directory and standard streams. It differs from an
executed one in its parent, its command line in /proc, and in what libraries read from the
environment at import.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TypedDict

MAX_REQUEST_BYTES = 1 << 20


class Request(TypedDict):
    """Program to fork; its standard output and error come with it as descriptors."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str


class ForkedProgram(subprocess.Popen[str]):
    """Forked `epd` with the interface of `subprocess.Popen`, except `communicate`."""

    def __init__(self, *arguments: str, environment: Mapping[str, str]) -> None:
        """Fork the program; its standard error is a pipe.

        Args:
            arguments: command line after `epd`.
            environment: its environment.
        """
        request = Request(
            arguments=list(arguments), environment=dict(environment), directory=str(Path.cwd())
        )
        readable, stderr = os.pipe()
        self._status, status = os.pipe()
        server = fork_server()
        try:
            socket.send_fds(server, [json.dumps(request).encode()], [1, stderr, status])
            self.pid = int(server.recv(32))
        finally:
            os.close(stderr)
            os.close(status)
        self.args = ["epd", *arguments]
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = os.fdopen(readable)
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or None while the program runs."""
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = int(os.read(self._status, 32))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the program has ended, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: the program still runs after `timeout` seconds.
        """
        if self.poll() is None:
            select.select([self._status], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal unless the program has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the program, and close the pipes."""
        super().__exit__(exc_type, value, traceback)
        os.close(self._status)


@functools.cache
def fork_server() -> socket.socket:
    """Start the process that has imported `epd`; return the socket for requests to it.

    The process ends with this one.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)  # runs first
    return ours


def next_program(server: socket.socket) -> Request | None:
    """Fork a program for each request; return the request in the program, and None at the end."""
    running: dict[int, int] = {}
    while True:
        for ended in select.select([server.fileno(), *running], [], [])[0]:
            if ended != server.fileno():
                report_exit(ended, running.pop(ended))
                continue
            data, descriptors, _, _ = socket.recv_fds(server, MAX_REQUEST_BYTES, 3)
            if not data:
                return None
            *output, status = descriptors
            pid = os.fork()
            if not pid:
                server.close()
                for number, descriptor in enumerate(output, start=1):
                    os.dup2(descriptor, number)
                for inherited in (*descriptors, *running, *running.values()):
                    os.close(inherited)
                request: Request = json.loads(data)
                return request
            for descriptor in output:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = status
            server.send(b"%d" % pid)


def report_exit(program: int, status: int) -> None:
    """Write the exit status of a program, a pidfd, to its pipe.

    The process number is free for another process only after that.
    """
    ended = os.waitid(os.P_PIDFD, program, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with suppress(BrokenPipeError):  # the test did not wait for the program
        os.write(status, b"%d" % code)
    os.waitid(os.P_PIDFD, program, os.WEXITED)
    os.close(program)
    os.close(status)


def main() -> None:
    """Serve requests; in a forked program, run `epd`."""
    from epd.__main__ import main as epd  # noqa: PLC0415 - only this process needs its import

    # Ctrl-C ends the tests, which then close the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = next_program(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["epd", *request["arguments"]]
    epd()


if __name__ == "__main__":
    main()
