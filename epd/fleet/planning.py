"""The servers that settings ask for."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from epd.fleet.devices import assign, overfull
from epd.fleet.engine import TRANSFERS_KV, Engine
from epd.fleet.plan import Plan
from epd.fleet.platforms import PLATFORMS, Platform, detected
from epd.fleet.settings import FleetSettings
from epd.fleet.suitability import needs_bfloat16
from epd.routing.instances import Role

NIXL_STEP = 10
"""Between the handshake ports of two instances: data-parallel ranks take those that follow."""


def platform_of(settings: FleetSettings, environ: Mapping[str, str]) -> Platform:
    """What the instances run on."""
    platform = PLATFORMS[settings.device] if settings.device else detected(environ)
    if platform.affinity is not None and settings.device_affinity_env is not None:
        platform = replace(platform, affinity=settings.device_affinity_env)
    return platform.offline() if Path(settings.model).is_dir() else platform


def planned(
    settings: FleetSettings,
    environ: Mapping[str, str],
    store: str,
    config: Mapping[str, Any] | None = None,
) -> Plan:
    """The servers that settings ask for.

    Args:
        settings: what was asked.
        environ: this process's environment.
        store: URL of the encoder cache, where anything encodes.
        config: the model's configuration, where it is known.

    Raises:
        ValueError: devices or ports do not suffice.
    """
    store = store if Role.ENCODE in settings.topology.roles else ""
    engines = _engines(settings, environ, store, config or {})
    shares = [(engine.devices, engine.memory or 0.0) for engine in engines]
    if (device := overfull(shares)) is not None:
        raise ValueError(
            f"instances want more than all memory of device {device}: "
            "see --gpus and --gpu-memory-utilization-…"
        )
    plan = Plan(
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
    settings: FleetSettings, environ: Mapping[str, str], store: str, config: Mapping[str, Any]
) -> tuple[Engine, ...]:
    platform = platform_of(settings, environ)
    if needs_bfloat16(config):
        platform = platform.in_bfloat16()
    roles = settings.topology.roles
    devices: tuple[tuple[str, ...], ...] = ((),) * len(roles)
    if platform.affinity is not None:
        devices = assign(roles, settings.named_devices(), platform.visible(environ))
    ports = {role: count(first) for role, first in _first_ports(settings).items()}
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
            served_name=settings.served_model_name,
            local_media=settings.allowed_local_media_path,
            memory=_memory(settings, role) if own else None,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            kv_extra=settings.kv_extra(),
            program=settings.vllm_command,
            flags=settings.vllm_flags + _flags(settings, role),
            inherited=environ,
        )
        for role, own in zip(roles, devices, strict=True)
    )


def _first_ports(settings: FleetSettings) -> Mapping[Role, int]:
    return {
        Role.ENCODE: settings.encode_port,
        Role.PREFILL: settings.prefill_port,
        Role.DECODE: settings.decode_port,
        Role.PREFILL_DECODE: settings.prefill_decode_port,
    }


def _memory(settings: FleetSettings, role: Role) -> float:
    return {
        Role.ENCODE: settings.gpu_memory_utilization_e,
        Role.PREFILL: settings.gpu_memory_utilization_p,
        Role.DECODE: settings.gpu_memory_utilization_d,
        Role.PREFILL_DECODE: settings.gpu_memory_utilization_pd,
    }[role]


def _flags(settings: FleetSettings, role: Role) -> tuple[str, ...]:
    return {
        Role.ENCODE: settings.encode_flags,
        Role.PREFILL: settings.prefill_flags,
        Role.DECODE: settings.decode_flags,
        Role.PREFILL_DECODE: settings.decode_flags,
    }[role]
