"""Reports of an instance, as its metrics page has them: load, progress, and use of the store. Pure.

Pages have hundreds of kilobytes. Only the relevant lines are parsed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
"""vLLM's gauges, one sample for each engine (`PrometheusStatLogger`,
vllm/v1/metrics/loggers.py)."""

TOKENS = (b"vllm:prompt_tokens_total", b"vllm:generation_tokens_total")
KV_USAGE = b"vllm:kv_cache_usage_perc"
"""Counters of an engine's tokens, and the gauge that changes in a long prefill: vLLM counts the
tokens of a prompt at the end of its prefill."""

KV_BYTES = b"vllm:nixl_bytes_transferred_sum"
KV_SECONDS = b"vllm:nixl_xfer_time_seconds_sum"
"""Sums of histograms with one sample for each finished transfer between two ranks. vLLM counts a
transfer at the instance that starts it: decode, or prefill with NixlPushConnector
(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py`)."""

MAX_REQUESTS = 100_000
"""Upper bound of one engine's requests. A larger value is invalid."""

MAX_SAMPLES = 1024
MAX_LINE_BYTES = 4096

NAMESPACE = b"vllm:ec_store_namespace_info"
"""The gauge of our connector, one sample for each engine (`ec_store.vllm_connector.metrics`)."""

PRODUCER = b"vllm:ec_store_producer"
"""The gauge of our connector that is 1 for an engine that writes its encoder outputs."""

_KV_TOKENS, _BLOCK_TOKENS = (
    re.compile(
        rb'^vllm:cache_config_info\{[^}\n]{,4096}\b%b="([1-9][0-9]{,11})"' % label, re.MULTILINE
    )
    for label in (b"kv_cache_size_tokens", b"block_size")
)
"""Size of an engine's KV cache, and of a block of it. All engines of an instance have the same."""

HOST = b"vllm:ec_store_host_info"
"""The gauge of our connector, one sample for each engine (`ec_store.vllm_connector.host_info`)."""

_NAMED = re.compile(rb'[{,]namespace="([^"\\]{1,256})"')
_ENGINE = re.compile(rb"[{,]engine=\"(\d{1,4})\"")


_HOST_LABELS = tuple(
    re.compile(rb'[{,]%b="(%b)"' % label)
    for label in (
        (b"address", rb'shm\+(?:tcp|tls)://[^"\\/?#@]{1,256}'),
        (b"arena", rb"[0-9a-f]{1,64}"),
        (b"tier", rb"[0-9a-f]{,64}"),
    )
)


class Host(NamedTuple):
    """Server of the memory of one host, as the metrics of its instances name it.

    An engine reads entries of its own host's memory. An entry of another host reaches it only
    through a tier that both servers share.

    Attributes:
        address: URL by which proxies reach it; the instances of a host have the same.
        arena: name of its memory, another one after each start.
        tier: digest of the URL of its shared tier; empty: there is none.
    """

    address: str
    arena: str
    tier: str = ""

    def reaches(self, other: "Host") -> bool:
        """Return whether an engine of the other host can read what one of this host writes."""
        return self.address == other.address or (bool(self.tier) and self.tier == other.tier)


class KVMoved(NamedTuple):
    """KV blocks that an instance's NIXL connector has transferred since its start.

    Attributes:
        transfer_s: sum of the durations of all transfers, in seconds.
    """

    bytes: float = 0.0
    transfer_s: float = 0.0


class Report(NamedTuple):
    """The numbers of waiting and running requests that an instance reports.

    Attributes:
        engines: sum of both, by the number of the data-parallel engine.
        kv_tokens: number of tokens for which an engine has KV blocks; 0 if it is not reported.
        progress: digest that changes while the engines work; None if they report no counters.
        kv_moved: transferred KV blocks; zeros without a NIXL connector.
        block_tokens: number of tokens of a KV block; 0 if it is not reported.
    """

    waiting: int
    running: int
    engines: Mapping[int, int]
    kv_tokens: int = 0
    progress: int | None = None
    kv_moved: KVMoved = KVMoved()
    block_tokens: int = 0


def read_report(page: bytes) -> Report | None:
    """Return the load on a page; None if it is missing or invalid."""
    try:
        running, waiting = _requests(page, RUNNING), _requests(page, WAITING)
    except ValueError:
        return None
    if not running or running.keys() != waiting.keys():
        return None
    size, block_size = _KV_TOKENS.search(page), _BLOCK_TOKENS.search(page)
    return Report(
        sum(waiting.values()),
        sum(running.values()),
        {engine: count + waiting[engine] for engine, count in running.items()},
        int(size[1]) if size else 0,
        _read_progress(page),
        _read_kv_moved(page),
        int(block_size[1]) if block_size else 0,
    )


def _read_kv_moved(page: bytes) -> KVMoved:
    try:
        sums = (sum(value for _, value in samples(page, name)) for name in (KV_BYTES, KV_SECONDS))
        return KVMoved(*sums)
    except ValueError:
        return KVMoved()


def _read_progress(page: bytes) -> int | None:
    """Return a digest of the counters of tokens and of the use of KV blocks; None without any."""
    try:
        counters = [line for name in TOKENS for line in _lines(page, name)]
        usage = list(_lines(page, KV_USAGE))
    except ValueError:
        return None
    return xxh3_64_intdigest(b"".join(counters + usage)) if counters else None


def read_namespace(page: bytes) -> str:
    """Return the common namespace of all engines on a page; empty if there is none.

    Engines with different namespaces cannot share entries, so the result is empty.
    """
    found = read_namespaces(page)
    return next(iter(found)) if len(found) == 1 else ""


def read_namespaces(page: bytes) -> frozenset[str]:
    """Return the namespaces under which the engines of a page keep encoder outputs.

    A sample of 0 marks a namespace that the engine no longer has. An unreadable page has none.
    """
    try:
        return frozenset(
            named[1].decode() if (named := _NAMED.search(labels)) else ""
            for labels, value in samples(page, NAMESPACE)
            if value
        )
    except ValueError:
        return frozenset()


def writes_outputs(page: bytes) -> bool:
    """Return whether all engines of a page write their encoder outputs to the store."""
    try:
        return {value for _, value in samples(page, PRODUCER)} == {1.0}
    except ValueError:
        return False


def read_host(page: bytes) -> Host | None:
    """Return the common server of all engines on a page; None if there is none, or several.

    A sample of 0 marks a server that the engine no longer has.
    """
    try:
        found = {_host(labels) for labels, value in samples(page, HOST) if value}
    except ValueError:  # UnicodeDecodeError is one
        return None
    return found.pop() if len(found) == 1 else None


def _host(labels: bytes) -> Host | None:
    found = [label.search(labels) for label in _HOST_LABELS]
    texts = [match[1].decode() for match in found if match is not None]
    return Host(*texts) if len(texts) == len(found) else None


def _requests(page: bytes, name: bytes) -> dict[int, int]:
    found = {}
    for labels, value in samples(page, name):
        if not 0 <= value <= MAX_REQUESTS:
            raise ValueError("not a number of requests")
        engine = _ENGINE.search(labels)
        found[int(engine[1]) if engine else 0] = int(value)
    return found


def samples(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield the labels and the value of each sample of a metric.

    Raises:
        ValueError: it is no metrics page of one server.
    """
    for line in _lines(page, name):
        labels, _, after = line.rpartition(b"}")
        yield labels, float((*after.split(), b"")[0])


def _lines(page: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the labels and the value of each sample.

    Raises:
        ValueError: there are too many samples, or a line is too long.
    """
    begins = b"\n" + name
    found = page.find(begins)
    samples = 0
    while found >= 0:
        after = found + len(begins)
        if page[after : after + 1] in {b"{", b" "}:  # else a metric with a longer name
            samples += 1
            end = page.find(b"\n", after, after + MAX_LINE_BYTES)
            if samples > MAX_SAMPLES or end < 0:
                raise ValueError("not a metrics page of one server")
            yield page[after:end]
        found = page.find(begins, after)
