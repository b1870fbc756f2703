"""Context that runs the servers of a fleet."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Self

from epd.tools.up.engine import FleetServer
from epd.tools.up.plan import PROXY, STORE, FleetPlan
from epd.tools.up.process import (
    POLL_S,
    STOP_TIMEOUT_S,
    Process,
    ProcessDied,
    stop,
    wait_until_ready,
)
from epd.tools.up.signals import interrupts_held_back

READY_TIMEOUT_S = 600.0
FRONT_STOP_TIMEOUT_S = 15.0
STORE_STOP_TIMEOUT_S = 5.0

RESTART_S = 1.0
"""Seconds before the first restart of the store's service; they double before each further one,
unless the service ran for longer than `LONGEST_RESTART_S`."""
LONGEST_RESTART_S = 60.0


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

    @property
    def url(self) -> str:
        return self.plan.url

    def __enter__(self) -> Self:
        """Start all servers; raise `ProcessDied` or `TimeoutError` if one does not become ready."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._unstarted = self.plan.servers()
            for server in self._unstarted:
                if server.after:
                    self.report(f"{server.name} starts when {server.condition()}")
            wait_until_ready(self._processes, self.timeout_s, self.report, self._start_due)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def watch(self) -> None:
        """Report each server that ends; raise `ProcessDied` once the fleet cannot answer.

        Only the store's service is started again: engines and the proxy connect to it by
        themselves, and its memory is empty.
        """
        restart_s, due_s, started_s = RESTART_S, inf, time.monotonic()
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
                        if time.monotonic() - started_s > LONGEST_RESTART_S:
                            restart_s = RESTART_S
                        self.report(f"{STORE} is started again in {restart_s:.0f} s")
                        due_s = time.monotonic() + restart_s
                        restart_s = min(LONGEST_RESTART_S, 2 * restart_s)
            if time.monotonic() >= due_s:
                self._start(self.plan.servers()[0])
                due_s, started_s = inf, time.monotonic()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop the proxy, then the engines, then the store, and return after their end.

        The proxy needs a moment to end running streams with an error event. An engine that stops at
        the same time would cut the streams off, or wait for them.
        """
        front = [process for process in self._processes if process.name == PROXY]
        store = [process for process in self._processes if process.name == STORE]
        engines = [process for process in self._processes if process not in front + store]
        stop(
            (front, FRONT_STOP_TIMEOUT_S), (engines, STOP_TIMEOUT_S), (store, STORE_STOP_TIMEOUT_S)
        )
        self._processes.clear()

    def launch(self, server: FleetServer, log: Path) -> Process:
        return Process(server.name, server.url, server.command, server.environment, log)

    def _start_due(self, ready: set[str]) -> list[str]:
        """Start each server that waits for no other one; return the names of the rest.

        The proxy starts last, when nothing else is left to start.
        """
        for server in tuple(self._unstarted):
            if ready.issuperset(server.after) and (
                server.name != PROXY or self._unstarted == [server]
            ):
                self._start(server)
                self._unstarted.remove(server)
        return [server.name for server in self._unstarted]

    def _start(self, server: FleetServer) -> None:
        log = self.logs / f"{server.name}.log"
        self.report(f"starting {server.name}: {server.url}, log in {log}")
        with interrupts_held_back():  # `stop` must know each server that was started
            self._processes.append(self.launch(server, log))

    def _end(self, process: Process) -> None:
        process.kill()
        self._processes.remove(process)
