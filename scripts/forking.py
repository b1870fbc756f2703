"""Programs that are forked from one process, the fork server, which has imported their modules.

The imports take most of the time in which a program starts. A forked program runs the same code as
an executed one and has its own environment, working directory and standard streams. It differs in
its parent, its command line in /proc, and in what libraries read from the environment at import.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, TypedDict, cast

from epd.tools.up.parent import end_with_parent

MAX_REQUEST_BYTES = 1 << 20

START_TIMEOUT_S = 120.0
"""Longest time that a fork server takes for its imports."""


class Request(TypedDict):
    """Program to fork; its standard output and error come with it as descriptors."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    own_group: bool


class ForkedProgram(subprocess.Popen[str]):
    """Forked program with the interface of `subprocess.Popen`, except `communicate`."""

    def __init__(
        self,
        address: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int | None = None,
        *,
        own_group: bool = False,
    ) -> None:
        """Fork the program.

        Args:
            address: socket of the fork server.
            arguments: command line after the program's name.
            environment: its environment.
            output: descriptor for its standard output and error. Without it, standard output is
                that of this process, and standard error a pipe.
            own_group: whether it gets a process group of its own.
        """
        request = Request(
            arguments=list(arguments),
            environment=dict(environment),
            directory=str(Path.cwd()),
            own_group=own_group,
        )
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self._status, status = os.pipe()
        weakref.finalize(self, os.close, self._status)
        opened = [status]
        if output is None:
            readable, stderr = os.pipe()
            self.stderr = os.fdopen(readable)
            opened.append(stderr)
            outputs = [1, stderr]
        else:
            outputs = [output, output]
        try:
            with _connect(address) as server:
                socket.send_fds(server, [json.dumps(request).encode()], [*outputs, status])
                self.pid = int(server.recv(32))
        finally:
            for descriptor in opened:
                os.close(descriptor)
        self.args = list(arguments)
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or None while the program runs."""
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                # Without a status the server was killed, and nothing waits for its programs.
                self.returncode = int(os.read(self._status, 32) or -signal.SIGKILL)
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
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the program, which is killed after an exception."""
        if self.stderr is not None:
            self.stderr.close()
        if exc_type is not None:
            self.kill()
        self.wait()


def _connect(address: Path) -> socket.socket:
    """Connect to a fork server as soon as it has imported its modules."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            server.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            server.close()
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            return server


def start_server(module: str) -> Path:
    """Start a fork server that ends with this process; return its socket.

    Args:
        module: a module. Its `main` calls `next_program` with the argument of the command line.
    """
    folder = TemporaryDirectory()
    address = Path(folder.name) / "server"
    command = [sys.executable, "-m", module, str(address)]
    # Ctrl-C ends the tests, which then close the standard input.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    stdin = cast("IO[bytes]", process.stdin)
    for last in (folder.cleanup, process.wait, stdin.close):  # the last one runs first
        atexit.register(last)
    return address


def next_program(address: Path) -> Request | None:
    """Fork a program for each request to a socket.

    Returns:
        The request, in the program, which has its streams, directory and environment; None
        in the server at the end of its standard input.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(address))
    listener.listen()
    running: dict[int, int] = {}
    while True:
        for ready in select.select([0, listener.fileno(), *running], [], [])[0]:
            if ready == 0:
                return None
            if ready in running:
                _report_exit(ready, running.pop(ready))
                continue
            client = listener.accept()[0]
            with client, suppress(ConnectionError):  # the client was killed
                request = _fork(client, running)
                if request is not None:
                    listener.close()
                    return request


def _fork(client: socket.socket, running: dict[int, int]) -> Request | None:
    """Fork the program that a client requests; return the request in the program.

    Args:
        client: connection for the request and the number of the program's process.
        running: pipes for the exit statuses of programs, by pidfd.
    """
    data, descriptors, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 3)
    if not data:
        return None
    *outputs, status = descriptors
    request: Request = json.loads(data)
    server = os.getpid()
    pid = os.fork()
    if not pid:
        end_with_parent(server)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((nothing, *outputs)):
            os.dup2(descriptor, number)
        for inherited in (nothing, *descriptors, *running, *running.values()):
            os.close(inherited)
        return _begun(request)
    for descriptor in outputs:
        os.close(descriptor)
    running[os.pidfd_open(pid)] = status
    if request["own_group"]:
        os.setpgid(pid, pid)  # before a client can signal the group
    client.send(b"%d" % pid)
    return None


def _begun(request: Request) -> Request:
    """Give this process, a new program, what a request names."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    return request


def _report_exit(program: int, status: int) -> None:
    """Write the exit status of a program, a pidfd, to its pipe.

    The process number is free for another process only after that.
    """
    ended = cast("os.waitid_result", os.waitid(os.P_PIDFD, program, os.WEXITED | os.WNOWAIT))
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with suppress(BrokenPipeError):  # the test did not wait for the program
        os.write(status, b"%d" % code)
    os.waitid(os.P_PIDFD, program, os.WEXITED)
    os.close(program)
    os.close(status)
