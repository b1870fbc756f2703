"""Definitions of all metrics on `GET /metrics`: name, kind, labels and HELP text.

Names and units follow https://prometheus.io/docs/practices/naming/. Labels have few values, and
clients cannot create new ones.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

from prometheus_client.metrics_core import Metric

Value = str | int | bool
"""Value of a label when it is counted. On the page it is text."""


@dataclass(frozen=True, slots=True)
class MetricDef:
    """Definition of a metric family.

    Attributes:
        kind: type of the family, as Prometheus names it.
        name: name without the suffix `_total` of a counter's samples.
        meaning: HELP text: what is counted, unit and labels.
        labels: names of the labels.
        of_workers: function that combines a gauge of several processes. Counters and histograms are
            always summed.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    of_workers: Callable[[Sequence[float]], float] = math.fsum

    def metric_family(self, values: Iterable[tuple[tuple[Value, ...], float]]) -> Metric:
        """Return the family with these values, each with its label values."""
        family = Metric(self.name, self.meaning, self.kind)
        sample = f"{self.name}_total" if self.kind == "counter" else self.name
        for of_labels, value in values:
            family.add_sample(sample, self.label_values(of_labels), float(value))
        return family

    def label_values(self, values: tuple[Value, ...]) -> dict[str, str]:
        return dict(zip(self.labels, map(_text, values), strict=True))


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_counter = partial(MetricDef, "counter")
_gauge = partial(MetricDef, "gauge")
_histogram = partial(MetricDef, "histogram")

MODEL = "model_name"

