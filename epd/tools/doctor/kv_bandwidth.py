"""Bandwidth of KV transfers between two instances, from vLLM's metrics around a trial request.

vLLM's NIXL connectors count each finished transfer between two ranks in histograms of its duration
and its bytes (`vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py`), at the instance that
starts it: decode reads, with NixlPushConnector prefill writes. Their labels do not name the other
instance, so transfers of other requests are in the same histograms. A window is the difference of
two readings around one trial. If it has more transfers than the trial starts, the trial's own
duration is known only within bounds. No I/O.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from epd.edge.access import is_loopback
from epd.routing.instances import Instance
from epd.routing.reports import KV_BYTES, KV_SECONDS
from epd.tools.doctor.facts import Finding, ok, warn

EXTERNAL_TOKENS = "vllm:external_prefix_cache_hits_total"
"""Counter of the prompt tokens that an engine got from another one."""

SLOW_BYTES_PER_S = 5e9
"""Bandwidth below which instances of one host do not use what it offers: CUDA IPC has 25 GB/s over
PCIe 4, and more over NVLink; copies through the host have 0.5 (decision 039)."""

MIN_BYTES = 64e6
"""Bytes of a trial below which there is no verdict."""

MAX_BYTES = 1e9
"""Bytes of a trial that suffice: 0.2 s at `SLOW_BYTES_PER_S`, long beside decode's steps."""

RESOLUTION_S = 1e-6
"""Resolution of NIXL's durations."""

MEGA, GIGA = 1e6, 1e9

WHOLE = 10
"""Value from which figures have no decimals."""


class Bucket(NamedTuple):
    """Transfers that took longer than `above_s`, and at most `most_s` seconds."""

    above_s: float
    most_s: float
    transfers: int


@dataclass(frozen=True, slots=True)
class Transfers:
    """Transfers that an instance has counted: since its start, or within a window.

    Attributes:
        count: number of transfers, each between two ranks.
        transfer_s: sum of their durations in seconds.
        within: number of transfers by the upper bound of their duration, cumulative, in rising
            order; the last bound is infinite.
    """

    count: int
    bytes: float
    transfer_s: float
    within: tuple[tuple[float, int], ...]

    def since(self, before: Self) -> Self:
        """Return the transfers after another reading of the same instance."""
        within = zip(self.within, before.within, strict=True)
        return type(self)(
            self.count - before.count,
            self.bytes - before.bytes,
            self.transfer_s - before.transfer_s,
            tuple((bound, count - earlier) for (bound, count), (_, earlier) in within),
        )

    def buckets(self) -> list[Bucket]:
        """Return the transfers by their duration, in rising order."""
        steps = pairwise([(0.0, 0), *self.within])
        return [Bucket(low, most, count - below) for (low, below), (most, count) in steps]


def read_transfers(page: bytes) -> Transfers | None:
    """Return the transfers of all engines on a metrics page; None without a NIXL connector."""
    of_bytes, of_seconds = KV_BYTES.decode(), KV_SECONDS.decode()
    histogram = of_seconds.removesuffix("_sum")
    within: dict[float, int] = {}
    sums = {of_bytes: 0.0, of_seconds: 0.0, f"{histogram}_count": 0.0}
    for sample in _samples(page, of_bytes.removesuffix("_sum"), histogram):
        if sample.name in sums:
            sums[sample.name] += sample.value
        elif sample.name == f"{histogram}_bucket":
            bound = float(sample.labels["le"])
            within[bound] = within.get(bound, 0) + int(sample.value)
    moved, transfer_s, count = sums.values()
    return (
        Transfers(int(count), moved, transfer_s, tuple(sorted(within.items()))) if within else None
    )


def read_tokens(page: bytes) -> float:
    """Return the prompt tokens that the engines of a metrics page got from other instances."""
    return sum(sample.value for sample in _samples(page, EXTERNAL_TOKENS.removesuffix("_total")))


