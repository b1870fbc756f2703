"""Command lines and environments of vLLM instances, by stage and kind of device."""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Self

from epd.routing.instances import TRANSFERS_KV, Role
from epd.tools.fleet.model_config import flag_value


@dataclass(frozen=True, slots=True)
class FleetServer:
    """Server to start; `/health` below its URL answers 200 once it is ready.

    `environment` has variables in addition to the caller's. `name` is also that of the log file.

    Attributes:
        settled: words of its log that appear once it allocates no more memory of its device; empty:
            it has done so when it is ready.
        after: servers that must have settled before it starts.
    """

    name: str
    url: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    settled: str = ""
    after: "tuple[FleetServer, ...]" = ()

    def shell(self) -> str:
        """Return the command for a POSIX shell, with one line per flag.

        Comments before it tell what to wait for.
        """
        waits = "".join(f"# start it when {server.condition()}\n" for server in self.after)
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += map(shlex.quote, self.command)
        lines = (f" \\\n    {word}" if word.startswith("--") else f" {word}" for word in words)
        return waits + "".join(lines).lstrip()

    def condition(self) -> str:
        """Return when the next server of its devices may start."""
        return f"{self.name} logs '{self.settled}'" if self.settled else f"{self.name} is ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Kind of device, and what a vLLM instance needs on it.

    Attributes:
        affinity: variable with the devices that a process sees; None: there are no devices.
        files: pattern below /dev that matches one file per device.
        environment: variables of every instance, unless the caller has set them.
        ucx: the same for instances with NIXL.
        executor: vLLM's executor for an instance with one rank; None: vLLM's default.
        eager: roles that run without captured graphs.
        encode_tokens: maximum tokens in a step of an encode instance.
        api_servers: maximum API servers of an encode instance.
        kv_buffer: device of NIXL's transfer buffer; None: vLLM's default.
        max_model_len, max_num_seqs: default limits; None: vLLM's defaults.
    """

    name: str
    affinity: str | None = None
    files: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    ucx: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    executor: str | None = None
    eager: frozenset[Role] = frozenset({Role.ENCODE, Role.PREFILL})
    # The largest picture of Qwen2-VL to Qwen3-VL. See docs/decisions/040-preparing-media.md.
    encode_tokens: int = 16384
    api_servers: int = 4
    kv_buffer: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None

    def offline(self) -> Self:
        """Return the platform for a model in a directory: vLLM accesses no hub."""
        return replace(self, environment={**OFFLINE, **self.environment})

    def in_bfloat16(self) -> Self:
        """Return the platform for a model that a CPU computes only in bfloat16."""
        words = (BFLOAT16 if word == FLOAT32 else word for word in self.flags)
        return replace(self, flags=tuple(words))

    def with_cores(self, cores: int) -> Self:
        """Return the platform for instances that have this number of cores each."""
        if THREADS not in self.environment:
            return self
        return replace(self, environment={**self.environment, THREADS: str(cores)})

    def visible_devices(
        self, environ: Mapping[str, str], dev: Path = Path("/dev")
    ) -> tuple[str, ...]:
        """Return the devices of this machine, or those that the caller's environment allows."""
        if self.affinity is None:
            return ()
        if (named := environ.get(self.affinity)) is not None:
            return tuple(device for word in named.split(",") if (device := word.strip()))
        return tuple(map(str, range(len(list(dev.glob(self.files))))))


FLOAT32, BFLOAT16 = "float32", "bfloat16"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
UCX = {"UCX_TLS": "all", "UCX_NET_DEVICES": "all"}

THREADS = "OMP_NUM_THREADS"
"""Variable with the number of threads that compute a model on a CPU."""

BINDING, UNBOUND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"
"""vLLM's variable for the cores that a process with a model on a CPU is bound to, and the value
for no cores."""

