"""Fleet of `epd up` that scripts and tests start, with engines that they kill and start again."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from epd.routing.instances import Role
from epd.tools.up.engine import Engine
from epd.tools.up.plan import plan_fleet
from epd.tools.up.ports import check_free
from epd.tools.up.process import Process, wait_until_ready
from epd.tools.up.settings import FleetSettings
from epd.tools.up.stack import Fleet
from epd.tools.up.topology import Topology
from scripts.ports import free_ports


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
        flags: Mapping[Role, Sequence[str]] = MappingProxyType({}),
        report: Callable[[str], None] = print,
        **settings: Any,
    ) -> None:
        """Describe the stack; entering the context starts it.

        `directory` is for logs, and for the encoder store if `store` is None; a store is unused
        without instances that write to it. `kv_extra` and `flags` are those of `Engine`, `settings`
        those of `epd up`. `report` receives the progress.
        """
        port, *ports = free_ports(2 * len(topology.roles) + 1)
        given = FleetSettings(
            model=str(model),
            topology=topology,
            device="cpu",
            port=port,
            allowed_local_media_path=str(local_media),
            **settings,
        )
        store = store or f"file://{directory.resolve()}/ec-store?max_bytes=1GiB"
        plan = plan_fleet(given, {}, store, store_runs=True)
        engines = (
            replace(
                engine,
                port=api,
                side_channel_port=side_channel,
                kv_extra=kv_extra,
                flags=tuple(flags.get(engine.role, ())),
            )
            for engine, api, side_channel in zip(plan.engines, ports[::2], ports[1::2], strict=True)
        )
        super().__init__(replace(plan, engines=tuple(engines)), directory / "logs", report=report)

    @property
    def all_engines(self) -> tuple[Engine, ...]:
        return self.plan.engines

    @property
    def store(self) -> str:
        return self.plan.store

    def of_role(self, role: Role) -> list[Engine]:
        return self.plan.of_roles(role)

    def kill(self, engine: Engine) -> None:
        """Kill an engine with all its children, as a crash may."""
        self._end(self.process_of(engine))

    def restart(self, engine: Engine) -> None:
        """Start an engine that was killed; fail as the start of the fleet does."""
        self._wait_for_port(engine)
        self._start(engine.server())
        wait_until_ready(self._processes[-1:], self.timeout_s, self.report)

    def _wait_for_port(self, engine: Engine) -> None:
        """Wait until the port is free: children that were killed may have it a moment longer."""
        deadline_s = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline_s:
            try:
                check_free("127.0.0.1", engine.port)
            except OSError:
                time.sleep(0.05)
            else:
                return

    def process_of(self, engine: Engine) -> Process:
        [process] = [process for process in self._processes if process.name == engine.name]
        return process

    def check_alive(self) -> None:
        """Raise `ProcessDied` if a server has ended."""
        for process in self._processes:
            process.check_alive()
