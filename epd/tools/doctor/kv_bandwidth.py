"""Bandwidth of KV transfers between two instances, from vLLM's metrics around a trial request.

vLLM's NIXL connectors count each finished transfer between two ranks, its bytes and its duration
(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py`), at the instance that starts it:
decode reads, with NixlPushConnector prefill writes. Their labels do not name the other instance, so
transfers of other requests are in the same sums. A window is the difference of two readings around
one trial. It has a figure only if decode got no tokens of other requests. No I/O.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from epd.edge.access import is_loopback
from epd.routing.instances import Instance
from epd.routing.reports import KV_BYTES, KV_SECONDS

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
        prefill_s, decode_s: durations of the trial's requests in seconds.
    """

    transfers: Transfers
    tokens: int
    prefill_s: float
    decode_s: float

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
        large: trials with as many tokens as fit, repeated until one is alone.
        in_host_memory: whether the KV blocks are known to be in the host's memory.
        problem: why there are no trials; empty if there are.
    """

    prefill: Instance
    decode: Instance
    small: Window | None = None
    large: Sequence[Window] = ()
    in_host_memory: bool = False
    problem: str = ""

    @property
    def name(self) -> str:
        """Both instances, as findings show them."""
        return f"KV {self.prefill.url} -> {self.decode.url}"

    @property
    def failure(self) -> str:
        """Why there is no trial; empty: there is one."""
        return "" if self.large else self.problem or "the instances counted no transfer of it"

    @property
    def seen(self) -> str:
        """Bandwidth, delay and cost of the last trial; empty without one."""
        if self.small is None or not self.large:
            return ""
        found = self.large[-1]
        reason = self._undecided(found, self.small)
        prefill_s = sum(trial.prefill_s for trial in self.large)
        decode_s = sum(trial.decode_s for trial in self.large)
        notes = (
            f"{f'no verdict: {reason}; ' if reason else ''}{len(self.large)} x {found.tokens} "
            f"tokens took {prefill_s:.1f} s of prefill and {decode_s:.1f} s of decode"
        )
        if not found.is_alone:
            return f"transfers of other requests took place at the same time ({notes})"
        size = found.transfers.bytes
        return (
            f"{_figure(size / found.mean_s / GIGA)} GB/s ({_figure(size / MEGA)} MB in "
            f"{_figure(1000 * found.mean_s)} ms), delay {_figure(1000 * self.small.mean_s)} ms "
            f"({notes})"
        )

    @property
    def is_slow(self) -> bool:
        """Whether the bandwidth is certainly below `SLOW_BYTES_PER_S`, on one host."""
        if self.small is None or not self.large:
            return False
        found = self.large[-1]
        slow = found.transfers.bytes / found.mean_s < SLOW_BYTES_PER_S
        return slow and not self._undecided(found, self.small)

    def _undecided(self, found: Window, small: Window) -> str:
        """Return why the bandwidth is not judged; empty if it is."""
        slow_s = found.transfers.bytes / SLOW_BYTES_PER_S
        if not found.is_alone:
            return "repeat it with less traffic, or see epd_kv_transfer_bytes_per_second"
        if self.in_host_memory:
            return "the KV blocks are in the host's memory"
        if not self._on_one_host():
            return "the URLs have different hosts; on one host, less than 5 GB/s would be slow"
        if found.transfers.bytes < MIN_BYTES:
            return f"less than {MIN_BYTES / MEGA:.0f} MB of KV blocks fit"
        if found.mean_s - small.mean_s <= slow_s < found.mean_s:
            return "the delay is most of the duration"
        return ""

    def _on_one_host(self) -> bool:
        hosts = [urlsplit(instance.url).hostname or "" for instance in (self.prefill, self.decode)]
        return hosts[0] == hosts[1] or all(map(is_loopback, hosts))


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= WHOLE else f"{value:.2g}"
