"""What differs between the kinds of devices that vLLM runs on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from epd.routing.instances import Role


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
