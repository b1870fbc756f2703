"""The command line and environment of a vLLM server, by the stage it serves.

A server that is to be started.

What differs between the kinds of devices that vLLM runs on.

Which devices each instance gets.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Self

from epd.routing.instances import Role


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is to be started.

    Attributes:
        name: what messages and its log file call it.
        url: base URL; `/health` under it answers 200 once it serves.
        command: its command line.
        environment: what it needs beside the caller's.
    """

    name: str
    url: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """What starts it from a POSIX shell, a line for each flag."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += map(shlex.quote, self.command)
        return "".join(
            f" \\\n    {word}" if word.startswith("--") else f" {word}" for word in words
        ).lstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A kind of device, and how a vLLM instance is started on it.

    Attributes:
        name: what `--device` calls it.
        affinity: the variable that says which devices a process sees; none: it has no devices.
        files: a pattern under /dev that matches one file for each device.
        environment: variables of every instance, where the caller has not set them.
        ucx: the same of those that NIXL runs in.
        flags: flags of every instance.
        executor: what runs the model of an instance that has one rank; none: vLLM's own choice.
        eager: roles whose instances capture no graphs.
        encode_tokens: tokens that an encode instance may batch.
        kv_buffer: where NIXL transfers from and to; none: vLLM's own choice.
        max_model_len, max_num_seqs: limits where none are given; none: vLLM's own.
    """

    name: str
    affinity: str | None = None
    files: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    ucx: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    executor: str | None = None
    eager: frozenset[Role] = frozenset({Role.ENCODE, Role.PREFILL})
    encode_tokens: int = 114688
    kv_buffer: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None

    def offline(self) -> Self:
        """The platform for models in a directory: nothing is fetched and nothing is sent."""
        return replace(self, environment={**OFFLINE, **self.environment})

    def in_bfloat16(self) -> Self:
        """The platform for models that a CPU computes in bfloat16 alone."""
        words = (BFLOAT16 if word == FLOAT32 else word for word in self.flags)
        return replace(self, flags=tuple(words))

    def visible(self, environ: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
        """The devices that this machine has, or those that the caller's environment leaves."""
        if self.affinity is None:
            return ()
        if (named := environ.get(self.affinity)) is not None:
            return tuple(device for word in named.split(",") if (device := word.strip()))
        return tuple(map(str, range(len(list(dev.glob(self.files))))))


FLOAT32, BFLOAT16 = "float32", "bfloat16"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
UCX = {"UCX_TLS": "all", "UCX_NET_DEVICES": "all"}

BINDING, UNBOUND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"
"""To which cores vLLM binds the process that runs a model on a CPU, and that it does not."""

CUDA = Platform(name="cuda", affinity="CUDA_VISIBLE_DEVICES", files="nvidia[0-9]*", ucx=UCX)
XPU = Platform(name="xpu", affinity="ZE_AFFINITY_MASK", files="dri/renderD*", ucx=UCX)
CPU = Platform(
    name="cpu",
    environment={
        # Instances share the cores of one machine: one thread each, bound to none.
        "OMP_NUM_THREADS": "1",
        BINDING: UNBOUND,
        "VLLM_CPU_KVCACHE_SPACE": "1",
    },
    ucx={"UCX_TLS": "tcp,self,sm,cma"},
    # In bfloat16 vLLM picks an AMX attention kernel where the CPU has AMX, which dies of an
    # illegal instruction in a process that has run no large matrix product yet: in a
    # decode instance, whose prompts come through NIXL.
    flags=("--dtype", FLOAT32),
    # In the engine's own process, as on a GPU. vLLM has another one do it on a CPU, which it binds
    # to cores; these are bound to none, and a process less is a third of the start and 0.7 GB less.
    executor="vllm.v1.executor.uniproc_executor.UniProcExecutor",
    eager=frozenset(Role),
    encode_tokens=16384,
    kv_buffer="cpu",
    max_model_len=4096,
    max_num_seqs=16,
)
PLATFORMS: Mapping[str, Platform] = {platform.name: platform for platform in (CUDA, XPU, CPU)}


def detected(environ: Mapping[str, str], dev: Path = Path("/dev")) -> Platform:
    """CUDA where an NVIDIA device is visible, the CPU elsewhere."""
    return CUDA if CUDA.visible(environ, dev) else CPU


Devices = tuple[str, ...]
"""The devices of one instance; over several its tensors are divided."""

LETTERS: Mapping[str, Role] = {
    "e": Role.ENCODE,
    "p": Role.PREFILL,
    "d": Role.DECODE,
    "pd": Role.PREFILL_DECODE,
}
ROUNDING = 1e-9
_DEVICE = re.compile(r"[\w./-]+", re.ASCII)


def parse(text: str) -> Mapping[Role, tuple[Devices, ...]]:
    """Read `e=0,p=1,d=2+3`: `+` joins devices of one instance, `:` or a second `e=` starts another.

    Raises:
        ValueError: it is not so written.
    """
    named: dict[Role, tuple[Devices, ...]] = {}
    for word in text.split(","):
        letters, equals, instances = word.partition("=")
        role = LETTERS.get(letters.strip().lower())
        if role is None or not equals:
            raise ValueError(f"{word!r} is not such as e=0, pd=1 or d=2+3")
        named[role] = (*named.get(role, ()), *parse_instances(instances))
    return named


def parse_instances(text: str) -> tuple[Devices, ...]:
    """Read `0:1` (two instances) or `2+3` (one instance on two devices).

    Raises:
        ValueError: it is not so written.
    """
    instances = tuple(
        tuple(device.strip() for device in instance.split("+")) for instance in text.split(":")
    )
    for devices in instances:
        if not all(map(_DEVICE.fullmatch, devices)) or len(set(devices)) != len(devices):
            raise ValueError(f"{text!r} names no devices such as 0, 0:1 (two instances) or 2+3")
    return instances


def assign(
    roles: Sequence[Role], named: Mapping[Role, Sequence[Devices]], visible: Sequence[str]
) -> tuple[Devices, ...]:
    """The devices of each instance: those named for its role, or one of the others in turn.

    Args:
        roles: the role of each instance.
        named: for a role, the devices of each of its instances.
        visible: the devices there are.

    Raises:
        ValueError: as many as a role has instances are not named, or there are none to take.
    """
    for role, instances in named.items():
        if len(instances) != roles.count(role):
            raise ValueError(
                f"devices for {len(instances)} {role} instances, the topology has "
                f"{roles.count(role)}"
            )
    taken = {device for several in named.values() for devices in several for device in devices}
    others = [device for device in visible if device not in taken] or list(visible)
    if not others and not set(roles) <= named.keys():
        raise ValueError("no device is visible: name them, or run on the CPU with --device cpu")
    given = {role: iter(instances) for role, instances in named.items()}
    turns = cycle(others)
    return tuple(next(given[role]) if role in given else (next(turns),) for role in roles)


def overfull(shares: Iterable[tuple[Devices, float]]) -> str | None:
    """A device of which instances want more memory than it has, if there is one.

    Args:
        shares: for each instance its devices and the part of their memory that it takes.
    """
    total: dict[str, float] = {}
    for devices, share in shares:
        for device in devices:
            total[device] = total.get(device, 0.0) + share
    return next((device for device, share in total.items() if share > 1 + ROUNDING), None)


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