CUDA_UCX = {**UCX, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""Settings with which UCX reads the memory of another process's GPU directly. By default it does so
only with NVLink, and otherwise copies through the host at some 0.5 GB/s
(docs/decisions/039-kv-transfers-on-one-host.md)."""

CUDA = Platform(name="cuda", affinity="CUDA_VISIBLE_DEVICES", files="nvidia[0-9]*", ucx=CUDA_UCX)
XPU = Platform(name="xpu", affinity="ZE_AFFINITY_MASK", files="dri/renderD*", ucx=UCX)
CPU = Platform(
    name="cpu",
    environment={
        # Instances share the cores of one machine, and are bound to none.
        THREADS: "1",
        BINDING: UNBOUND,
        "VLLM_CPU_KVCACHE_SPACE": "1",
    },
    ucx={"UCX_TLS": "tcp,self,sm,cma"},
    # In bfloat16, on a CPU with AMX, vLLM uses an AMX attention kernel. The kernel dies of an
    # illegal instruction in a process that has run no large matrix product yet. A decode instance
    # is such a process: its prompts arrive through NIXL.
    flags=("--dtype", FLOAT32),
    # The model runs in the engine's own process, as on a GPU. On a CPU, vLLM's default is another
    # process, which it binds to cores. These instances are bound to no cores, and one process less
    # saves a third of the start time and 0.7 GB.
    executor="vllm.v1.executor.uniproc_executor.UniProcExecutor",
    eager=frozenset(Role),
    # See docs/decisions/040-preparing-media.md.
    encode_tokens=4096,
    api_servers=1,
    kv_buffer="cpu",
    max_model_len=4096,
    max_num_seqs=16,
)
PLATFORMS: Mapping[str, Platform] = {platform.name: platform for platform in (CUDA, XPU, CPU)}


def detect_platform(environ: Mapping[str, str], dev: Path = Path("/dev")) -> Platform:
    """Return CUDA if an NVIDIA device is visible, otherwise the CPU."""
    return CUDA if CUDA.visible_devices(environ, dev) else CPU


Devices = tuple[str, ...]
"""Devices of one instance; its tensors are divided over them."""

LETTERS = {"e": Role.ENCODE, "p": Role.PREFILL, "d": Role.DECODE, "pd": Role.PREFILL_DECODE}
_DEVICE = re.compile(r"[\w./-]+", re.ASCII)


def parse(text: str) -> Mapping[Role, tuple[Devices, ...]]:
    """Read `e=0,p=1,d=2+3`: `+` joins devices of one instance, `:` or a second `e=` starts another.

    A text of another form raises `ValueError`.
    """
    named: dict[Role, tuple[Devices, ...]] = {}
    for word in text.split(","):
        letters, equals, instances = word.partition("=")
        role = LETTERS.get(letters.strip().lower())
        if role is None or not equals:
            raise ValueError(f"{word!r} is not of the form e=0, pd=1 or d=2+3")
        named[role] = (*named.get(role, ()), *parse_instances(instances))
    return named


def parse_instances(text: str) -> tuple[Devices, ...]:
    """Read `0:1` (two instances) or `2+3` (one on two devices); raise `ValueError` otherwise."""
    instances = tuple(
        tuple(device.strip() for device in instance.split("+")) for instance in text.split(":")
    )
    for devices in instances:
        if not all(map(_DEVICE.fullmatch, devices)) or len(set(devices)) != len(devices):
            raise ValueError(f"{text!r} is not of the form 0, 0:1 (two instances) or 2+3")
    return instances


def assign(
    roles: Sequence[Role], named: Mapping[Role, Sequence[Devices]], visible: Sequence[str]
) -> tuple[Devices, ...]:
    """Return the devices of each instance: those named for its role, or one of the others in turn.

    Encode instances use little of a device, so they share those that are left if each other
    instance gets a device.

    Raises:
        ValueError: devices are named for another number of instances than a role has, or an
            instance needs a device and none is visible.
    """
    for role, instances in named.items():
        if len(instances) != roles.count(role):
            raise ValueError(
                f"devices are named for {len(instances)} {role} instances, the topology has "
                f"{roles.count(role)}"
            )
    taken = {device for several in named.values() for devices in several for device in devices}
    others = [device for device in visible if device not in taken] or list(visible)
    if not others and not set(roles) <= named.keys():
        raise ValueError("no device is visible: name devices with --gpus, or use --device cpu")
    given = {role: iter(instances) for role, instances in named.items()}
    unnamed = [role for role in roles if role not in named]
    encoders = unnamed.count(Role.ENCODE)
    spare = max(0, min(encoders, len(others) - (len(unnamed) - encoders)))
    turns = cycle(others[spare:])
    encode_turns = cycle(others[:spare]) if spare else turns
    return tuple(
        next(given[role])
        if role in given
        else (next(encode_turns if role is Role.ENCODE else turns),)
        for role in roles
    )


VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""`vllm` command of this process's Python environment."""

DIVIDING = re.compile(r"-(tp|pp|dp|dcp|pcp|n)\b|--(.*parallel|nnodes|config\b)")
"""Flags of vLLM that give an instance several ranks, or may do so."""

SPAWNS = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""Setting that `--mm-tensor-ipc torch_shm` needs (`VllmConfig.__post_init__`,
`vllm/config/vllm.py`)."""

RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""vLLM's variable that several API servers refuse (`run_multi_api_server`,
`vllm/entrypoints/cli/serve.py`)."""

FETCHES_ONCE = {"VLLM_MEDIA_FETCH_MAX_RETRIES": "1"}
"""Setting without vLLM's three attempts at a URL, which take 5 s for a host without an address and
110 s for a host that does not answer. The proxy retries where a retry may help."""

SETTLED = "init engine (profile, create kv cache, warmup model) took"
"""Words that vLLM logs when the KV cache and the CUDA graphs of an instance are allocated
(`EngineCore._initialize_kv_caches`, `vllm/v1/engine/core.py`)."""

SEVERAL_ENGINES = re.compile(r"-(dp|n)\b|--(data[-_]parallel|nnodes|config\b)")
"""Flags of vLLM that give an instance several engines, each of which logs `SETTLED`."""

KV_BYTES = re.compile(r"--kv[-_]cache[-_]memory[-_]bytes\b")
"""Flag of vLLM that sets the size of the KV cache, which vLLM then does not measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """vLLM instance on this machine, on the loopback address.

    Attributes:
        model: directory of the model, or its name on the hub.
        store: URL of the shared encoder store; empty: there is none.
        side_channel_port: port of NIXL's handshake, a different one in every instance with NIXL.
        devices: devices that it runs on, if the platform has devices.
        served_name: name of the model in requests; None: `model`.
        local_media: folder from which file:// media may be read.
        memory: share of the devices' memory that it uses; None: vLLM's default. For an encode
            instance vLLM only checks that it is free.
        max_model_len, max_num_seqs: maximum tokens of a request and its answer, maximum concurrent
            requests; None: the platform's defaults.
        api_servers: number of processes of its HTTP API. Each runs the media processor on one
            thread (`BaseRenderer._mm_executor`, `vllm/renderers/base.py`).
        ec_both: whether a consumer of encoder outputs writes those that it makes to the store too.
        flags: additional flags; of a repeated flag, vLLM uses the last value.
        inherited: environment of the caller, which takes precedence over the platform's defaults.
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
    api_servers: int = 1
    kv_extra: Mapping[str, Any] = field(default_factory=dict)
    ec_both: bool = False
    kv_events: bool = False
    program: tuple[str, ...] = VLLM
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
        published = self.kv_events and self.role is not Role.ENCODE
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
        # An encode instance may prepare media on its device, in the process of its API.
        once = self.role is not Role.ENCODE and not any(map(SEVERAL_ENGINES.match, self.flags))
        settled = SETTLED if once else ""
        return FleetServer(self.name, self.url, self.command(), self.environment(), settled)

    def command(self) -> tuple[str, ...]:
        values: dict[str, Any] = {
            "--served-model-name": self.served_name,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--allowed-local-media-path": self.local_media,
            "--gpu-memory-utilization": self.memory,
            "--max-model-len": self.max_model_len or self.platform.max_model_len,
            "--max-num-seqs": self.max_num_seqs or self.platform.max_num_seqs,
            "--api-server-count": self.api_servers if self.api_servers > 1 else None,
            "--tensor-parallel-size": len(self.devices) if len(self.devices) > 1 else None,
            "--distributed-executor-backend": self._executor(),
            "--kv-events-config": self._events_config(),
            **self._role_values(),
        }
        given = ((flag, str(value)) for flag, value in values.items() if value is not None)
        return (
            *(*self.program, "serve", self.model),
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

    def _executor(self) -> str | None:
        """Return the executor; None: vLLM's default, as for several ranks or bound cores."""
        divided = len(self.devices) > 1 or any(DIVIDING.match(flag) for flag in self.flags)
        bound = self.environment().get(BINDING, UNBOUND) != UNBOUND
        return None if divided or bound else self.platform.executor

    def _events_config(self) -> str | None:
        if not self.events_address:
            return None
        config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        return json.dumps({**config, "endpoint": self.events_address})

    def _role_values(self) -> dict[str, Any]:
        consumer = "ec_both" if self.ec_both else "ec_consumer"
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
