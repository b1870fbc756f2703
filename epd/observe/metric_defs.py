"""Every figure on `GET /metrics`: its name, its labels, what it says. Pure.

Names and units are as https://prometheus.io/docs/practices/naming/ has them. A label has few
values: none comes from a client.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from prometheus_client.metrics_core import Metric

Value = str | int | bool
"""Of a label, as it is counted; on the page it is text."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One family.

    Attributes:
        name: without the `_total` that a counter's samples end in.
        kind: in Prometheus' words.
        meaning: one sentence.
        labels: their names.
        of_workers: what a gauge is of several processes; what is counted is a sum.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    of_workers: Callable[[Sequence[float]], float] = math.fsum

    def family(self, values: Iterable[tuple[tuple[Value, ...], float]]) -> Metric:
        """It with these values, by those of its labels."""
        family = Metric(self.name, self.meaning, self.kind)
        sample = f"{self.name}_total" if self.kind == "counter" else self.name
        for of_labels, value in values:
            family.add_sample(sample, self.named(of_labels), float(value))
        return family

    def named(self, values: tuple[Value, ...]) -> dict[str, str]:
        """Labels and their values."""
        return dict(zip(self.labels, map(_text, values), strict=True))


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


MODEL = "model_name"

REQUESTS = Figure(
    "epd_requests",
    "counter",
    "Clients' requests that have ended; status 499 is a client that left before its end.",
    (MODEL, "path", "status"),
)
REQUEST_SECONDS = Figure(
    "epd_request_seconds",
    "histogram",
    "Clients' requests, from the head until the last byte of the answer.",
    (MODEL, "path"),
)
STAGE_SECONDS = Figure(
    "epd_stage_seconds",
    "histogram",
    "Requests to instances and to the store, and waits in the queue, until they were answered or "
    "failed; decode until the head of its answer. failed: false, true, or rejected where the error "
    "is the client request's own: invalid media, a URL that cannot be fetched.",
    (MODEL, "stage", "failed"),
)
FIRST_TOKEN_SECONDS = Figure(
    "epd_time_to_first_token_seconds",
    "histogram",
    "From a request's head to the first event of its stream that tells of tokens; where it is no "
    "stream, to the whole answer, of an endpoint with a prefill. Comments of a stream, such as "
    "vLLM's --sse-keep-alive-interval sends, do not count.",
    (MODEL,),
)
CHUNK_SECONDS = Figure(
    "epd_inter_chunk_seconds",
    "histogram",
    "Between two chunks of a stream, as they come from decode, without those that are comments "
    "alone.",
    (MODEL,),
)
KV_WAIT_SECONDS = Figure(
    "epd_kv_wait_seconds",
    "histogram",
    "From prefill's answer to decode's first token, in streams: for so long prefill keeps blocks.",
)
ITEMS = Figure(
    "epd_items",
    "counter",
    "Media items, by where their encoder outputs came from: hit, there or on its way; encoded, for "
    "this request; local, by prefill or decode. Of the endpoints with an encode stage.",
    (MODEL, "result"),
)
ITEMS_SENT = Figure(
    "epd_items_sent",
    "counter",
    "Media items, by the form in which they went on to prefill and decode: metadata, placeholder "
    "metadata in place of the media; raw, with the media, which are uploaded and preprocessed once "
    "more.",
    (MODEL, "form"),
)
ITEMS_HIT_RATIO = Figure(
    "epd_items_hit_ratio",
    "gauge",
    "Which part of a model's media items were hits, 0 to 1, since the proxy began: of the items of "
    "all workers together, and nothing before the first of them.",
    (MODEL,),
)
ENCODE_WAITS = Figure(
    "epd_encode_waits",
    "counter",
    "Of the hits, those that waited for an encode that somebody else had begun, here or at another "
    "proxy.",
    (MODEL,),
)
SAVED_ENCODES = Figure(
    "epd_saved_encodes",
    "counter",
    "Encodes that were not needed: one for each hit.",
    (MODEL,),
)
SAVED_BYTES = Figure(
    "epd_saved_bytes",
    "counter",
    "Bytes of media that a request had, base64 as it stood there, and that no instance was sent, "
    "thanks to hits.",
    (MODEL,),
)
SAVED_ENCODE_SECONDS = Figure(
    "epd_saved_encode_seconds",
    "counter",
    "An estimate: for each hit the mean time of the last encodes of its modality, as this process "
    "saw them.",
    (MODEL,),
)
STORE_OPERATIONS = Figure(
    "epd_store_operations",
    "counter",
    "What the encoder-cache store was asked: ok, timeout, error, or skipped, as it cannot be "
    "opened or is left alone.",
    ("operation", "result"),
)
STORE_BYTES = Figure(
    "epd_store_bytes",
    "counter",
    "Bytes of the entries that look-ups found: what consumers load in place of an encode.",
    ("operation",),
)
RETRIES = Figure(
    "epd_request_retries",
    "counter",
    "Requests begun anew after a failed prefill or decode, unseen by the client.",
    (MODEL,),
)
DEGRADED = Figure(
    "epd_requests_degraded",
    "counter",
    "Requests of which a stage's work was done in another stage.",
    (MODEL, "kind"),
)
POLICIES = Figure(
    "epd_policy_requests",
    "counter",
    "Requests by the coordination policy that decided what runs for them.",
    (MODEL, "policy"),
)
DISCONNECTS = Figure(
    "epd_disconnects",
    "counter",
    "Clients that left, by what their request was at: a stage; answer, the rest of it; proxy, its "
    "body, its media, the checks.",
    ("stage",),
)
KV_RELEASES = Figure(
    "epd_kv_releases",
    "counter",
    "Prefills that nobody waited for, whose blocks decode was asked to have given back: ok or "
    "failed, and then they stay until their lease ends.",
    ("result",),
)
INSTANCE_CHANGES = Figure(
    "epd_instance_changes",
    "counter",
    "How often an instance was added, removed, refused, ejected, down, on trial, healthy.",
    ("role", "state"),
)
REFUSED = Figure(
    "epd_requests_refused",
    "counter",
    "Requests that were sent away, by why.",
    ("reason",),
)
INSTANCE_UP = Figure(
    "epd_instance_up",
    "gauge",
    "1 where requests go to an instance, healthy or on trial; 0 where it is ejected or down.",
    ("role", "instance"),
    min,
)
INSTANCE_REQUESTS = Figure(
    "epd_instance_requests",
    "gauge",
    "Requests that an instance is at.",
    ("role", "instance"),
)
INSTANCE_REPORTED = Figure(
    "epd_instance_reported_requests",
    "gauge",
    "Requests that an instance says are waiting or running at it, from whomever.",
    ("role", "instance", "state"),
    max,
)
CIRCUIT_OPEN = Figure(
    "epd_circuit_open",
    "gauge",
    "1 while the store is left alone, as it failed again and again: store_questions, or "
    "store_changes. Nothing without a store.",
    ("circuit",),
    max,
)
IN_FLIGHT = Figure("epd_requests_in_flight", "gauge", "Requests that are being served.")
QUEUED = Figure("epd_requests_queued", "gauge", "Requests that wait for their turn.")
BODY_BYTES = Figure(
    "epd_body_bytes_in_flight", "gauge", "Bytes of the bodies of requests that are being served."
)
LOOP_LAG = Figure(
    "epd_event_loop_lag_seconds",
    "gauge",
    "The longest that the event loop kept others waiting, of the last 15 s.",
    of_workers=max,
)
BACKGROUND_FAILURES = Figure(
    "epd_background_failures",
    "counter",
    "Unexpected exceptions in background tasks of the proxy, by task. Each cause is in the log "
    "with its traceback. A probe or a load report that raises is one that failed; other tasks are "
    "restarted after 1 s, or after up to 60 s where they raise again and again.",
    ("task",),
)
CONVERSATIONS = Figure(
    "epd_conversations", "gauge", "Conversations that a next turn may find; of those in Redis none."
)
CONVERSATION_TURNS = Figure(
    "epd_conversation_turns",
    "counter",
    "Turns by what became of the blocks that decode held of the last one: hit, prefill read them; "
    "miss, there were none; stale, decode was gone or had been started anew; changed, the prompt "
    "does not begin with theirs, or nobody could tell; failed, prefill could not read them; "
    "rested, prefill was not told of them, as it could not read others a while ago; unknown, the "
    "store gave no answer.",
    ("result",),
)
CONVERSATIONS_EVICTED = Figure(
    "epd_conversations_evicted",
    "counter",
    "Conversations dropped that no turn has found: there were too many, their time was over, or "
    "their decode instance has gone. Of those in Redis none: it expires them itself.",
)
RELOADED = Figure(
    "epd_config_last_reload_success",
    "gauge",
    "1 where all files that were read last could be used; 0: older ones are in force.",
    of_workers=min,
)
BUILD = Figure("epd_build_info", "gauge", "1, of this version.", ("version",), max)

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        figure.name: figure
        for figure in (
            REQUESTS,
            REQUEST_SECONDS,
            FIRST_TOKEN_SECONDS,
            CHUNK_SECONDS,
            STAGE_SECONDS,
            KV_WAIT_SECONDS,
            ITEMS,
            ITEMS_HIT_RATIO,
            ITEMS_SENT,
            ENCODE_WAITS,
            SAVED_ENCODES,
            SAVED_BYTES,
            SAVED_ENCODE_SECONDS,
            STORE_OPERATIONS,
            STORE_BYTES,
            CIRCUIT_OPEN,
            RETRIES,
            DEGRADED,
            POLICIES,
            DISCONNECTS,
            KV_RELEASES,
            INSTANCE_CHANGES,
            INSTANCE_UP,
            INSTANCE_REQUESTS,
            INSTANCE_REPORTED,
            IN_FLIGHT,
            QUEUED,
            BODY_BYTES,
            REFUSED,
            LOOP_LAG,
            BACKGROUND_FAILURES,
            CONVERSATIONS,
            CONVERSATION_TURNS,
            CONVERSATIONS_EVICTED,
            RELOADED,
            BUILD,
        )
    }
)
"""All of them, by name, in the order of the reference."""
