"""Engines and a proxy in front of them, as one context."""

import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import Signals
from types import MappingProxyType, TracebackType
from typing import Self

from epd.fleet.engine import Engine, Topology
from epd.fleet.process import Process, stop, wait_until_ready
from epd.instances import Role

READY_TIMEOUT_S = 600.0
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Stack:
    """A model served by a topology of engines behind a proxy; stopped when the context is left.

    Attributes:
        engines: the engines, once the context is entered.
        url: base URL of the proxy.
        store: URL of the encoder cache.
    """

    def __init__(  # noqa: PLR0913 - what a stack is made of
        self,
        model: Path,
        topology: Topology,
        directory: Path,
        *,
        local_media: Path,
        store: str | None = None,
        flags: Mapping[Role, Sequence[str]] = MappingProxyType({}),
        proxy_flags: Sequence[str] = (),
        report: Callable[[str], None] = print,
    ) -> None:
        """Describe it; entering the context starts it.

        Args:
            model: directory of the model.
            topology: how many engines of each role.
            directory: where logs go, and the encoder cache where it has no URL.
            local_media: folder that file:// media may come from.
            store: URL of the encoder cache.
            flags: more of the command lines of a role's engines.
            proxy_flags: more of the proxy's command line.
            report: is told of progress, a line at a time.
        """
        self.store = store or f"file://{directory.resolve()}/ec-store?max_bytes=1GiB"
        self._proxy_flags = proxy_flags
        self._logs = directory / "logs"
        self._report = report
        self._processes: list[Process] = []
        ports = iter(free_ports(2 * len(topology.roles) + 1))
        self._local_media = local_media
        self._port = next(ports)
        self.engines = tuple(
            Engine(
                role,
                model,
                next(ports),
                self.store,
                local_media,
                next(ports),
                tuple(flags.get(role, ())),
            )
            for role in topology.roles
        )

    @property
    def url(self) -> str:
        """Base URL of the proxy."""
        return f"http://127.0.0.1:{self._port}"

    def of(self, role: Role) -> list[Engine]:
        """The engines of a role."""
        return [engine for engine in self.engines if engine.role is role]

    def __enter__(self) -> Self:
        """Start everything and wait until it serves.

        Raises:
            ProcessDied: one ended meanwhile.
            TimeoutError: one did not serve in time.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            undo.callback(self.stop)
            for engine in self.engines:
                self._start(engine.name, engine.url, engine.command(), engine.environment())
            self._start("proxy", self.url, self._proxy_command(), {})
            wait_until_ready(self._processes, READY_TIMEOUT_S, self._report)
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop everything."""
        self.stop()

    def kill(self, engine: Engine) -> None:
        """End an engine at once, with all its children, as a crash may."""
        process = self._process(engine)
        process.kill()
        self._processes.remove(process)

    def signal(self, engine: Engine, number: Signals) -> None:
        """Send a signal to an engine and all its children."""
        self._process(engine).signal(number)

    def restart(self, engine: Engine) -> None:
        """Start an engine that was killed, and wait until it serves.

        Raises:
            ProcessDied: it ended meanwhile.
            TimeoutError: it did not serve in time.
        """
        self._start(engine.name, engine.url, engine.command(), engine.environment())
        wait_until_ready(self._processes[-1:], READY_TIMEOUT_S, self._report)

    def _process(self, engine: Engine) -> Process:
        [process] = [one for one in self._processes if one.name == engine.name]
        return process

    def check_alive(self) -> None:
        """Raise `ProcessDied` where a process has ended."""
        for process in self._processes:
            process.check_alive()

    def stop(self) -> None:
        """Stop everything, and return when no process is left."""
        stop(self._processes)
        self._processes.clear()

    def _start(
        self, name: str, url: str, command: Sequence[str], environment: dict[str, str]
    ) -> None:
        log = self._logs / f"{name}.log"
        self._report(f"starting {name}: {url}, log in {log}")
        self._processes.append(Process(name, url, command, environment, log))

    def _proxy_command(self) -> list[str]:
        decode = (Role.DECODE, Role.PREFILL_DECODE)
        urls = {
            "--encode-servers-urls": self.of(Role.ENCODE),
            "--prefill-servers-urls": self.of(Role.PREFILL),
            "--decode-servers-urls": [engine for role in decode for engine in self.of(role)],
        }
        return [
            *(sys.executable, "-m", "epd", "serve", "--host", "127.0.0.1"),
            *("--port", str(self._port)),
            *("--drain-delay-s", "0"),
            *("--ec-store", self.store),
            *("--allowed-local-media-path", str(self._local_media)),
            *(
                f"{flag}={','.join(engine.url for engine in engines)}"
                for flag, engines in urls.items()
            ),
            *self._proxy_flags,
        ]


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
