"""Plan of a fleet: its servers with their ports and devices, derived from the settings. Pure."""

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType

from epd.routing.instances import TRANSFERS_KV, Role
from epd.tools.up.devices import assign
from epd.tools.up.engine import Engine, FleetServer
from epd.tools.up.memory import Memory
from epd.tools.up.model_sizes import ModelSizes
from epd.tools.up.platforms import CPU, CUDA, PLATFORMS, Platform, detect_platform
from epd.tools.up.settings import FleetSettings
from epd.tools.up.vllm_flags import flag_value

ANSWERS = (Role.DECODE, Role.PREFILL_DECODE)
"""Roles of which at least one instance must run: the proxy can serve without the others."""
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
"""Loopback address for a server that listens on all addresses."""

PROXY, STORE = "proxy", "store"
"""Names of the proxy and of the store's service among the servers."""
DRAIN_S = 5
"""Drain time of the proxy in seconds when the fleet stops."""
MOST = 65535
LOOPBACK = "127.0.0.1"
NIXL_STEP = 10
"""Distance of the handshake ports of two instances: data-parallel ranks use the ports between."""


def url_of(host: str, port: int) -> str:
    """Return the base URL of a server, as seen from its machine."""
    host = EVERYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Servers of a fleet.

    Attributes:
        store: URL of the encoder store; empty: there is none.
        keeper_port: port of the service that owns the store's memory, or enforces the quota of its
            folder; None: no service is started.
        memory: lines that say how much of each device's memory the instances get.
    """

    engines: tuple[Engine, ...]
    settings: FleetSettings
    store: str
    keeper_port: int | None = None
    memory: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Base URL of the proxy, as seen from its machine."""
        return url_of(self.settings.host, self.settings.port)

    def of_roles(self, *roles: Role) -> list[Engine]:
        return [engine for engine in self.engines if engine.role in roles]

    def servers(self) -> list[FleetServer]:
        """Return the servers, the proxy last, each after those that it waits for.

        An instance that measures its memory starts alone on its devices, after those that do not.
        All wait for a store that is a server's memory.
        """
        keeper = [] if self.keeper_port is None else [self._keeper(self.keeper_port)]
        first = [STORE] if keeper and self.store.startswith("shm:") else []
        started = dict[str, Engine]()
        servers = []
        for engine in sorted(self.engines, key=lambda engine: engine.measures_memory):
            near = [name for name, other in started.items() if {*engine.devices} & {*other.devices}]
            after = (*first, *(near if engine.measures_memory else ()))
            servers.append(replace(engine.server(), after=after))
            started[engine.name] = engine
        return [*keeper, *servers, self._proxy()]

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
        wanted = [(self.settings.port, self.settings.host, "the proxy")]
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
        return FleetServer(STORE, url_of(LOOPBACK, port), command, {})

    def _proxy(self) -> FleetServer:
        settings = self.settings
        roles = {
            "encode-servers": (Role.ENCODE,),
            "prefill-servers": (Role.PREFILL,),
            "decode-servers": ANSWERS,
        }
        if settings.writes_back and self.of_roles(Role.PREFILL_DECODE):
            encode = {"encode-servers": (Role.ENCODE,)} if self.of_roles(Role.ENCODE) else {}
            roles = {**encode, "servers": (Role.PREFILL_DECODE,)}
        media = settings.allowed_local_media_path
        command = (
            *(sys.executable, "-m", "epd", "serve"),
            *("--host", settings.host, "--port", str(settings.port)),
            *("--drain-delay-s", "0", "--drain-timeout-s", str(DRAIN_S)),
            *(("--ec-store", self.store) if self.store else ()),
            *(() if media is None else ("--allowed-local-media-path", media)),
            *(
                f"--{name}-urls={','.join(engine.url for engine in self.of_roles(*some))}"
                for name, some in roles.items()
            ),
            *self._events_flags(),
            *settings.proxy_flags,
        )
        return FleetServer(PROXY, self.url, command, {})

    def _events_flags(self) -> Sequence[str]:
        publishing = [engine for engine in self.engines if engine.events_address]
        if not publishing:
            return ()
        stage = "prefill" if self.of_roles(Role.PREFILL) else "decode"
        addresses = ",".join(f"{engine.url}={engine.events_address}" for engine in publishing)
        return "--kv-events", f"--{stage}-balance", "content", "--kv-events-addrs", addresses


