"""Kinds of devices, and what vLLM instances need on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from epd.routing.instances import Role

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
UCX = {"UCX_TLS": "all", "UCX_NET_DEVICES": "all"}

UNIPROC = "vllm.v1.executor.uniproc_executor"

THREADS = "OMP_NUM_THREADS"
"""Variable with the number of threads that compute a model on a CPU."""

CUDA_UCX = {**UCX, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""Settings with which UCX reads the memory of another process's GPU directly. By default it does so
only with NVLink, and otherwise copies through the host at some 0.5 GB/s
(docs/guides/kv-transfers.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Kind of device, and what a vLLM instance needs on it.

    Attributes:
        affinity: variable with the devices that a process sees; None: there are no devices.
        files: pattern below /dev that matches one file per device.
        environment: variables of every instance, unless the caller has set them.
        ucx: the same for instances with NIXL.
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


CUDA = Platform(name="cuda", affinity="CUDA_VISIBLE_DEVICES", files="nvidia[0-9]*", ucx=CUDA_UCX)
XPU = Platform(name="xpu", affinity="ZE_AFFINITY_MASK", files="dri/renderD*", ucx=UCX)
CPU = Platform(
    name="cpu",
    environment={
        # Instances share the cores of one machine, and are bound to none.
        THREADS: "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    },
    ucx={"UCX_TLS": "tcp,self,sm,cma"},
    # In bfloat16, on a CPU with AMX, vLLM uses an AMX attention kernel. The kernel dies of an
    # illegal instruction in a process that has run no large matrix product yet. A decode instance
    # is such a process: its prompts arrive through NIXL.
    #
    # The model runs in the engine's own process, as on a GPU. On a CPU, vLLM's default is another
    # process, which takes half as long again to start, and 0.7 GB.
    flags=(
        *("--dtype", "float32"),
        *("--distributed-executor-backend", f"{UNIPROC}.UniProcExecutor"),
    ),
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


def runs_on_cpu(device: str | None, environ: Mapping[str, str]) -> bool:
    """Return whether instances run on the CPU, by a flag, its variable, or the visible devices."""
    device = device or environ.get("DEVICE_PLATFORM")
    return device.lower() == CPU.name if device else detect_platform(environ) is CPU
