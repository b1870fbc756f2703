"""Settings of `epd up`, from flags and environment variables."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ec_store.config import size_bytes
from ec_store.urls import check_url
from epd.routing.instances import Role
from epd.tools.up.devices import Devices, parse_gpus, parse_instances
from epd.tools.up.topology import Topology

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""`vllm` command of this process's Python environment."""

PREFIX = "EPD_UP_"
"""Prefix of the variables of all settings."""

QUOTA = "64GiB"
"""Quota of a store that is named by a folder instead of a URL."""


def _store_url(text: str) -> str:
    if "://" in text:
        return check_url(text)
    return check_url(f"{Path(text).absolute().as_uri()}?max_bytes={QUOTA}")


def _model(text: str) -> str:
    # A name on the hub stays as given: requests use it as the model's name.
    text = os.path.expanduser(text)  # noqa: PTH111 - a Path would normalize the text
    path = Path(text)
    looks_like_path = text.startswith(("/", ".", "~")) or text.count("/") > 1
    is_folder = "://" not in text and (path.is_dir() or looks_like_path)
    if is_folder and not (path / "config.json").is_file():
        raise ValueError(f"{text!r} is not a directory with a model's config.json")
    return text


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise ValueError(f"{text!r} is not a folder")
    return str(Path(text).resolve())


def _no_tls(flags: tuple[str, ...]) -> tuple[str, ...]:
    if any(flag.startswith("--ssl-") for flag in flags):
        raise ValueError("cannot have TLS: run `epd serve` with the command line of --dry-run")
    return flags


