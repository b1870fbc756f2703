"""Bandwidth of KV transfers between two instances, from vLLM's metrics around a trial request.

vLLM's NIXL connectors count each finished transfer between two ranks, its bytes and its duration
(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py`), at the instance that starts it:
decode reads, with NixlPushConnector prefill writes. Their labels do not name the other instance, so
transfers of other requests are in the same sums. A window is the difference of two readings around
one trial. It has a figure only if decode got no tokens of other requests. No I/O.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from epd.edge.access import is_loopback
from epd.routing.instances import Instance
from epd.routing.reports import KV_BYTES, KV_SECONDS
from epd.tools.doctor.findings import OK, WARN, Finding

EXTERNAL_TOKENS = "vllm:external_prefix_cache_hits_total"
"""Counter of the prompt tokens that an engine got from another one."""

SLOW_BYTES_PER_S = 5e9
"""Bandwidth below which instances of one host do not use what it offers: CUDA IPC has 25 GB/s over
PCIe 4, and more over NVLink; copies through the host have 0.5
(docs/guides/kv-transfers.md)."""

MIN_BYTES = 64e6
"""Bytes of a trial below which there is no verdict."""

MAX_BYTES = 1e9
"""Bytes of a trial that suffice: 0.2 s at `SLOW_BYTES_PER_S`, long beside decode's steps."""

RESOLUTION_S = 1e-6
"""Resolution of NIXL's durations."""

SLOW = (
    "check on both instances: UCX_TLS must allow cuda_ipc and cuda_copy (unset, or all); "
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on, without NVLink; UCX_NET_DEVICES; kv_buffer_device must be "
    "the GPU. In containers, CUDA IPC needs one PID and one IPC namespace, and each must see both "
    "GPUs; otherwise use GPUDirect RDMA. To see what UCX chose, start decode (prefill for "
    "nixl-push) with UCX_LOG_LEVEL=info UCX_PROTO_INFO=y: its log names the transport of `remote "
    "memory read` (`write`); `software emulation` is the slow one. See docs/guides/kv-transfers.md"
)

MEGA, GIGA = 1e6, 1e9

WHOLE = 10
"""Value from which figures have no decimals."""


class Transfers(NamedTuple):
    """Transfers between two instances, and to others: since their start, or within a window.

    Attributes:
        number: transfers, each between two ranks.
        transfer_s: sum of their durations in seconds.
        tokens: prompt tokens that decode got by them, and by transfers from other instances.
    """

    number: float
    bytes: float
    transfer_s: float
    tokens: float

    def since(self, before: Self) -> Self:
        """Return the transfers after another reading of the same instances."""
        return type(self)(*(now - then for now, then in zip(self, before, strict=True)))


def read_transfers(decode: bytes, prefill: bytes = b"") -> Transfers | None:
    """Return the transfers on two metrics pages; None without a NIXL connector."""
    names = (KV_SECONDS.removesuffix(b"_sum") + b"_count", KV_BYTES, KV_SECONDS)
    number, size, seconds = ([*_values(decode, name), *_values(prefill, name)] for name in names)
    tokens = _values(decode, EXTERNAL_TOKENS.encode())
    return Transfers(sum(number), sum(size), sum(seconds), sum(tokens)) if number else None


def _values(page: bytes, name: bytes) -> list[float]:
    """Return a metric's value for each engine, as far as they are valid."""
    sample = rb"(?m)^%s(?:\{[^}\n]*\})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$" % re.escape(name)
    return [*map(float, re.findall(sample, page))]


class Window(NamedTuple):
    """Transfers during one trial.

    Attributes:
        tokens: prompt tokens of the trial.
    """

    transfers: Transfers
    tokens: int

    @property
    def is_alone(self) -> bool:
        """Whether decode got no tokens of other requests."""
        return self.transfers.tokens <= self.tokens

    @property
    def mean_s(self) -> float:
        """Mean duration in seconds: the transfers of several pairs of ranks run at once."""
        return max(self.transfers.transfer_s, RESOLUTION_S) / self.transfers.number


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Trials of one pair of instances.

    Attributes:
        small: a trial with few tokens, after a first one that opened the connections.
        large: a trial with as many tokens as fit.
        in_host_memory: whether the KV blocks are known to be in the host's memory.
        problem: why there are no trials; empty if there are.
    """

    prefill: Instance
    decode: Instance
    small: Window | None = None
    large: Window | None = None
    in_host_memory: bool = False
    problem: str = ""


def judge_pair(pair: PairFacts) -> Finding:
    """Return the bandwidth and the delay of a pair, and what to check if it is certainly slow."""
    subject = f"KV {pair.prefill.url} -> {pair.decode.url}"
    small, large = pair.small, pair.large
    if small is None or large is None:
        problem = pair.problem or "the instances counted no transfer of it"
        seen = f"the trial of KV transfers failed: {problem}"
        advice = "repeat it; if it fails again, see the logs of both instances"
        return Finding(WARN, subject, seen, advice)
    reason = _undecided(pair, small, large)
    note = f" (no verdict: {reason})" if reason else ""
    if not large.is_alone:
        seen = f"transfers of other requests took place at the same time{note}"
        return Finding(OK, subject, seen)
    size, mean_s = large.transfers.bytes, large.mean_s
    seen = (
        f"{_figure(size / mean_s / GIGA)} GB/s ({_figure(size / MEGA)} MB in "
        f"{_figure(1000 * mean_s)} ms), delay {_figure(1000 * small.mean_s)} ms{note}"
    )
    if reason or size / mean_s >= SLOW_BYTES_PER_S:
        return Finding(OK, subject, seen)
    return Finding(WARN, subject, seen, SLOW)


def _undecided(pair: PairFacts, small: Window, large: Window) -> str:
    """Return why the bandwidth is not judged; empty if it is."""
    slow_s = large.transfers.bytes / SLOW_BYTES_PER_S
    hosts = [urlsplit(instance.url).hostname or "" for instance in (pair.prefill, pair.decode)]
    if not large.is_alone:
        return "repeat it with less traffic, or see epd_kv_transfer_bytes_per_second"
    if pair.in_host_memory:
        return "the KV blocks are in the host's memory"
    if hosts[0] != hosts[1] and not all(map(is_loopback, hosts)):
        return "the URLs have different hosts; on one host, less than 5 GB/s would be slow"
    if large.transfers.bytes < MIN_BYTES:
        return f"less than {MIN_BYTES / MEGA:.0f} MB of KV blocks fit"
    if large.mean_s - small.mean_s <= slow_s < large.mean_s:
        return "the delay is most of the duration"
    return ""


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= WHOLE else f"{value:.2g}"
