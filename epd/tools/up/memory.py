"""Division of a device's memory among the instances that share it. No I/O.

vLLM takes a share of a device's memory and measures what is left of it for the KV cache. It does
neither for an encode instance, so the plan leaves a share for it.
"""

from collections.abc import Mapping, Sequence
from math import floor

from epd.routing.instances import Role
from epd.tools.up.engine import Engine

VLLM_SHARE = 0.92
"""vLLM's default of `--gpu-memory-utilization` (`CacheConfig`, `vllm/config/cache.py`)."""

ENCODE_SHARE = 0.1
"""Assumed share of an encode instance."""

STEPS = 1000
"""Shares are multiples of 1 / STEPS."""


def device_shares(engines: Sequence[Engine], given: Mapping[str, float]) -> Mapping[str, float]:
    """Return the shares of the instances that share a device, and those `given`, by name.

    The others use vLLM's own. An instance of several devices gets the least of its shares.

    Raises:
        ValueError: the instances of a device need more than its memory; the message has the sum.
    """
    shares = dict(given)
    for device, users in _users(engines).items():
        needs = {engine.name: given.get(engine.name, _assumed(engine)) for engine in users}
        growing = [name for name, need in needs.items() if not need]
        divided = bool(growing) and len(users) > 1
        free = (VLLM_SHARE if divided else 1.0) - sum(needs.values())
        if free < -1 / STEPS or (divided and free < 1 / STEPS):
            raise ValueError(_refusal(device, needs))
        if divided:
            share = floor(free / len(growing) * STEPS + 1e-6) / STEPS
            shares |= {name: min(share, shares.get(name, 1.0)) for name in growing}
    return shares


def memory_lines(engines: Sequence[Engine], shares: Mapping[str, float]) -> Sequence[str]:
    """Return lines that say how much of each device the instances get."""
    lines = [
        f"device {device}: {'; '.join(_listed(engine, shares) for engine in users)}"
        for device, users in _users(engines).items()
    ]
    if any(engine.role is Role.ENCODE and engine.name not in shares for engine in engines):
        lines.append(
            "the share of an encode instance is assumed: --gpu-memory-utilization-e sets another"
        )
    return lines if engines[0].devices else []


def _users(engines: Sequence[Engine]) -> Mapping[str, Sequence[Engine]]:
    devices = dict.fromkeys(device for engine in engines for device in engine.devices)
    return {
        device: [engine for engine in engines if device in engine.devices] for device in devices
    }


def _assumed(engine: Engine) -> float:
    return ENCODE_SHARE if engine.role is Role.ENCODE else 0.0


def _listed(engine: Engine, shares: Mapping[str, float]) -> str:
    share = shares.get(engine.name, _assumed(engine))
    return f"{engine.name} {share:.3g}" if share else f"{engine.name} {VLLM_SHARE}, vLLM's own"


def _refusal(device: str, needs: Mapping[str, float]) -> str:
    each = "; ".join(f"{name} {need:.3g}" for name, need in needs.items())
    return (
        f"instances need {sum(needs.values()):.3g} of the memory of device {device}: {each}. Use "
        "more devices (--gpus), or choose other shares (--gpu-memory-utilization-…)"
    )
