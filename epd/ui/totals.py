"""The figures of the page that are those of `/metrics`, found there by their names.

So both say the same, and they are of all workers. Labels that are not asked for are summed over.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypedDict, get_args

from prometheus_client.metrics_core import Metric

from epd.events import ItemResult, MediaForm
from epd.ui.snapshot import CLIENT_CLOSED, CLIENT_ERROR, SERVER_ERROR, is_work

LABELS = {
    "epd_requests_total": ("path", "status"),
    "epd_items_total": ("result",),
    "epd_items_sent_total": ("form",),
    "epd_conversation_turns_total": ("result",),
}
"""The labels that samples are told apart by here; others have none."""


class Saved(TypedDict):
    """What hits have saved; `bytes` of media that were sent to no instance."""

    encodes: int
    bytes: int
    encode_seconds: float


class ConversationsShown(TypedDict):
    """Conversations: `kept` of them now, 0 where nobody counts; turns, and those that hit."""

    kept: int
    turns: int
    hit: int


class Totals(TypedDict):
    """Since the proxy began, but for what it is doing now: `in_flight`, `queued`.

    `media` counts items by the form in which they went on to prefill and decode.
    `failed` counts 5xx, `rejected` 4xx, `left` 499; `refused` is admission control's part of both.
    """

    requests: int
    failed: int
    rejected: int
    left: int
    refused: int
    retries: int
    degraded: int
    in_flight: int
    queued: int
    loop_lag_s: float
    items: dict[str, int]
    media: dict[str, int]
    saved: Saved
    conversations: ConversationsShown


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
        failed=sum(count for status, count in statuses.items() if status >= SERVER_ERROR),
        rejected=sum(
            count for status, count in statuses.items() if CLIENT_ERROR <= status < SERVER_ERROR
        )
        - left,
        left=left,
        refused=count("epd_requests_refused_total"),
        retries=count("epd_request_retries_total"),
        degraded=count("epd_requests_degraded_total"),
        in_flight=count("epd_requests_in_flight"),
        queued=count("epd_requests_queued"),
        loop_lag_s=sums.get(("epd_event_loop_lag_seconds",), 0.0),
        items=items,
        media={form: count("epd_items_sent_total", form) for form in get_args(MediaForm)},
        saved=_saved(sums),
        conversations=ConversationsShown(
            kept=count("epd_conversations"),
            turns=int(
                sum(sums[name] for name in sums if name[0] == "epd_conversation_turns_total")
            ),
            hit=count("epd_conversation_turns_total", "hit"),
        ),
    )


def _sums(families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for family in families:
        for name, labels, value, *_ in family.samples:
            key = (name, *(labels.get(label, "") for label in LABELS.get(name, ())))
            sums[key] += value
    return sums


def _saved(sums: Mapping[tuple[str, ...], float]) -> Saved:
    """A counter that has counted nothing is not on the page."""
    return Saved(
        encodes=int(sums.get(("epd_saved_encodes_total",), 0)),
        bytes=int(sums.get(("epd_saved_bytes_total",), 0)),
        encode_seconds=sums.get(("epd_saved_encode_seconds_total",), 0.0),
    )