def _samples(page: bytes, *names: str) -> Iterator[Sample]:
    """Yield the samples of these families; none if they are invalid."""
    begins = tuple(name.encode() for name in names)
    lines = [line for line in page.splitlines() if line.startswith(begins)]
    with suppress(ValueError):
        for family in text_string_to_metric_families(b"\n".join([*lines, b""]).decode()):
            yield from family.samples


class Window(NamedTuple):
    """Transfers during one trial.

    Attributes:
        tokens: prompt tokens of the trial.
        all_tokens: prompt tokens that decode got meanwhile, of all requests.
        prefill_s, decode_s: durations of the trial's requests in seconds.
    """

    transfers: Transfers
    tokens: int
    all_tokens: float
    prefill_s: float
    decode_s: float

    @property
    def is_alone(self) -> bool:
        """Whether decode got no tokens of other requests."""
        return self.all_tokens <= self.tokens


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Trials of one pair of instances.

    Attributes:
        counted_at: the instance that counts the transfers.
        small: a trial with few tokens, after a first one that opened the connections.
        large: trials with as many tokens as fit.
        in_host_memory: whether the KV blocks are known to be in the host's memory.
        problem: why there are no trials; None if there are.
    """

    prefill: Instance
    decode: Instance
    counted_at: Instance | None = None
    small: Window | None = None
    large: Sequence[Window] = ()
    in_host_memory: bool = False
    problem: str | None = None


class Measured(NamedTuple):
    """Bandwidth of a trial, between two bounds that are equal without other transfers.

    Attributes:
        bytes: bytes of the trial; an estimate if `others` is not 0.
        least_s, most_s: bounds of its duration in seconds.
        others: number of transfers of other requests.
    """

    bytes: float
    least_s: float
    most_s: float
    others: int


def own_transfers(windows: Sequence[Window]) -> int:
    """Return the number of transfers of one trial: the fewest of a window without other requests.

    Each has as many as there are pairs of ranks. If all windows have other requests, only the
    slowest transfer is taken for the trial's.
    """
    return min((window.transfers.count for window in windows if window.is_alone), default=1)


def measure(window: Window, own: int) -> Measured:
    """Return the bytes and the duration of a trial that starts `own` transfers at once.

    With other transfers, the trial's are taken for the slowest: it has as many tokens as fit. Its
    part of the bytes is that of its tokens.
    """
    found = window.transfers
    others = found.count - own
    if others <= 0:
        mean_s = max(found.transfer_s / found.count, RESOLUTION_S)
        return Measured(found.bytes, mean_s, mean_s, 0)
    left, least_s, most_s, others_least_s, others_most_s = own, 0.0, 0.0, 0.0, 0.0
    for bucket in reversed(found.buckets()):
        mine = min(left, bucket.transfers)
        left -= mine
        least_s, most_s = least_s + mine * bucket.above_s, most_s + _times(mine, bucket.most_s)
        others_least_s += (bucket.transfers - mine) * bucket.above_s
        others_most_s += _times(bucket.transfers - mine, bucket.most_s)
    least_s = max(least_s, found.transfer_s - others_most_s)
    most_s = min(most_s, found.transfer_s - others_least_s)
    share = min(1.0, window.tokens / window.all_tokens) if window.all_tokens else 1.0
    return Measured(share * found.bytes, least_s / own, max(least_s, most_s) / own, others)


def _times(count: int, bound_s: float) -> float:
    return count * bound_s if count else 0.0  # the last bound is infinite


def best_window(windows: Sequence[Window]) -> Window:
    """Return the trial with the fewest other transfers, the last of them."""
    return min(reversed(windows), key=lambda window: (not window.is_alone, window.transfers.count))


def judge_pair(facts: PairFacts) -> Iterator[Finding]:
    """Yield the finding about the transfers of a pair."""
    name = f"KV {facts.prefill.url} -> {facts.decode.url}"
    if facts.small is None or not facts.large:
        problem = facts.problem or "the instances counted no transfer of it"
        yield warn(name, f"the trial of KV transfers failed: {problem}", FAILED)
        return
    own = own_transfers([facts.small, *facts.large])
    window, delay = best_window(facts.large), measure(facts.small, own)
    found = measure(window, own)
    seen = f"{_bandwidth_text(found)}, delay {_milliseconds(delay)} ms"
    if found.others:
        seen += f"; transfers of other requests at the same time: {found.others}"
    prefill_s = sum(trial.prefill_s for trial in facts.large)
    decode_s = sum(trial.decode_s for trial in facts.large)
    cost = (
        f"{len(facts.large)} x {window.tokens} tokens took {prefill_s:.1f} s of prefill and "
        f"{decode_s:.1f} s of decode"
    )
    if (reason := _no_verdict(facts, found, delay)) is not None:
        yield ok(name, f"{seen} (no verdict: {reason}; {cost})")
    elif found.bytes / found.most_s >= SLOW_BYTES_PER_S:
        yield ok(name, f"{seen} ({cost})")
    else:
        yield warn(name, f"{seen} ({cost})", advice_for(facts))


FAILED = "repeat it; if it fails again, see the logs of both instances"


def _no_verdict(facts: PairFacts, found: Measured, delay: Measured) -> str | None:
    """Return why the bandwidth is not judged; None if it is."""
    slow_s = found.bytes / SLOW_BYTES_PER_S
    reason = None
    if facts.in_host_memory:
        reason = "the KV blocks are in the host's memory"
    elif not on_one_host(facts.prefill, facts.decode):
        reason = "the URLs have different hosts; on one host, less than 5 GB/s would be slow"
    elif found.bytes < MIN_BYTES:
        reason = f"less than {MIN_BYTES / MEGA:.0f} MB of KV blocks fit"
    elif found.least_s <= slow_s < found.most_s:
        reason = "the other transfers hide the duration; repeat it with less traffic"
    elif found.least_s - delay.most_s <= slow_s < found.least_s:
        reason = "the delay is most of the duration"
    return reason


def on_one_host(prefill: Instance, decode: Instance) -> bool:
    """Return whether the URLs of two instances name the same host."""
    hosts = [urlsplit(instance.url).hostname or "" for instance in (prefill, decode)]
    return hosts[0] == hosts[1] or all(map(is_loopback, hosts))


def _bandwidth_text(found: Measured) -> str:
    rates = [found.bytes / seconds / GIGA for seconds in (found.most_s, found.least_s) if seconds]
    about = "about " if found.others else ""
    size = _figure(found.bytes / MEGA)
    return f"{_range(*rates)} GB/s ({about}{size} MB in {_milliseconds(found)} ms)"


def _milliseconds(found: Measured) -> str:
    return _range(1000 * found.least_s, 1000 * found.most_s)


def _range(*values: float) -> str:
    ends = dict.fromkeys(map(_figure, (min(values), max(values))))
    return " to ".join(ends)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= WHOLE else f"{value:.2g}"


def advice_for(facts: PairFacts) -> str:
    """Return what to check if the blocks of a pair move slowly."""
    counted_at = facts.counted_at or facts.decode
    verb = "read" if counted_at is facts.decode else "write"
    get = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on, without NVLink; " if verb == "read" else ""
    return (
        "check on both instances: UCX_TLS must allow cuda_ipc and cuda_copy (unset, or all); "
        f"{get}UCX_NET_DEVICES; kv_buffer_device must be the GPU. In containers, CUDA IPC needs "
        "one PID and one IPC namespace, and each must see both GPUs; otherwise use GPUDirect "
        f"RDMA. To see what UCX chose, start {counted_at.role} with UCX_LOG_LEVEL=info "
        f"UCX_PROTO_INFO=y: its log names the transport of `remote memory {verb}`; `software "
        "emulation` is the slow one. See docs/guides/kv-transfers.md"
    )
