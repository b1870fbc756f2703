"""Plan of a fleet: its servers with their ports and devices, derived from the settings. Pure."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from epd.routing.instances import Role
from epd.tools.fleet.engine import (
    PLATFORMS,
    TRANSFERS_KV,
    Engine,
    FleetServer,
    Platform,
    assign,
    detect_platform,
    overfull_device,
)
from epd.tools.fleet.model_config import needs_bfloat16
from epd.tools.fleet.settings import FleetSettings

ANSWERS = (Role.DECODE, Role.PREFILL_DECODE)
"""Roles of which at least one instance must run: the proxy can serve without the others."""
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
"""Loopback address for a server that listens on all addresses."""

PROXY = "proxy"
"""Name of the proxy among the servers."""
DRAIN_S = 5
"""Drain time of the proxy in seconds when the fleet stops."""
MOST = 65535
LOOPBACK = "127.0.0.1"


def url_of(host: str, port: int) -> str:
    """Return the base URL of a server, as seen from its machine."""
    host = EVERYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Servers of a fleet.

    Attributes:
        store: URL of the encoder store; empty: there is none.
        host, port: address that the proxy listens on.
        keeper_port: port of the service that enforces the store's quota; None: no service is
            started.
    """

    engines: tuple[Engine, ...]
    store: str
    host: str = LOOPBACK
    port: int
    local_media: str | None = None
    proxy_flags: tuple[str, ...] = ()
    keeper_port: int | None = None

    @property
    def url(self) -> str:
        """Base URL of the proxy, as seen from its machine."""
        return url_of(self.host, self.port)

    def of_roles(self, *roles: Role) -> list[Engine]:
        return [engine for engine in self.engines if engine.role in roles]

    def servers(self) -> list[FleetServer]:
        """Return the servers in the order of their start."""
        keeper = [] if self.keeper_port is None else [self._keeper(self.keeper_port)]
        return [*keeper, *(engine.server() for engine in self.engines), self._proxy()]

    def missing_role(self, running: Collection[str]) -> str | None:
        """Return why the fleet cannot answer requests with these servers alone; None: it can."""
        if PROXY not in running:
            return "The proxy has ended"
        if not any(engine.name in running for engine in self.of_roles(*ANSWERS)):
            return "No instance that decodes is left"
        return None

    def ports(self) -> dict[int, tuple[str, str]]:
        """Return the address and the owner's name for each port.

        Raises:
            ValueError: two servers have the same port, or a port is above 65535.
        """
        wanted = [(self.port, self.host, "the proxy")]
        if self.keeper_port is not None:
            wanted.append((self.keeper_port, LOOPBACK, "the store"))
        for engine in self.engines:
            wanted.append((engine.port, LOOPBACK, engine.name))
            if engine.transfers_kv:
                wanted.append((engine.side_channel_port, LOOPBACK, f"NIXL of {engine.name}"))
        owners: dict[int, tuple[str, str]] = {}
        for port, host, owner in wanted:
            if port > MOST:
                raise ValueError(f"{owner}: port {port} is above 65535")
            if port in owners:
                raise ValueError(f"port {port} is assigned to {owners[port][1]} and to {owner}")
            owners[port] = (host, owner)
        return owners

    def _keeper(self, port: int) -> FleetServer:
        command = (sys.executable, "-m", "ec_store", "serve", self.store, "--port", str(port))
        return FleetServer("store", url_of(LOOPBACK, port), command, {})

    def _proxy(self) -> FleetServer:
        roles = {"encode": (Role.ENCODE,), "prefill": (Role.PREFILL,), "decode": ANSWERS}
        media = self.local_media
        command = (
            *(sys.executable, "-m", "epd", "serve", "--host", self.host, "--port", str(self.port)),
            *("--drain-delay-s", "0", "--drain-timeout-s", str(DRAIN_S)),
            *(("--ec-store", self.store) if self.store else ()),
            *(() if media is None else ("--allowed-local-media-path", media)),
            *(
                f"--{stage}-servers-urls={','.join(engine.url for engine in self.of_roles(*some))}"
                for stage, some in roles.items()
            ),
            *self._events_flags(),
            *self.proxy_flags,
        )
        return FleetServer(PROXY, self.url, command, {})

    def _events_flags(self) -> Sequence[str]:
        publishing = [engine for engine in self.engines if engine.events_address]
        if not publishing:
            return ()
        stage = "prefill" if self.of_roles(Role.PREFILL) else "decode"
        addresses = ",".join(f"{engine.url}={engine.events_address}" for engine in publishing)
        return "--kv-events", f"--{stage}-balance", "content", "--kv-events-addrs", addresses