def _platform(settings: FleetSettings, environ: Mapping[str, str], *, dry_run: bool) -> Platform:
    """Return the platform of the instances.

    Raises:
        ValueError: devices are named, and neither their kind is nor is a device visible.
    """
    platform = PLATFORMS[settings.device] if settings.device else detect_platform(environ)
    if settings.device is None and platform is CPU and settings.named_devices():
        if not dry_run:
            raise ValueError(
                "no NVIDIA device is visible for --gpus: name another kind with --device, add "
                "--dry-run for a plan, or omit --gpus to run on the CPU"
            )
        platform = CUDA
    if platform.affinity is not None and settings.device_affinity_env is not None:
        platform = replace(platform, affinity=settings.device_affinity_env)
    return platform.offline() if Path(settings.model).is_dir() else platform


def plan_fleet(  # noqa: PLR0913 - all that a plan is derived from
    settings: FleetSettings,
    environ: Mapping[str, str],
    store: str,
    *,
    cores: int = 1,
    device_bytes: Mapping[str, int] = MappingProxyType({}),
    sizes: ModelSizes | None = None,
    store_runs: bool = False,
    dry_run: bool = False,
) -> FleetPlan:
    """Return the plan for the settings; raise `ValueError` if devices or ports do not suffice.

    A store is unused without instances that write to it. `cores` is the number of those that the
    instances may use. `device_bytes` has the memory of devices, and `sizes` the bytes of the model,
    as far as they are known. `store_runs` says that the store has a server. With `dry_run`, named
    devices need not be visible: the plan is for CUDA then.
    """
    store = store if settings.topology.uses_store else ""
    platform = _platform(settings, environ, dry_run=dry_run)
    engines = _engines(settings, environ, store, platform, cores)
    if settings.device_memory is not None:
        devices = (device for engine in engines for device in engine.devices)
        device_bytes = dict.fromkeys(devices, settings.device_memory)
    memory = Memory(engines, _given_shares(engines), device_bytes, sizes)
    shares = memory.shares()
    kept = store.startswith(("file:", "shm:"))
    plan = FleetPlan(
        engines=tuple(
            replace(engine, memory=shares.get(engine.name, _default_share(engine)))
            for engine in engines
        ),
        settings=settings,
        store=store,
        keeper_port=settings.ec_store_port if kept and not store_runs else None,
        memory=tuple(memory.lines(shares)),
    )
    plan.ports()
    return plan


def _given_shares(engines: Sequence[Engine]) -> Mapping[str, float]:
    """Return the shares of memory that the operator chose, by name of the instance."""
    given = {engine.name: engine.memory for engine in engines if engine.memory is not None}
    for engine in engines:
        flag = flag_value(engine.flags, "--gpu-memory-utilization")
        if flag is not None and engine.role is not Role.ENCODE:
            with suppress(ValueError):  # vLLM reports it
                given[engine.name] = float(flag)
    return given


def _default_share(engine: Engine) -> float | None:
    """Return the share of an instance to which the plan assigns none; None: vLLM's own.

    Of an encode instance, vLLM only checks that this share is free. The instance may start beside
    another server.
    """
    return 0.01 if engine.role is Role.ENCODE and engine.devices else None


def _engines(
    settings: FleetSettings,
    environ: Mapping[str, str],
    store: str,
    platform: Platform,
    cores: int,
) -> tuple[Engine, ...]:
    roles = settings.topology.roles
    devices: tuple[tuple[str, ...], ...] = ((),) * len(roles)
    if platform.affinity is not None:
        devices = assign(roles, settings.named_devices(), platform.visible_devices(environ))
    share = max(1, cores // len(roles))
    platform = platform.with_cores(share)
    # An encode instance prepares media on its share of the cores. Instances that answer clients
    # keep one API server, which has the state of their stored responses and adapters.
    api_servers = min(platform.api_servers, share)
    by_role = settings.by_role()
    ports = {role: count(of_role.port) for role, of_role in by_role.items()}
    nixl_ports = count(settings.nixl_port, NIXL_STEP)
    return tuple(
        Engine(
            role=role,
            port=next(ports[role]),
            settings=settings,
            store=store,
            platform=platform,
            side_channel_port=next(nixl_ports) if role in TRANSFERS_KV else 0,
            devices=own,
            memory=by_role[role].memory if own else None,
            api_servers=api_servers if role is Role.ENCODE else 1,
            kv_extra=settings.kv_extra(),
            flags=settings.vllm_flags + by_role[role].flags,
            inherited=environ,
        )
        for role, own in zip(roles, devices, strict=True)
    )