REQUESTS = _counter(
    "epd_requests",
    "Completed client requests by status. Status 499: the client disconnected before the end of "
    "the response.",
    (MODEL, "path", "status"),
)
REQUEST_SECONDS = _histogram(
    "epd_request_seconds",
    "Duration of client requests in seconds, from the request head to the last byte of the "
    "response.",
    (MODEL, "path"),
)
FIRST_TOKEN_SECONDS = _histogram(
    "epd_time_to_first_token_seconds",
    "Time in seconds from the request head to the first event of the stream with tokens. Without "
    "streaming: to the complete response, for endpoints with a prefill. Comments in a stream, such "
    "as those of vLLM's --sse-keep-alive-interval, are ignored.",
    (MODEL,),
)
CHUNK_SECONDS = _histogram(
    "epd_inter_chunk_seconds",
    "Time in seconds between two chunks of a stream, as received from decode. Chunks with only "
    "comments are ignored.",
    (MODEL,),
)
STAGE_SECONDS = _histogram(
    "epd_stage_seconds",
    "Duration of upstream requests, store operations and queue waits in seconds, until the answer "
    "or failure; for decode, until the head of the response. Label failed: false; true; rejected "
    "if the client request itself is invalid, such as invalid media or a URL that cannot be "
    "fetched.",
    (MODEL, "stage", "failed"),
)
KV_WAIT_SECONDS = _histogram(
    "epd_kv_wait_seconds",
    "Time in seconds from prefill's response to decode's first token, for streams. Prefill keeps "
    "the request's KV blocks for this time.",
)
ITEMS = _counter(
    "epd_items",
    "Media items by source of their encoder output, for endpoints with an encode stage. hit: "
    "stored, or already being encoded; encoded: by an encode instance, for this request; local: "
    "by prefill or decode.",
    (MODEL, "result"),
)
ITEMS_SENT = _counter(
    "epd_items_sent",
    "Media items by the form in which they are sent to prefill and decode. metadata: placeholder "
    "metadata instead of the media; raw: the media themselves, which are uploaded and preprocessed "
    "again.",
    (MODEL, "form"),
)
ENCODE_DECISIONS = _counter(
    "epd_encode_decisions",
    "Media items that are not in the store, by where the policy (cost) has them encoded, and those "
    "that are left to the consumer because of the queue of the encode instances. Label "
    "decision: encode, by an encode instance; local, by prefill or PD. The guide to policies "
    "describes the values of reason.",
    (MODEL, "decision", "reason"),
)
ENCODE_WAITS = _counter(
    "epd_encode_waits",
    "Hits that waited for an encode already under way for another request, at this or another "
    "proxy.",
    (MODEL,),
)
SAVED_ENCODES = _counter(
    "epd_saved_encodes", "Encodes saved by the cache: one for each hit.", (MODEL,)
)
SAVED_BYTES = _counter(
    "epd_saved_bytes",
    "Bytes of media of client requests, base64 as received, that were sent to no instance because "
    "of hits.",
    (MODEL,),
)
SAVED_ENCODE_SECONDS = _counter(
    "epd_saved_encode_seconds",
    "Estimated encode time saved by hits, in seconds: for each hit the moving mean of recent "
    "encode times of its modality, as measured by this process.",
    (MODEL,),
)
STORE_OPERATIONS = _counter(
    "epd_store_operations",
    "Operations on the encoder store by result: ok; timeout; error; skipped, because the "
    "store cannot be opened or its circuit is open.",
    ("operation", "result"),
)
STORE_BYTES = _counter(
    "epd_store_bytes",
    "Bytes of the entries found by lookups, which consumers load instead of encoding.",
    ("operation",),
)
CIRCUIT_OPEN = _gauge(
    "epd_circuit_open",
    "1 while the circuit of the store is open after repeated failures. Label circuit: "
    "store_questions or store_changes. Absent without a store.",
    ("circuit",),
    max,
)
RETRIES = _counter(
    "epd_request_retries",
    "Retries of requests after a failed prefill or decode, invisible to the client.",
    (MODEL,),
)
DEGRADED = _counter(
    "epd_requests_degraded",
    "Requests with a stage replaced by another stage. Label kind: encode-local, media encoded by "
    "prefill or decode; prefill-local, prompt prefilled by decode.",
    (MODEL, "kind"),
)
POLICIES = _counter(
    "epd_policy_requests",
    "Requests by the coordination policy that selected their stages.",
    (MODEL, "policy"),
)
DISCONNECTS = _counter(
    "epd_disconnects",
    "Client disconnects by the activity of the request. Label stage: a stage; answer, the rest of "
    "the response; proxy, reading the body, fetching media or validation.",
    ("stage",),
)
KV_RELEASES = _counter(
    "epd_kv_releases",
    "KV releases requested from decode for abandoned prefills, by result: ok; failed, and the "
    "blocks stay until their lease expires.",
    ("result",),
)
INSTANCE_CHANGES = _counter(
    "epd_instance_changes",
    "State changes of instances: added, removed, refused, ejected, down, trial or healthy.",
    ("role", "state"),
)
QUARANTINED = _gauge(
    "epd_quarantined_tenants",
    "Tenants in quarantine, counted by each worker: three instances died of their requests, which "
    "are served one at a time by one instance.",
)
INSTANCE_UP = _gauge(
    "epd_instance_up",
    "1 if an instance gets requests (healthy or on trial); 0 if it is ejected or down.",
    ("role", "instance"),
    min,
)
INSTANCE_REQUESTS = _gauge(
    "epd_instance_requests",
    "Requests of this proxy that are under way at an instance.",
    ("role", "instance"),
)
INSTANCE_REPORTED = _gauge(
    "epd_instance_reported_requests",
    "Requests waiting or running at an instance, as reported by the instance; requests of other "
    "clients are included.",
    ("role", "instance", "state"),
    max,
)
KV_BANDWIDTH = _gauge(
    "epd_kv_transfer_bytes_per_second",
    "Mean bandwidth of the last KV transfers that an instance reported: bytes divided by seconds "
    "of transfer. Transfers of a few blocks show the delay, not the bandwidth. Absent before the "
    "first transfer, and for other connectors than NIXL.",
    ("role", "instance"),
    max,
)
ENCODE_BACKLOG = _gauge(
    "epd_encode_backlog_seconds",
    "Predicted encode work of this proxy, queued or running at encode instances, in seconds for "
    "each healthy one. The sum over all proxies is the backlog of the fleet. Absent without encode "
    "instances.",
)
PREFILL_BACKLOG = _gauge(
    "epd_prefill_backlog_tokens",
    "Estimated prompt tokens of this proxy, queued or running at the instances that prefill, for "
    "each healthy one; with the balance content, without those in a prefix cache. A prompt counts "
    "until the head of the response: at PD without streaming, until the end of decode. The sum "
    "over all proxies is the backlog of the fleet. Absent without such instances.",
)
PREFIX_TOKENS = _counter(
    "epd_prefix_tokens",
    "Estimated prompt tokens of the requests sent to an instance that is chosen by content "
    "(--prefill-balance, --decode-balance).",
    ("role", "instance"),
)
PREFIX_TOKENS_MATCHED = _counter(
    "epd_prefix_tokens_matched",
    "The part of epd_prefix_tokens_total that this proxy expected in the prefix cache of the "
    "instance.",
    ("role", "instance"),
)
PREFIX_CACHE_PRECISE = _gauge(
    "epd_prefix_cache_precise",
    "1 while KV events of an instance tell what its prefix cache holds, 0 while that is estimated. "
    "Absent without --kv-events.",
    ("role", "instance"),
    min,
)
KV_EVENTS = _counter(
    "epd_kv_events",
    "KV events of an instance that this proxy has read, for each worker. Label event: stored, "
    "removed or cleared. Absent without --kv-events.",
    ("role", "instance", "event"),
)
KV_EVENT_FAULTS = _counter(
    "epd_kv_event_faults",
    "Faults of an instance's KV events, after which its prefix cache is estimated. Label reason: "
    "disconnected, gap (events were lost), malformed or restarted (the engine is new).",
    ("role", "instance", "reason"),
)
IN_FLIGHT = _gauge("epd_requests_in_flight", "Requests that are being processed.")
QUEUED = _gauge("epd_requests_queued", "Requests waiting for admission.")
BODY_BYTES = _gauge(
    "epd_body_bytes_in_flight",
    "Bytes in memory: bodies of requests that are being processed, and answers without a stream.",
)
REFUSED = _counter(
    "epd_requests_refused", "Requests rejected by admission control, by reason.", ("reason",)
)
LOOP_LAG = _gauge(
    "epd_event_loop_lag_seconds",
    "Longest delay of the event loop in the last 15 s, in seconds.",
    of_workers=max,
)
BACKGROUND_FAILURES = _counter(
    "epd_background_failures",
    "Unexpected exceptions in background tasks of the proxy, by task. The log has each cause with "
    "its traceback. A probe or load report that raises counts as failed; other tasks are "
    "restarted after 1 s, and after up to 60 s if they raise repeatedly.",
    ("task",),
)
LOG_LINES_DROPPED = _counter(
    "epd_log_lines_dropped",
    "Log lines dropped because 10,000 lines already waited: the reader of standard error is slower "
    "than the log, or has stopped reading.",
)
CONVERSATIONS = _gauge(
    "epd_conversations",
    "Conversations in memory that a next turn can find. Absent for conversations in Redis.",
)
CONVERSATION_TURNS = _counter(
    "epd_conversation_turns",
    "Turns of conversations, by what became of the KV blocks that decode kept of the previous "
    "turn. hit: read by prefill; miss: there were none. The guide to conversations describes the "
    "other results.",
    ("result",),
)
CONVERSATIONS_EVICTED = _counter(
    "epd_conversations_evicted",
    "Conversations dropped before a next turn found them: too many, or expired. "
    "0 for conversations in Redis, which expires them itself.",
)
RELOADED = _gauge(
    "epd_config_last_reload_success",
    "1 if the last reload accepted all files; 0 if it did not, and older files are in force.",
    of_workers=min,
)
BUILD = _gauge(
    "epd_build_info", "Always 1. Label version: version of the proxy.", ("version",), max
)

METRIC_DEFS: Mapping[str, MetricDef] = MappingProxyType(
    {value.name: value for value in tuple(globals().values()) if isinstance(value, MetricDef)}
)
"""Definitions of all metrics by name, in the order of the reference: that of this module."""
