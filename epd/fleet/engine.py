"""The command line and environment of a vLLM server, by the stage it serves."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd.fleet.devices import Devices
from epd.fleet.platforms import BINDING, CPU, UNBOUND, Platform
from epd.fleet.server import Server
from epd.routing.instances import Role

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""The `vllm` command of the environment that this process runs in."""


DIVIDING = re.compile(r"-(tp|pp|dp|dcp|pcp|n)\b|--(.*parallel|nnodes|config\b)")
"""vLLM's flags by which an instance has several ranks, or may have."""

TRANSFERS_KV = frozenset({Role.PREFILL, Role.DECODE})


FETCHES_ONCE = {"VLLM_MEDIA_FETCH_MAX_RETRIES": "1"}
"""A URL that cannot be fetched is reported at once, and not after vLLM's own three tries (5 s for a
host without an address, 110 s for one that does not answer). The proxy repeats what may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A vLLM server on this machine, which the proxy alone reaches.

    Attributes:
        role: the stage it serves.
        model: directory of the model, or its name on the hub.
        port: port of its API, on the loopback address.
        store: URL of the shared encoder cache; empty: there is none.
        side_channel_port: port of NIXL's handshake, its own in every instance that has one.
        platform: what it runs on.
        devices: the devices it runs on, where the platform has any.
        served_name: what requests call the model; none: as it is named here.
        local_media: folder that file:// media may come from.
        memory: part of the devices' memory that it takes; none: vLLM's own choice.
        max_model_len, max_num_seqs: tokens of a request, requests at once; none: the platform's.
        kv_extra: more of what the KV connector is told.
        program: what starts vLLM.
        flags: more of the command line; where a flag is given twice, vLLM takes the last one.
        inherited: the caller's environment, which goes before the platform's defaults.
    """

    role: Role
    model: str
    port: int
    store: str
    side_channel_port: int = 0
    platform: Platform = CPU
    devices: Devices = ()
    served_name: str | None = None
    local_media: str | None = None
    memory: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_extra: Mapping[str, Any] = field(default_factory=dict)
    program: tuple[str, ...] = VLLM
    flags: tuple[str, ...] = ()
    inherited: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What progress lines and its log file call it."""
        return f"{self.role.value.replace('_', '-')}-{self.port}"

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def transfers_kv(self) -> bool:
        """Whether it sends or gets KV cache, through NIXL."""
        return self.role in TRANSFERS_KV

    def server(self) -> Server:
        """What is started."""
        return Server(self.name, self.url, self.command(), self.environment())

    def command(self) -> tuple[str, ...]:
        """The command line."""
        values: dict[str, Any] = {
            "--served-model-name": self.served_name,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--allowed-local-media-path": self.local_media,
            "--gpu-memory-utilization": self.memory,
            "--max-model-len": self.max_model_len or self.platform.max_model_len,
            "--max-num-seqs": self.max_num_seqs or self.platform.max_num_seqs,
            "--tensor-parallel-size": len(self.devices) if len(self.devices) > 1 else None,
            "--distributed-executor-backend": self._executor(),
            **self._role_values(),
        }
        given = ((flag, str(value)) for flag, value in values.items() if value is not None)
        return (
            *(*self.program, "serve", self.model),
            "--enable-request-id-headers",
            *(["--enforce-eager"] if self.role in self.platform.eager else []),
            # An encode instance keeps no KV cache worth looking into.
            *(["--no-enable-prefix-caching"] if self.role is Role.ENCODE else []),
            *self.platform.flags,
            *(word for pair in given for word in pair),
            *self.flags,
        )

    def environment(self) -> dict[str, str]:
        """The environment it needs beside the caller's."""
        affinity = self.platform.affinity
        own = {affinity: ",".join(self.devices)} if affinity and self.devices else {}
        defaults = {**FETCHES_ONCE, **self.platform.environment}
        if self.transfers_kv:
            own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel_port)
            defaults |= self.platform.ucx
        return own | {name: self.inherited.get(name, value) for name, value in defaults.items()}

    def _executor(self) -> str | None:
        """What runs its model; None: vLLM's own choice, as of one that is divided, or bound."""
        divided = len(self.devices) > 1 or any(DIVIDING.match(flag) for flag in self.flags)
        bound = self.environment().get(BINDING, UNBOUND) != UNBOUND
        return None if divided or bound else self.platform.executor

    def _role_values(self) -> dict[str, Any]:
        match self.role:
            case Role.ENCODE:
                tokens = {"--max-num-batched-tokens": self.platform.encode_tokens}
                return tokens | self._ec("ec_producer")
            case Role.PREFILL:
                return self._ec("ec_consumer") | self._kv("kv_producer")
            case Role.DECODE:
                return self._kv("kv_consumer")
            case Role.PREFILL_DECODE:
                return self._ec("ec_consumer")

    def _ec(self, role: str) -> dict[str, str]:
        if not self.store:
            return {}
        config = {
            "ec_connector": "ECStoreConnector",
            "ec_connector_module_path": "ec_store.vllm_connector",
            "ec_role": role,
            "ec_connector_extra_config": {"store": self.store},
        }
        return {"--ec-transfer-config": json.dumps(config)}

    def _kv(self, role: str) -> dict[str, str]:
        config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": role}
        if self.platform.kv_buffer is not None:
            config["kv_buffer_device"] = self.platform.kv_buffer
        if self.kv_extra:
            config["kv_connector_extra_config"] = dict(self.kv_extra)
        return {"--kv-transfer-config": json.dumps(config)}