NIXL_STEP = 10
"""Distance of the handshake ports of two instances: data-parallel ranks use the ports between."""


def platform_of(settings: FleetSettings, environ: Mapping[str, str]) -> Platform:
    """Return the platform of the instances."""
    platform = PLATFORMS[settings.device] if settings.device else detect_platform(environ)
    if platform.affinity is not None and settings.device_affinity_env is not None:
        platform = replace(platform, affinity=settings.device_affinity_env)
    return platform.offline() if Path(settings.model).is_dir() else platform


def plan_fleet(
    settings: FleetSettings,
    environ: Mapping[str, str],
    store: str,
    config: Mapping[str, Any] | None = None,
    cores: int = 1,
) -> FleetPlan:
    """Return the plan for the settings; raise `ValueError` if devices or ports do not suffice.

    A store is unused without encode instances. `config` is the model's; None: not known. `cores`
    are those that the instances may use.
    """
    store = store if Role.ENCODE in settings.topology.roles else ""
    engines = _engines(settings, environ, store, config or {}, cores)
    shares = [(engine.devices, engine.memory or 0.0) for engine in engines]
    if (device := overfull_device(shares)) is not None:
        raise ValueError(
            f"instances need more than the whole memory of device {device}: "
            "see --gpus and --gpu-memory-utilization-…"
        )
    plan = FleetPlan(
        engines=engines,
        store=store,
        host=settings.host,
        port=settings.port,
        local_media=settings.allowed_local_media_path,
        proxy_flags=settings.proxy_flags,
        keeper_port=settings.ec_store_port if store.startswith("file:") else None,
    )
    plan.ports()
    return plan


def _engines(
    settings: FleetSettings,
    environ: Mapping[str, str],
    store: str,
    config: Mapping[str, Any],
    cores: int,
) -> tuple[Engine, ...]:
    platform = platform_of(settings, environ)
    if needs_bfloat16(config):
        platform = platform.in_bfloat16()
    roles = settings.topology.roles
    devices: tuple[tuple[str, ...], ...] = ((),) * len(roles)
    if platform.affinity is not None:
        devices = assign(roles, settings.named_devices(), platform.visible_devices(environ))
    # An encode instance prepares media on its share of the cores. Instances that answer clients
    # keep one API server, which has the state of their stored responses and adapters.
    api_servers = max(1, min(platform.api_servers, cores // len(roles)))
    by_role = settings.by_role()
    ports = {role: count(of_role.port) for role, of_role in by_role.items()}
    nixl_ports = count(settings.nixl_port, NIXL_STEP)
    return tuple(
        Engine(
            role=role,
            model=settings.model,
            port=next(ports[role]),
            store=store,
            side_channel_port=next(nixl_ports) if role in TRANSFERS_KV else 0,
            platform=platform,
            devices=own,
            served_name=settings.served_name,
            local_media=settings.allowed_local_media_path,
            memory=by_role[role].memory if own else None,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            api_servers=api_servers if role is Role.ENCODE else 1,
            kv_extra=settings.kv_extra(),
            ec_both=settings.ec_both,
            kv_events=settings.kv_events,
            program=settings.vllm_command,
            flags=settings.vllm_flags + by_role[role].flags,
            inherited=environ,
        )
        for role, own in zip(roles, devices, strict=True)
    )