def _from_text(read: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that reads text; values of other types stay as they are."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


Port = Annotated[int, Field(ge=1, le=65535)]
Share = Annotated[float, Field(gt=0, le=1)]
Words = Annotated[tuple[str, ...], NoDecode, _from_text(shlex.split)]
Instances = Annotated[tuple[Devices, ...] | None, NoDecode, _from_text(parse_instances)]
Gpus = Annotated[Mapping[Role, tuple[Devices, ...]] | None, NoDecode, _from_text(parse_gpus)]


class RoleSettings(NamedTuple):
    """Settings of the instances of one role; their ports count up from the first."""

    port: int
    memory: float | None
    flags: tuple[str, ...]
    devices: tuple[Devices, ...] | None


class FleetSettings(BaseSettings):
    """Settings of `epd up`: flags before the environment before defaults.

    The variable of a field is that of vLLM's example scripts, if they have one, and otherwise
    `EPD_UP_` and the field's name.

    Raises:
        ValueError: a value is invalid, or two values conflict.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=PREFIX,
        env_ignore_empty=True,
        populate_by_name=True,
        extra="forbid",
    )

    model: Annotated[str, AfterValidator(_model)] = Field(
        validation_alias="MODEL", description="model: name on the hub, or directory"
    )
    served_model_name: str | None = Field(
        None, description="name of the model in requests (default: --model without folders)"
    )
    topology: Annotated[Topology, NoDecode, _from_text(Topology.parse)] = Field(
        Topology.parse("1e1pd"),
        description="number of encode, prefill and decode instances: 1e1pd (default), 1e1p1d, "
        "2e1p2d; 2epd: instances that do all three and share the store; without a store 1p1d, "
        "2p2d, 1pd",
    )
    device: Annotated[Literal["cuda", "xpu", "cpu"] | None, _from_text(str.lower)] = Field(
        None,
        validation_alias="DEVICE_PLATFORM",
        description="kind of device that instances run on: cuda, xpu or cpu (default: cuda if an "
        "NVIDIA device is visible, otherwise cpu)",
    )
    gpus: Gpus = Field(
        None,
        description="devices by stage, such as e=0,p=1,d=2 or e=0,pd=1. e=0:1: two instances; "
        "d=2+3: one instance with its tensors divided over two devices. Stages without an entry "
        "share the other devices in turn",
    )
    gpu_e: Instances = Field(None, validation_alias="GPU_E")
    gpu_p: Instances = Field(None, validation_alias="GPU_P")
    gpu_d: Instances = Field(None, validation_alias="GPU_D")
    gpu_pd: Instances = Field(None, validation_alias="GPU_PD")
    device_affinity_env: str | None = Field(
        None,
        validation_alias="DEVICE_AFFINITY_ENV",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="variable that tells an instance its devices (default: CUDA_VISIBLE_DEVICES, "
        "with xpu ZE_AFFINITY_MASK)",
    )
    device_memory: Annotated[int, _from_text(size_bytes)] | None = Field(
        None,
        description="memory of each device, such as 80GiB, to plan for (default: that of the "
        "visible NVIDIA devices)",
    )
    gpu_memory_utilization_e: Share | None = Field(
        None,
        validation_alias="GPU_MEMORY_UTILIZATION_E",
        description="share of a device's memory that is left to an encode instance (default: what "
        "its encoder and its largest step need)",
    )
    gpu_memory_utilization_p: Share | None = Field(
        None,
        validation_alias="GPU_MEMORY_UTILIZATION_P",
        description="share of a device's memory that a prefill instance uses (default: vLLM's own; "
        "instances that share a device divide what is left of it)",
    )
    gpu_memory_utilization_d: Share | None = Field(
        None,
        validation_alias="GPU_MEMORY_UTILIZATION_D",
        description="the same for a decode instance",
    )
    gpu_memory_utilization_pd: Share | None = Field(
        None,
        validation_alias="GPU_MEMORY_UTILIZATION_PD",
        description="the same for an instance that prefills and decodes",
    )
    max_model_len: PositiveInt | None = Field(
        None,
        validation_alias="MAX_MODEL_LEN",
        description="maximum tokens of a request and its answer (default: the model's own; on cpu "
        "4096)",
    )
    max_num_seqs: PositiveInt | None = Field(
        None,
        validation_alias="MAX_NUM_SEQS",
        description="maximum concurrent requests of an instance (default: vLLM's own; on cpu 16)",
    )
    host: str = Field("127.0.0.1", description="address that the proxy listens on")
    port: Port = Field(8000, validation_alias="PROXY_PORT", description="port of the proxy")
    encode_port: Port = Field(
        8200,
        validation_alias="ENCODE_PORT",
        description="port of the first encode instance; the others count up from it",
    )
    prefill_port: Port = Field(
        8300, validation_alias="PREFILL_PORT", description="port of the first prefill instance"
    )
    decode_port: Port = Field(
        8400, validation_alias="DECODE_PORT", description="port of the first decode instance"
    )
    prefill_decode_port: Port = Field(
        8400,
        validation_alias="PREFILL_DECODE_PORT",
        description="port of the first instance that prefills and decodes",
    )
    nixl_port: Port = Field(
        5600, description="port of the first NIXL handshake; each further one is 10 higher"
    )
    bidirectional_kv: bool = Field(
        False,
        description="let prefill instances read the KV blocks that decode instances keep of a "
        "conversation's previous turn",
    )
    kv_recompute_threshold: NonNegativeInt | None = Field(
        None,
        description="number of tokens below which prefill computes them again instead of reading "
        "blocks (default: vLLM's own, 64)",
    )
    kv_events: bool = Field(
        False,
        description="choose the instances that prefill by the content of their prefix caches, "
        "which they publish as KV events",
    )
    ec_store: Annotated[str, AfterValidator(_store_url)] | None = Field(
        None,
        validation_alias=AliasChoices("EPD_UP_EC_STORE", "EC_SHARED_STORAGE_PATH"),
        description="encoder store: a folder, with a quota of 64 GiB, or a store URL (default: a "
        "memory of this host, which ends with the fleet)",
    )
    ec_store_memory: Annotated[PositiveInt, _from_text(size_bytes)] | None = Field(
        None,
        description="size of the default encoder store, such as 16GiB, all of which is allocated "
        "at the start (default: an eighth of the available memory, from 256 MiB to 64 GiB)",
    )
    ec_both: bool = Field(
        False,
        description="let instances that prefill write the encoder outputs that they make to the "
        "store too (ec_role ec_both), as the policy cost of the proxy needs",
    )
    ec_store_port: Port = Field(
        8100,
        description="port of the service that owns the memory, or enforces the quota of a store in "
        "a folder, and has the metrics of both",
    )
    allowed_local_media_path: Annotated[str, AfterValidator(_folder)] | None = Field(
        None, description="folder from which file:// media may be read"
    )
    log_path: Path = Field(
        Path("logs"),
        validation_alias="LOG_PATH",
        description="folder of logs; each run creates its own folder in it",
    )
    timeout_s: PositiveFloat = Field(
        1800,
        validation_alias="TIMEOUT_SECONDS",
        description="seconds until all servers must be ready",
    )
    vllm_flags: Words = Field(
        (), description="additional flags of every vLLM instance, quoted as in a shell"
    )
    encode_flags: Words = Field((), description="additional flags of encode instances")
    prefill_flags: Words = Field((), description="additional flags of prefill instances")
    decode_flags: Words = Field(
        (), description="additional flags of instances that decode, or prefill and decode"
    )
    proxy_flags: Annotated[Words, AfterValidator(_no_tls)] = Field(
        (), description="additional flags of `epd serve`"
    )
    vllm_command: Words = Field(
        VLLM, min_length=1, description="command that starts vLLM (default: vLLM of this Python)"
    )

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        roles = self.topology.roles
        if self.device == "cpu" and self.gpus:
            raise ValueError("--gpus needs --device cuda or xpu")
        if lacking := [role.value for role in self.gpus or () if role not in roles]:
            raise ValueError(f"--gpus names devices of {lacking[0]}, a stage that --topology lacks")
        if self.bidirectional_kv and Role.PREFILL not in roles:
            raise ValueError(
                "--bidirectional-kv needs separate prefill and decode instances, as in 1p1d"
            )
        if self.kv_recompute_threshold is not None and not self.bidirectional_kv:
            raise ValueError("--kv-recompute-threshold needs --bidirectional-kv")
        if self.ec_store is not None and not self.topology.uses_store:
            raise ValueError("--ec-store needs instances that encode, as in 1e1p1d or 2epd")
        if self.ec_store is not None and self.ec_store_memory is not None:
            raise ValueError(
                "--ec-store-memory is for the default store: a store URL has max_bytes"
            )
        if self.ec_both and Role.ENCODE not in roles:
            raise ValueError("--ec-both needs encode instances, as in 1e1pd")
        return self

    @property
    def served_name(self) -> str | None:
        """Name of the model in requests; None: as on the hub."""
        path = Path(self.model)
        return self.served_model_name or (path.resolve().name if path.is_dir() else None)

    @property
    def writes_back(self) -> bool:
        """Whether instances that prefill write the encoder outputs that they make to the store."""
        return self.ec_both or self.topology.local

    def kv_extra(self) -> Mapping[str, Any]:
        if not self.bidirectional_kv:
            return {}
        threshold = self.kv_recompute_threshold
        least = {} if threshold is None else {"kv_recompute_threshold": threshold}
        return {"bidirectional_kv_xfer": True, **least}

    def named_devices(self) -> Mapping[Role, tuple[Devices, ...]]:
        """Return the devices named for the topology's instances: `--gpus`, or the variables."""
        return self.gpus or {
            role: own.devices
            for role, own in self.by_role().items()
            if own.devices and role in self.topology.roles
        }

    def by_role(self) -> Mapping[Role, RoleSettings]:
        """Return what differs between the roles; `devices` are those of the variables."""
        return {
            Role.ENCODE: RoleSettings(
                self.encode_port, self.gpu_memory_utilization_e, self.encode_flags, self.gpu_e
            ),
            Role.PREFILL: RoleSettings(
                self.prefill_port, self.gpu_memory_utilization_p, self.prefill_flags, self.gpu_p
            ),
            Role.DECODE: RoleSettings(
                self.decode_port, self.gpu_memory_utilization_d, self.decode_flags, self.gpu_d
            ),
            Role.PREFILL_DECODE: RoleSettings(
                port=self.prefill_decode_port,
                memory=self.gpu_memory_utilization_pd,
                flags=self.decode_flags,
                devices=self.gpu_pd,
            ),
        }
