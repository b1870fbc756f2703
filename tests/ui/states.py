"""States of a fleet, in the form that the page receives."""

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from epd.events import InstanceChanged, RequestRecord, StageDone
from epd.ui.recent import InstanceState, Recent
from epd.ui.state import (
    WORST,
    EngineShown,
    Looked,
    Moment,
    StoreShown,
    UiState,
    metric_totals,
    state,
)

NOW_S = 5000.0
UNIX_S = 1e9


CAUSES = {"ejected": "timeouts without progress", "down": "connection refused"}


class Clock:
    """Monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return UNIX_S - NOW_S + self.now_s


def stage(
    name: str, instance: str, began_s: float, seconds: float, error: str | None = None
) -> StageDone:
    return StageDone(name, instance, began_s, seconds, error)  # type: ignore[arg-type]


def done(
    request_id: str = "r",
    *stages: StageDone,
    seconds: float = 0.5,
    error: str | None = None,
    path: str = "/v1/chat/completions",
    **more: object,
) -> RequestRecord:
    fields: dict[str, object] = {
        "request_id": request_id,
        "engine_id": f"{request_id}-1",
        "method": "POST",
        "path": path,
        "status": 200 if error is None else 502,
        "seconds": seconds,
        "error": error,
        "reason": None if error is None else "the instance broke off",
        "stages": stages,
        "items": {"hit": 1, "encoded": 1},
        "stream": error is None,
        "first_token_s": 0.2,
        "retries": 0,
    }
    return RequestRecord(**{**fields, **more})  # type: ignore[arg-type]


def families() -> list[Metric]:
    items = CounterMetricFamily("epd_items", "", labels=["result"])
    items.add_metric(["hit"], 830)
    items.add_metric(["encoded"], 170)
    sent = CounterMetricFamily("epd_items_sent", "", labels=["form"])
    sent.add_metric(["metadata"], 930)
    sent.add_metric(["raw"], 70)
    requests = CounterMetricFamily("epd_requests", "", labels=["path", "status"])
    requests.add_metric(["/v1/chat/completions", "200"], 900)
    requests.add_metric(["/v1/chat/completions", "502"], 4)
    requests.add_metric(["/v1/chat/completions", "499"], 2)
    requests.add_metric(["/v1/chat/completions", "400"], 6)
    requests.add_metric(["/v1/chat/completions", "429"], 1)
    requests.add_metric(["/metrics", "200"], 77)
    requests.add_metric(["/v1/models", "200"], 50)
    requests.add_metric(["/v1/media", "200"], 3)
    turns = CounterMetricFamily("epd_conversation_turns", "", labels=["result"])
    turns.add_metric(["hit"], 45)
    turns.add_metric(["miss"], 15)
    return [
        items,
        sent,
        requests,
        turns,
        GaugeMetricFamily("epd_conversations", "", 12),
        GaugeMetricFamily("epd_requests_in_flight", "", 12),
        CounterMetricFamily("epd_saved_encodes", "", 830),
        CounterMetricFamily("epd_saved_bytes", "", 312_400_000),
        CounterMetricFamily("epd_saved_encode_seconds", "", 148.2),
    ]


def large(each: int = 20, hostile: str = "") -> UiState:
    """Return a fleet with `each` instances of each role, in every state, with all details.

    Args:
        each: number of instances per role.
        hostile: text in all fields that come from outside.
    """
    clock = Clock()
    recent = Recent(clock, clock.unix)
    urls = {
        role: [f"http://{hostile}10.0.{number}.{role[0]}:8000" for number in range(each)]
        for role in ("encode", "prefill", "decode")
    }
    for number in range(70):
        clock.now_s = NOW_S - 70 + number
        began_s = clock.now_s - 0.4
        spans = [
            stage("store", "lookup", began_s, 0.004),
            *(stage("encode", urls["encode"][one % each], began_s + 0.01, 0.1) for one in range(3)),
            stage("prefill", urls["prefill"][number % each], began_s + 0.12, 0.05),
            stage("decode", urls["decode"][number % each], began_s + 0.18, 0.03),
        ]
        error = f"decode_failed{hostile}" if number % 9 == 0 else None
        for one in spans:
            recent.stage_done(one)
        recent.request_done(
            done(
                f"request-{number}{hostile}", *spans, error=error, reason=f"it broke off {hostile}"
            )
        )
    clock.now_s = NOW_S - 1
    seen = []
    for role, of_role in urls.items():
        for number, url in enumerate(of_role):
            condition = WORST[number % 4]
            seen.append(
                InstanceState(
                    role=role,
                    url=url,
                    state=condition,
                    cause=CAUSES.get(condition, ""),
                    requests=number % 5,
                    prompt_tokens=5000 * number,
                    prefix_tokens=4000 * number,
                    precise=bool(number % 2),
                    kv_bytes_per_s=0.48e9 if role == "decode" else None,
                    writes=False,
                )
            )
            recent.instance_changed(
                InstanceChanged(url, role, condition, cause=CAUSES.get(condition, ""))
            )
    looked = Looked(
        [used_store("10.0.0.1:7000", 0.42), used_store("10.0.0.2:7000", None)],
        {one["url"]: engine(number) for number, one in enumerate(seen)},
    )
    totals = metric_totals(families())
    return state([recent.snapshot(seen)], totals, "shm+tcp", Moment(NOW_S, UNIX_S), looked)


def engine(number: int) -> EngineShown:
    return EngineShown(
        version="0.33.0",
        waiting=number % 3,
        kv_usage=0.1 * (number % 10),
        prefix_hits=0.72,
    )


def used_store(name: str, share: float | None) -> StoreShown:
    """Return a store of 4 GB with this share of it in use; None: it does not answer."""
    known = share is not None
    return StoreShown(
        name=name,
        known=known,
        bypassed=not known,
        entries=1234 if known else None,
        bytes=round(4e9 * share) if share is not None else None,
        max_bytes=4_000_000_000 if known else None,
        evictions=56 if known else None,
        refused=0 if known else None,
    )
