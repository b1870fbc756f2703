"""Command lines and environments of vLLM instances, by stage and kind of device. No I/O."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd.routing.instances import TRANSFERS_KV, Role
from epd.tools.up.devices import Devices
from epd.tools.up.platforms import Platform
from epd.tools.up.settings import FleetSettings
from epd.tools.up.vllm_flags import flag_value

SPAWNS = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""Setting that `--mm-tensor-ipc torch_shm` needs (`VllmConfig.__post_init__`,
`vllm/config/vllm.py`)."""

RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""vLLM's variable that several API servers refuse (`run_multi_api_server`,
`vllm/entrypoints/cli/serve.py`)."""

FETCHES_ONCE = {"VLLM_MEDIA_FETCH_MAX_RETRIES": "1"}
"""Setting without vLLM's three attempts at a URL, which take 5 s for a host without an address and
110 s for a host that does not answer. The proxy retries where a retry may help."""

KV_BYTES = re.compile(r"--kv[-_]cache[-_]memory[-_]bytes\b")
"""Flag of vLLM that sets the size of the KV cache, which vLLM then does not measure."""


@dataclass(frozen=True, slots=True)
class FleetServer:
    """Server to start; `/health` below its URL answers 200 once it is ready.

    `environment` has variables in addition to the caller's. `name` is also that of the log file.

    Attributes:
        after: names of the servers that must be ready before it starts.
    """

    name: str
    url: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    after: tuple[str, ...] = ()

    def shell(self) -> str:
        """Return the command for a POSIX shell, with one line per flag.

        A comment before it tells what to wait for.
        """
        waits = f"# start it when {self.condition()}\n" if self.after else ""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += map(shlex.quote, self.command)
        lines = (f" \\\n    {word}" if word.startswith("--") else f" {word}" for word in words)
        return waits + "".join(lines).lstrip()

    def condition(self) -> str:
        """Return when it may start."""
        return " and ".join(f"{name} is ready" for name in self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """vLLM instance on this machine, on the loopback address.

    Attributes:
        settings: settings of its fleet.
        store: URL of the shared encoder store; empty: there is none.
        side_channel_port: port of NIXL's handshake, a different one in every instance with NIXL.
        devices: devices that it runs on, if the platform has devices.
        memory: share of the devices' memory that it uses; None: vLLM's default. For an encode
            instance vLLM only checks that it is free.
        api_servers: number of processes of its HTTP API. Each runs the media processor on one
            thread (`BaseRenderer._mm_executor`, `vllm/renderers/base.py`).
        kv_extra: additional settings of its KV connector.
        flags: additional flags; of a repeated flag, vLLM uses the last value.
        inherited: environment of the caller, which takes precedence over the platform's defaults.
    """

    role: Role
    port: int
    settings: FleetSettings
    store: str
    platform: Platform
    side_channel_port: int = 0
    devices: Devices = ()
    memory: float | None = None
    api_servers: int = 1
    kv_extra: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    inherited: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role.value.replace('_', '-')}-{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events_address(self) -> str:
        """Endpoint of its KV events; empty if it publishes none.

        It is a name in the machine's abstract namespace of sockets. vLLM binds a TCP port on all
        addresses only, and events contain the tokens of prompts.
        """
        published = self.settings.kv_events and self.role is not Role.ENCODE
        return f"ipc://@epd-kv-events-{self.port}" if published else ""

    @property
    def transfers_kv(self) -> bool:
        """Whether it sends or receives KV blocks through NIXL."""
        return self.role in TRANSFERS_KV

    @property
    def measures_memory(self) -> bool:
        """Whether it measures how much memory is left for its KV cache while it starts.

        vLLM counts what other processes allocate on the device meanwhile as its own
        (`Worker.determine_available_memory`, `vllm/v1/worker/gpu_worker.py`). An encode instance
        has no KV cache and measures nothing.
        """
        fixed = self.role is Role.ENCODE or any(map(KV_BYTES.match, self.flags))
        return bool(self.devices) and not fixed

    def server(self) -> FleetServer:
        return FleetServer(self.name, self.url, self.command(), self.environment())

    def command(self) -> tuple[str, ...]:
        values: dict[str, Any] = {
            "--served-model-name": self.settings.served_name,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--allowed-local-media-path": self.settings.allowed_local_media_path,
            "--gpu-memory-utilization": self.memory,
            "--max-model-len": self.settings.max_model_len or self.platform.max_model_len,
            "--max-num-seqs": self.settings.max_num_seqs or self.platform.max_num_seqs,
            "--api-server-count": self.api_servers if self.api_servers > 1 else None,
            "--tensor-parallel-size": len(self.devices) if len(self.devices) > 1 else None,
            "--kv-events-config": self._events_config(),
            **self._role_values(),
        }
        given = ((flag, str(value)) for flag, value in values.items() if value is not None)
        return (
            *(*self.settings.vllm_command, "serve", self.settings.model),
            "--enable-request-id-headers",
            *(["--enforce-eager"] if self.role in self.platform.eager else []),
            # An encode instance has no KV cache worth a lookup.
            *(["--no-enable-prefix-caching"] if self.role is Role.ENCODE else []),
            *self.platform.flags,
            *(word for pair in given for word in pair),
            *self.flags,
        )

    def environment(self) -> dict[str, str]:
        """Return the variables that the server needs in addition to the caller's."""
        affinity = self.platform.affinity
        own = {affinity: ",".join(self.devices)} if affinity and self.devices else {}
        defaults = {**FETCHES_ONCE, **self.platform.environment}
        if flag_value(self.flags, "--mm-tensor-ipc") == "torch_shm":
            defaults |= SPAWNS
        if self.api_servers > 1 and RUNTIME_LORA in self.inherited:
            own[RUNTIME_LORA] = "0"  # an encode instance loads no adapters
        if self.transfers_kv:
            own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel_port)
            defaults |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", **self.platform.ucx}
        return own | {name: self.inherited.get(name, value) for name, value in defaults.items()}

    def _events_config(self) -> str | None:
        if not self.events_address:
            return None
        config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        return json.dumps({**config, "endpoint": self.events_address})

    def _role_values(self) -> dict[str, Any]:
        consumer = "ec_both" if self.settings.writes_back else "ec_consumer"
        match self.role:
            case Role.ENCODE:
                tokens = {"--max-num-batched-tokens": self.platform.encode_tokens}
                return tokens | self._ec("ec_producer")
            case Role.PREFILL:
                return self._ec(consumer) | self._kv("kv_producer")
            case Role.DECODE:
                return self._kv("kv_consumer")
            case Role.PREFILL_DECODE:
                return self._ec(consumer)

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
