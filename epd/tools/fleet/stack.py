"""The servers of a fleet, as one context."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from types import MappingProxyType, TracebackType
from typing import Any, Self

from epd.routing.instances import Role
from epd.tools.fleet.engine import CPU, Engine, Server
from epd.tools.fleet.plan import PROXY, Plan
from epd.tools.fleet.process import (
    POLL_S,
    Guard,
    Process,
    ProcessDied,
    free_ports,
    held,
    stop,
    wait_until_ready,
)
from epd.tools.fleet.settings import Topology

READY_TIMEOUT_S = 600.0


class Fleet:
    """Running servers; stopped when the context is left, or when this process is gone.

    Attributes:
        plan: the servers.
    """

    def __init__(
        self,
        plan: Plan,
        logs: Path,
        *,
        timeout_s: float = READY_TIMEOUT_S,
        report: Callable[[str], None] = print,
    ) -> None:
        """Describe it; entering the context starts it.

        Args:
            plan: the servers.
            logs: folder of their logs, a file each; it is made.
            timeout_s: how long they may take to serve.
            report: is told of progress, a line at a time.
        """
        self.plan = plan
        self._logs = logs
        self._timeout_s = timeout_s
        self._report = report
        self._processes: list[Process] = []
        self._guard: Guard | None = None

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The vLLM instances."""
        return self.plan.engines

    @property
    def store(self) -> str:
        """URL of the encoder cache; empty: there is none."""
        return self.plan.store

    @property
    def url(self) -> str:
        """Base URL of the proxy."""
        return self.plan.url

    def of(self, role: Role) -> list[Engine]:
        """The engines of a role."""
        return self.plan.of(role)

    def __enter__(self) -> Self:
        """Start everything and wait until it serves.

        Raises:
            ProcessDied: one ended meanwhile.
            TimeoutError: one did not serve in time.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._guard = Guard()
            for server in self.plan.servers():
                self._start(server)
            wait_until_ready(self._processes, self._timeout_s, self._report)
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
        self._end(self.process_of(engine))

    def signal(self, engine: Engine, number: Signals) -> None:
        """Send a signal to an engine and all its children."""
        self.process_of(engine).signal(number)

    def restart(self, engine: Engine) -> None:
        """Start an engine that was killed, and wait until it serves.

        Raises:
            ProcessDied: it ended meanwhile.
            TimeoutError: it did not serve in time.
        """
        self._start(engine.server())
        wait_until_ready(self._processes[-1:], self._timeout_s, self._report)

    def process_of(self, engine: Engine) -> Process:
        """Return the process of an engine that runs."""
        [process] = [one for one in self._processes if one.name == engine.name]
        return process

    def check_alive(self) -> None:
        """Raise `ProcessDied` where a process has ended."""
        for process in self._processes:
            process.check_alive()

    def watch(self) -> None:
        """Report each process that ends, and return never but by an error.

        Raises:
            ProcessDied: without this one, no request is answered any more.
        """
        while True:
            for process in tuple(self._processes):
                try:
                    process.check_alive()
                except ProcessDied as death:
                    self._end(process)
                    lacking = self.plan.lacking([one.name for one in self._processes])
                    if lacking is not None:
                        raise ProcessDied(f"{death}\n{lacking}: everything stops.") from None
                    self._report(f"{death}\nThe others go on without {process.name}.")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop the proxy, then everything else, and return when no process is left.

        Streams that run end in an error event, for which the proxy needs a moment. An engine that
        is asked to end meanwhile would cut them off, or wait for them.
        """
        front = [one for one in self._processes if one.name == PROXY]
        stop([one for one in self._processes if one not in front], front)
        self._processes.clear()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def launch(self, server: Server, log: Path) -> Process:
        """Start the process of a server; its output goes to `log`."""
        return Process(
            server.name, server.url, server.command, server.environment, log, self._guard
        )

    def _start(self, server: Server) -> None:
        log = self._logs / f"{server.name}.log"
        self._report(f"starting {server.name}: {server.url}, log in {log}")
        with held():
            process = self.launch(server, log)
            self._processes.append(process)

    def _end(self, process: Process) -> None:
        process.kill()
        self._processes.remove(process)
        if self._guard is not None:
            self._guard.forget(process.pid)


class Stack(Fleet):
    """A model in a directory, served on this machine's CPU by a topology, on free ports."""

    def __init__(  # noqa: PLR0913 - what a stack is made of
        self,
        model: Path,
        topology: Topology,
        directory: Path,
        *,
        local_media: Path,
        store: str | None = None,
        kv_extra: Mapping[str, Any] = MappingProxyType({}),
        flags: Mapping[Role, Sequence[str]] = MappingProxyType({}),
        proxy_flags: Sequence[str] = (),
        report: Callable[[str], None] = print,
    ) -> None:
        """Describe it; entering the context starts it.

        Args:
            model: directory of the model; its name is the model's served name.
            topology: how many engines of each role.
            directory: where logs go, and the encoder cache where it has no URL.
            local_media: folder that file:// media may come from.
            store: URL of the encoder cache, where anything encodes.
            kv_extra: more of what the KV connectors are told.
            flags: more of the command lines of a role's engines.
            proxy_flags: more of the proxy's command line.
            report: is told of progress, a line at a time.
        """
        store = store or f"file://{directory.resolve()}/ec-store?max_bytes=1GiB"
        store = store if Role.ENCODE in topology.roles else ""
        port, *ports = free_ports(2 * len(topology.roles) + 1)
        engines = (
            Engine(
                role=role,
                model=str(model),
                served_name=model.name,
                port=api,
                store=store,
                side_channel_port=side_channel,
                platform=CPU.offline(),
                local_media=str(local_media),
                kv_extra=kv_extra,
                flags=tuple(flags.get(role, ())),
            )
            for role, api, side_channel in zip(topology.roles, ports[::2], ports[1::2], strict=True)
        )
        plan = Plan(
            engines=tuple(engines),
            store=store,
            port=port,
            local_media=str(local_media),
            proxy_flags=tuple(proxy_flags),
        )
        super().__init__(plan, directory / "logs", report=report)
