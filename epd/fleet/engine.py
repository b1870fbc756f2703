"""The command line and environment of a vLLM server, by the stage it serves."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from epd.instances import Role

_TOPOLOGY = re.compile(r"(?P<e>[1-9]\d?)e(?:(?P<pd>[1-9]\d?)pd|(?P<p>[1-9]\d?)p(?P<d>[1-9]\d?)d)")

ENVIRONMENT: Mapping[str, str] = {
    # Nothing is fetched and nothing is sent: models are local.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Instances share the cores of one machine: one thread each, bound to none.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "UCX_TLS": "tcp,self,sm,cma",
}
"""Environment of an instance on a CPU."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How many instances serve each stage.

    Attributes:
        roles: the role of each instance.
    """

    roles: tuple[Role, ...]

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a name such as `1e1pd` or `2e1p2d`.

        Raises:
            ValueError: it is no such name.
        """
        match = _TOPOLOGY.fullmatch(name.lower())
        if match is None:
            raise ValueError(f"{name!r} is not a topology such as 1e1pd or 1e1p1d")
        counts = {
            Role.ENCODE: match["e"],
            Role.PREFILL: match["p"],
            Role.DECODE: match["d"],
            Role.PREFILL_DECODE: match["pd"],
        }
        return cls(tuple(role for role, count in counts.items() for _ in range(int(count or 0))))


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM server on this machine's CPU.

    Attributes:
        role: the stage it serves.
        model: directory of the model; its name is the model's served name.
        port: port of its API, on the loopback address.
        store: URL of the shared encoder cache.
        local_media: folder that file:// media may come from.
        side_channel_port: port of NIXL's handshake, its own in every instance.
        flags: more of the command line; where a flag is given twice, vLLM takes the last one.
    """

    role: Role
    model: Path
    port: int
    store: str
    local_media: Path
    side_channel_port: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What progress lines and its log file call it."""
        return f"{self.role.value.replace('_', '-')}-{self.port}"

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """The command line."""
        flags: dict[str, Any] = {
            "--served-model-name": self.model.name,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--allowed-local-media-path": self.local_media,
            # In bfloat16 vLLM picks an AMX attention kernel where the CPU has AMX, which dies of an
            # illegal instruction in a process that has run no large matrix product yet: in a
            # decode instance, whose prompts come through NIXL.
            "--dtype": "float32",
            "--max-model-len": 4096,
            "--max-num-seqs": 16,
            **self._role_flags(),
        }
        return [
            sys.executable,
            *("-m", "vllm.entrypoints.cli.main", "serve", str(self.model)),
            *("--enforce-eager", "--enable-request-id-headers"),
            *(str(word) for flag in flags.items() for word in flag),
            # An encode instance keeps no KV cache worth looking into.
            *(["--no-enable-prefix-caching"] if self.role is Role.ENCODE else []),
            *self.flags,
        ]

    def environment(self) -> dict[str, str]:
        """The environment it needs beside the caller's."""
        return {**ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port)}

    def _role_flags(self) -> dict[str, Any]:
        match self.role:
            case Role.ENCODE:
                return self._ec("ec_producer") | {"--max-num-batched-tokens": 16384}
            case Role.PREFILL:
                return self._ec("ec_consumer") | _kv("kv_producer")
            case Role.DECODE:
                return _kv("kv_consumer")
            case Role.PREFILL_DECODE:
                return self._ec("ec_consumer")

    def _ec(self, role: str) -> dict[str, str]:
        config = {
            "ec_connector": "ECStoreConnector",
            "ec_connector_module_path": "ec_store.vllm_connector",
            "ec_role": role,
            "ec_connector_extra_config": {"store": self.store},
        }
        return {"--ec-transfer-config": json.dumps(config)}


def _kv(role: str) -> dict[str, str]:
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return {"--kv-transfer-config": json.dumps(config)}
