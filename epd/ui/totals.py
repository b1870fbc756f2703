"""The figures of the page that are those of `/metrics`, found there by their names.

So both say the same, and they are of all workers. Labels that are not asked for are summed over.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypedDict, get_args

from prometheus_client.metrics_core import Metric

from epd.events import ItemResult
from epd.ui.snapshot import is_work

ERROR = 400
CLIENT_CLOSED = 499

LABELS = {
    "epd_requests_total": ("path", "status"),
    "epd_items_total": ("result",),
    "epd_stage_seconds_sum": ("stage", "failed"),
    "epd_stage_seconds_count": ("stage", "failed"),
}
"""The labels that samples are told apart by here; others have none."""


class Saved(TypedDict):
    """What hits have saved; `bytes` is None where nobody counts it."""

    encodes: int
    bytes: int | None
    encode_seconds: float


class Totals(TypedDict):
    """Since the proxy began, but for what it is doing now: `in_flight`, `queued`."""

    requests: int
    failed: int
    left: int
    refused: int
    retries: int
    degraded: int
    in_flight: int
    queued: int
    loop_lag_s: float
    items: dict[str, int]
    saved: Saved


def totals(families: Iterable[Metric]) -> Totals:
    """Those of the page of metrics."""
    sums = _sums(families)

    def count(name: str, *labels: str) -> int:
        return int(sums.get((name, *labels), 0))

    statuses = Counter[int]()
    for (name, *labels), value in sums.items():
        if name == "epd_requests_total" and is_work(labels[0]):
            statuses[int(labels[1])] += int(value)
    left = statuses[CLIENT_CLOSED]
    items = {result: count("epd_items_total", result) for result in get_args(ItemResult)}
    return Totals(
        requests=statuses.total(),
        failed=sum(count for status, count in statuses.items() if status >= ERROR) - left,
        left=left,
        refused=count("epd_requests_refused_total"),
        retries=count("epd_request_retries_total"),
        degraded=count("epd_requests_degraded_total"),
        in_flight=count("epd_requests_in_flight"),
        queued=count("epd_requests_queued"),
        loop_lag_s=sums.get(("epd_event_loop_lag_seconds",), 0.0),
        items=items,
        saved=_saved(sums, items["hit"]),
    )


def _sums(families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for family in families:
        for name, labels, value, *_ in family.samples:
            key = (name, *(labels.get(label, "") for label in LABELS.get(name, ())))
            sums[key] += value
    return sums


def _saved(sums: dict[tuple[str, ...], float], hits: int) -> Saved:
    if ("epd_saved_bytes_total",) in sums:
        return Saved(
            encodes=int(sums[("epd_saved_encodes_total",)]),
            bytes=int(sums[("epd_saved_bytes_total",)]),
            encode_seconds=sums[("epd_saved_encode_seconds_total",)],
        )
    done = ("encode", "false")
    encodes = sums.get(("epd_stage_seconds_count", *done), 0)
    seconds = sums.get(("epd_stage_seconds_sum", *done), 0)
    return Saved(
        encodes=hits, bytes=None, encode_seconds=hits * seconds / encodes if encodes else 0.0
    )
