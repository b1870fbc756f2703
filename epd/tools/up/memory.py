"""Division of a device's memory among the instances that share it. No I/O.

vLLM takes a share of a device's memory and measures what is left of it for the KV cache. It does
neither for an encode instance, so the plan leaves room for its weights and its largest step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor

from ec_store.config import size_text
from epd.routing.instances import Role
from epd.tools.up.engine import Engine
from epd.tools.up.model_sizes import ModelSizes
from epd.tools.up.vllm_flags import flag_value

VLLM_SHARE = 0.92
"""vLLM's default of `--gpu-memory-utilization` (`CacheConfig`, `vllm/config/cache.py`)."""

ENCODE_SHARE = 0.1
"""Assumed share of an encode instance if its size, or that of the device, is not known."""

CONTEXT_BYTES = 2**30
"""Assumed memory of a process on a device beside its tensors: context, kernels, libraries."""

CHANGING_WEIGHTS = ("--quantization", "-q", "--cpu-offload-gb")
"""Flags of vLLM with which the weights on a device are smaller than in the checkpoint:
their size is not known then."""

WEIGHTS = "weights"
STEPS = 1000
"""Shares are multiples of 1 / STEPS."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that an instance needs of each of its devices, at least.

    Attributes:
        share: share of the device's memory.
        parts: bytes by purpose; empty: not known.
        given: whether the operator chose the share.
    """

    share: float
    parts: Mapping[str, float] = field(default_factory=dict)
    given: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a fleet's devices.

    Attributes:
        engines: instances of the fleet.
        given: shares that the operator chose, by name of the instance.
        device_bytes: memory of the devices that are known.
        sizes: sizes of the model; None: not known.
    """

    engines: Sequence[Engine]
    given: Mapping[str, float]
    device_bytes: Mapping[str, int]
    sizes: ModelSizes | None

    def shares(self) -> Mapping[str, float]:
        """Return the shares of the instances that share a device, and those given, by name.

        The others use vLLM's own. An instance of several devices gets the least of its shares.

        Raises:
            ValueError: the instances of a device need more than its memory; the message has the
                sum.
        """
        shares = dict(self.given)
        for device in self._devices():
            for name, share in self._shares_of(device).items():
                shares[name] = min(share, shares.get(name, 1.0))
        return shares

    def lines(self, shares: Mapping[str, float]) -> Sequence[str]:
        """Return lines that say how much of each device the instances get."""
        lines = [self._line(device, shares) for device in self._devices()]
        return [*lines, self._note()] if lines else []

    def _note(self) -> str:
        if not self.device_bytes:
            return "shares of the devices' memory; --device-memory 80GiB plans in GiB"
        if self.sizes is None:
            return "the sizes of the model are not known: shares of encode instances are assumed"
        weights = "weights are estimates from config.json, " if self.sizes.estimated else ""
        return f"{weights}activations and CUDA are estimates"

    def _devices(self) -> Sequence[str]:
        return list(dict.fromkeys(device for engine in self.engines for device in engine.devices))

    def _users(self, device: str) -> Sequence[Engine]:
        return [engine for engine in self.engines if device in engine.devices]

    def _shares_of(self, device: str) -> Mapping[str, float]:
        """Return the shares of the instances that divide what the others leave of a device."""
        users = self._users(device)
        needs = {engine.name: self._need(engine, device) for engine in users}
        growing = [
            engine.name
            for engine in users
            if engine.role is not Role.ENCODE and not needs[engine.name].given
        ]
        divided = bool(growing) and len(users) > 1
        free = (VLLM_SHARE if divided else 1.0) - sum(need.share for need in needs.values())
        if free < -1 / STEPS or (divided and free < 1 / STEPS):
            raise ValueError(self._refusal(device, needs))
        if not divided:
            return {}
        # What a process has on a device beside its tensors is outside of vLLM's share.
        return {
            name: _rounded(self._weights_share(needs[name], device) + free / len(growing))
            for name in growing
        }

    def _weights_share(self, need: Need, device: str) -> float:
        weights = need.parts.get(WEIGHTS, 0.0)
        return weights / self.device_bytes[device] if weights else 0.0

    def _need(self, engine: Engine, device: str) -> Need:
        encodes = engine.role is Role.ENCODE
        total, sizes = self.device_bytes.get(device), self.sizes
        if engine.name in self.given:
            return Need(self.given[engine.name], given=True)
        tokens = _count(engine, "--max-num-batched-tokens")
        changed = any(flag_value(engine.flags, flag) is not None for flag in CHANGING_WEIGHTS)
        if total is None or sizes is None or (not tokens * sizes.token if encodes else changed):
            return Need(ENCODE_SHARE if encodes else 0.0)
        ranks = len(engine.devices)
        parts: dict[str, float] = {WEIGHTS: sizes.weights / ranks}
        if encodes:
            step = f"a step of {tokens} tokens"
            parts = {"encoder": sizes.encoders / ranks, step: tokens * sizes.token}
        parts["CUDA"] = CONTEXT_BYTES * _processes(engine)
        return Need(sum(parts.values()) / total, parts)

    def _line(self, device: str, shares: Mapping[str, float]) -> str:
        users = (self._use(engine, device, shares) for engine in self._users(device))
        return f"device {self._device(device)}: {'; '.join(users)}"

    def _use(self, engine: Engine, device: str, shares: Mapping[str, float]) -> str:
        need = self._need(engine, device)
        if engine.role is Role.ENCODE and not need.given:
            return self._listed(engine.name, device, need)
        if engine.name not in shares:
            return f"{self._listed(engine.name, device, Need(VLLM_SHARE))}, vLLM's own share"
        return self._listed(engine.name, device, replace(need, share=shares[engine.name]))

    def _refusal(self, device: str, needs: Mapping[str, Need]) -> str:
        total = Need(sum(need.share for need in needs.values()))
        each = "; ".join(self._listed(name, device, need) for name, need in needs.items())
        if self.sizes is not None and self.sizes.estimated and device in self.device_bytes:
            each += "; weights are estimates from config.json"
        return (
            f"{self._listed('instances need', device, total)} of the memory of device "
            f"{self._device(device)}: {each}. Use more devices (--gpus), a smaller step "
            "(--encode-flags '--max-num-batched-tokens N'), or choose shares "
            "(--gpu-memory-utilization-…)"
        )

    def _device(self, device: str) -> str:
        size_bytes = self.device_bytes.get(device)
        return device if size_bytes is None else f"{device}, {size_text(size_bytes)}"

    def _listed(self, name: str, device: str, need: Need) -> str:
        """Return a name with what it needs of a device, in bytes if the device's are known."""
        size_bytes = self.device_bytes.get(device)
        amount = f"{need.share:.3g}" if size_bytes is None else size_text(need.share * size_bytes)
        parts = ", ".join(f"{what} {size_text(size)}" for what, size in need.parts.items())
        return f"{name} {amount}" + (f" ({parts})" if parts else "")


def _rounded(share: float) -> float:
    return floor(share * STEPS + 1e-6) / STEPS


def _count(engine: Engine, flag: str) -> int:
    """Return the number in a flag of an engine; 0: it has none in digits, as in `16k`."""
    value = flag_value(engine.command(), flag) or ""
    return int(value) if value.isdecimal() else 0


def _processes(engine: Engine) -> int:
    """Return the number of an engine's processes on a device.

    With `--mm-tensor-ipc torch_shm` the API servers of an encode instance prepare media there.
    """
    if flag_value(engine.command(), "--mm-tensor-ipc") != "torch_shm":
        return 1
    return 1 + (_count(engine, "--api-server-count") or 1)
