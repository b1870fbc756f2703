"""Bandwidth of KV transfers between two instances, from vLLM's metrics around a trial request.

vLLM's NIXL connectors count each finished transfer between two ranks, its bytes and its duration
(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py`), at the instance that starts it:
decode reads, with NixlPushConnector prefill writes. Their labels do not name the other instance, so
transfers of other requests are in the same sums. A window is the difference of two readings around
one trial. If it has more transfers than the trial starts, the trial's own duration is known only
within bounds. No I/O.
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


class Measured(NamedTuple):
    """Bytes and duration of a trial.

    Attributes:
        bytes: bytes of the trial; an estimate if `others` is not 0.
        least_s, most_s: bounds of its duration in seconds, equal without other transfers.
        others: number of transfers of other requests.
    """

    bytes: float
    least_s: float
    most_s: float
    others: int


def measure(window: Window, ranks: float) -> Measured:
    """Return the bytes and the duration of a trial between `ranks` pairs of ranks.

    The trial has as many tokens as fit, so its transfers last at least as long as the mean of all.
    Its part of the bytes is that of its tokens.
    """
    number, size, transfer_s, tokens = window.transfers
    transfer_s = max(transfer_s, RESOLUTION_S)
    share = min(1.0, window.tokens / tokens)
    return Measured(share * size, transfer_s / number, transfer_s / ranks, int(number - ranks))


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Trials of one pair of instances.

    Attributes:
        small: a trial with few tokens, after a first one that opened the connections.
        large: trials with as many tokens as fit.
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
        """Why there is no figure; empty: there is one."""
        if self._measured() is not None:
            return ""
        return self.problem or "the instances counted no transfer of it"

    @property
    def seen(self) -> str:
        """Bandwidth, delay and cost of the trial; empty without a figure."""
        if (measured := self._measured()) is None:
            return ""
        found, delay, tokens = measured
        reason = self._undecided(found, delay)
        prefill_s = sum(trial.prefill_s for trial in self.large)
        decode_s = sum(trial.decode_s for trial in self.large)
        others = f"; transfers of other requests at the same time: {found.others}"
        return (
            f"{_bandwidth_text(found)}, delay {_milliseconds(delay)} ms"
            f"{others if found.others else ''} ({f'no verdict: {reason}; ' if reason else ''}"
            f"{len(self.large)} x {tokens} tokens took {prefill_s:.1f} s of prefill and "
            f"{decode_s:.1f} s of decode)"
        )

    @property
    def is_slow(self) -> bool:
        """Whether the bandwidth is certainly below `SLOW_BYTES_PER_S`, on one host."""
        if (measured := self._measured()) is None:
            return False
        found, delay, _ = measured
        slow = found.bytes / found.most_s < SLOW_BYTES_PER_S
        return slow and not self._undecided(found, delay)

    def _measured(self) -> tuple[Measured, Measured, int] | None:
        """Return the large trial, the small one, and the tokens of the large one.

        That is the one with the fewest other transfers, the last of them. A trial has as many
        transfers as there are pairs of ranks: the fewest of a window without other requests. If all
        windows have other requests, only the slowest transfer is taken for the trial's.
        """
        if self.small is None or not self.large:
            return None
        windows = [self.small, *self.large]
        ranks = min((trial.transfers.number for trial in windows if trial.is_alone), default=1)
        best = min(
            reversed(self.large), key=lambda trial: (not trial.is_alone, trial.transfers.number)
        )
        return measure(best, ranks), measure(self.small, ranks), best.tokens

    def _undecided(self, found: Measured, delay: Measured) -> str:
        """Return why the bandwidth is not judged; empty if it is."""
        slow_s = found.bytes / SLOW_BYTES_PER_S
        if self.in_host_memory:
            return "the KV blocks are in the host's memory"
        if not self._on_one_host():
            return "the URLs have different hosts; on one host, less than 5 GB/s would be slow"
        if found.bytes < MIN_BYTES:
            return f"less than {MIN_BYTES / MEGA:.0f} MB of KV blocks fit"
        if found.least_s <= slow_s < found.most_s:
            return "the other transfers hide the duration; repeat it with less traffic"
        if found.least_s - delay.most_s <= slow_s < found.least_s:
            return "the delay is most of the duration"
        return ""

    def _on_one_host(self) -> bool:
        hosts = [urlsplit(instance.url).hostname or "" for instance in (self.prefill, self.decode)]
        return hosts[0] == hosts[1] or all(map(is_loopback, hosts))


def _bandwidth_text(found: Measured) -> str:
    rates = [found.bytes / seconds / GIGA for seconds in (found.most_s, found.least_s)]
    about = "about " if found.others else ""
    size = _figure(found.bytes / MEGA)
    return f"{_range(*rates)} GB/s ({about}{size} MB in {_milliseconds(found)} ms)"


def _milliseconds(found: Measured) -> str:
    return _range(1000 * found.least_s, 1000 * found.most_s)


def _range(*values: float) -> str:
    return " to ".join(dict.fromkeys(map(_figure, values)))


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= WHOLE else f"{value:.2g}"
