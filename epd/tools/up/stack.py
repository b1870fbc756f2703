"""Context that runs the servers of a fleet."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from epd.routing.instances import Role
from epd.tools.up.engine import Engine, FleetServer
from epd.tools.up.plan import PROXY, STORE, FleetPlan
from epd.tools.up.platforms import CPU
from epd.tools.up.ports import free_ports
from epd.tools.up.process import POLL_S, Guard, Process, ProcessDied, stop, wait_until_ready
from epd.tools.up.settings import Topology
from epd.tools.up.signals import hold_signals

READY_TIMEOUT_S = 600.0

RESTART_S = 1.0
"""Seconds before the first restart of the store's service; they double before each further one."""
LONGEST_RESTART_S = 60.0
"""Upper bound of them. A service that has run for longer is restarted as at first."""


@dataclass(slots=True)
class Restarts:
    """Time of the next restart of a server that has ended. Times are monotonic seconds."""

    due_s: float = inf
    _started_s: float = -inf
    _delay_s: float = RESTART_S

    def end(self, now_s: float) -> float:
        """Return in how many seconds a server that has ended now is started again."""
        if now_s - self._started_s > LONGEST_RESTART_S:
            self._delay_s = RESTART_S
        delay_s, self._delay_s = self._delay_s, min(LONGEST_RESTART_S, 2 * self._delay_s)
        self.due_s = now_s + delay_s
        return delay_s

    def start(self, now_s: float) -> None:
        """Note that the server has been started."""
        self.due_s, self._started_s = inf, now_s


@dataclass(eq=False)
class Fleet:
    """Running servers, stopped at the end of the context or of this process.

    Entering the context starts them, with a log per server in `logs`. `timeout_s` limits the time
    until all are ready; `report` receives progress lines.
    """

    plan: FleetPlan
    logs: Path
    timeout_s: float = READY_TIMEOUT_S
    report: Callable[[str], None] = print
    _processes: list[Process] = field(default_factory=list, init=False)
    _unstarted: list[FleetServer] = field(default_factory=list, init=False)
    _guard: Guard | None = field(default=None, init=False)
    _restarts: Restarts = field(default_factory=Restarts, init=False)

    @property
    def all_engines(self) -> tuple[Engine, ...]:
        return self.plan.engines

    @property
    def store(self) -> str:
        return self.plan.store

    @property
    def url(self) -> str:
        return self.plan.url

    def of_role(self, role: Role) -> list[Engine]:
        return self.plan.of_roles(role)

    def __enter__(self) -> Self:
        """Start all servers; raise `ProcessDied` or `TimeoutError` if one does not become ready."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._guard = Guard()
            self._unstarted = self.plan.servers()
            for server in self._unstarted:
                if server.after:
                    conditions = " and ".join(other.condition() for other in server.after)
                    self.report(f"{server.name} starts when {conditions}")
            wait_until_ready(self._processes, self.timeout_s, self.report, self._start_due)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self, engine: Engine) -> None:
        """Kill an engine with all its children, as a crash may."""
        self._end(self.process_of(engine))

    def restart(self, engine: Engine) -> None:
        """Start an engine that was killed; fail as the start of the fleet does."""
        self._start(engine.server())
        wait_until_ready(self._processes[-1:], self.timeout_s, self.report)

    def process_of(self, engine: Engine) -> Process:
        [process] = [process for process in self._processes if process.name == engine.name]
        return process

    def check_alive(self) -> None:
        """Raise `ProcessDied` if a server has ended."""
        for process in self._processes:
            process.check_alive()

    def watch(self) -> None:
        """Report each server that ends; raise `ProcessDied` once the fleet cannot answer.

        Only the store's service is started again: engines and the proxy connect to it by
        themselves, and its memory is empty.
        """
        while True:
            for process in tuple(self._processes):
                try:
                    process.check_alive()
                except ProcessDied as death:
                    self._end(process)
                    lacking = self.plan.missing_role([process.name for process in self._processes])
                    if lacking is not None:
                        raise ProcessDied(f"{death}\n{lacking}: stopping all servers.") from None
                    self.report(f"{death}\nThe other servers continue without {process.name}.")
                    if process.name == STORE:
                        delay_s = self._restarts.end(time.monotonic())
                        self.report(f"{STORE} is started again in {delay_s:.0f} s")
            if time.monotonic() >= self._restarts.due_s:
                self._start(self.plan.servers()[0])
                self._restarts.start(time.monotonic())
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop the proxy, then the engines, then the store, and return after their end.

        The proxy needs a moment to end running streams with an error event. An engine that stops at
        the same time would cut the streams off, or wait for them.
        """
        front = [process for process in self._processes if process.name == PROXY]
        store = [process for process in self._processes if process.name == STORE]
        stop([process for process in self._processes if process not in front + store], front, store)
        self._processes.clear()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def launch(self, server: FleetServer, log: Path) -> Process:
        return Process(
            server.name, server.url, server.command, server.environment, log, self._guard
        )

    def _start_due(self, ready: Collection[str]) -> list[str]:
        """Start each server that no other one keeps waiting; return the names of the rest.

        The proxy starts last, when nothing else is left to start.
        """
        for server in tuple(self._unstarted):
            due = all(self._has_settled(other, ready) for other in server.after)
            if due and (server.name != PROXY or self._unstarted == [server]):
                self._start(server)
                self._unstarted.remove(server)
        return [server.name for server in self._unstarted]

    def _has_settled(self, server: FleetServer, ready: Collection[str]) -> bool:
        """Return whether a server has started and allocates no more memory of its device."""
        return server.name in ready or any(
            process.has_logged(server.settled)
            for process in self._processes
            if process.name == server.name and server.settled
        )

    def _start(self, server: FleetServer) -> None:
        log = self.logs / f"{server.name}.log"
        self.report(f"starting {server.name}: {server.url}, log in {log}")
        with hold_signals():
            self._processes.append(self.launch(server, log))

    def _end(self, process: Process) -> None:
        process.kill()
        self._processes.remove(process)


class Stack(Fleet):
    """Fleet for a model in a directory, on this machine's CPU and on free ports."""

    def __init__(  # noqa: PLR0913 - all that a stack depends on
        self,
        model: Path,
        topology: Topology,
        directory: Path,
        *,
        local_media: Path,
        store: str | None = None,
        kv_extra: Mapping[str, Any] = MappingProxyType({}),
        ec_both: bool = False,
        kv_events: bool = False,
        flags: Mapping[Role, Sequence[str]] = MappingProxyType({}),
        proxy_flags: Sequence[str] = (),
        report: Callable[[str], None] = print,
    ) -> None:
        """Describe the stack; entering the context starts it.

        `directory` is for logs, and for the encoder store if `store` is None; a store is unused
        without instances that write to it. The last part of `model` is the served name. With
        `kv_events`, the proxy follows the engines' KV events. `report` receives the progress, and
        `proxy_flags` are for `epd serve`. The other options are those of `Engine`.
        """
        store = store or f"file://{directory.resolve()}/ec-store?max_bytes=1GiB"
        store = store if topology.uses_store else ""
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
                ec_both=ec_both or topology.local,
                kv_events=kv_events,
                flags=tuple(flags.get(role, ())),
            )
            for role, api, side_channel in zip(topology.roles, ports[::2], ports[1::2], strict=True)
        )
        plan = FleetPlan(
            engines=tuple(engines),
            store=store,
            port=port,
            local_media=str(local_media),
            proxy_flags=tuple(proxy_flags),
        )
        super().__init__(plan, directory / "logs", report=report)
