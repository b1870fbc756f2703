"""Gauges and counters that are read from their owners at scrape time."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from epd.conversations.conversations import RESULTS, Conversations
from epd.edge.admission import REFUSALS, Admission
from epd.encoder_cache.client import EncoderCache
from epd.observe import metric_defs
from epd.routing.fatal import FatalRequests
from epd.routing.forecast import encode_work_s
from epd.routing.health import HealthState
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.load import Load
from epd.routing.table import InstanceTable

EventCounts = Callable[[], Mapping[tuple[Role, str], Mapping[str, int]]]
"""Returns the number of KV events and of faults, by the key of an instance and kind."""

SERVING = frozenset({HealthState.HEALTHY, HealthState.TRIAL})


def admission_metrics(admission: Admission) -> Iterator[Metric]:
    """Yield the requests in flight, the queued requests and the rejections."""
    yield metric_defs.IN_FLIGHT.metric_family([((), admission.door.inside)])
    yield metric_defs.QUEUED.metric_family([((), admission.door.waiting)])
    yield metric_defs.BODY_BYTES.metric_family([((), admission.body_bytes)])
    yield metric_defs.REFUSED.metric_family(
        [((reason,), admission.refused[reason]) for reason in REFUSALS]
    )


def instance_metrics(table: InstanceTable) -> Iterator[Metric]:
    """Yield state, loads and prompts of each registered instance, and each stage's backlog."""
    instances = _labelled(table)
    yield metric_defs.INSTANCE_UP.metric_family(
        [(labels, table.state(instance) in SERVING) for instance, labels in instances]
    )
    yield metric_defs.INSTANCE_REQUESTS.metric_family(
        [(labels, table.under_way.get(instance, 0)) for instance, labels in instances]
    )
    reports = [(table.load(instance).report, labels) for instance, labels in instances]
    yield metric_defs.INSTANCE_REPORTED.metric_family(
        [
            ((*labels, state), getattr(report, state))
            for report, labels in reports
            if report is not None
            for state in ("waiting", "running")
        ]
    )
    bandwidths = [(labels, table.load(instance).kv_bytes_per_s) for instance, labels in instances]
    yield metric_defs.KV_BANDWIDTH.metric_family(
        [(labels, bandwidth) for labels, bandwidth in bandwidths if bandwidth is not None]
    )
    yield metric_defs.ENCODE_BACKLOG.metric_family(_per_healthy(table, encode_work_s, Role.ENCODE))
    prefills = (Role.PREFILL,) if table.has(Role.PREFILL) else ANSWERING
    yield metric_defs.PREFILL_BACKLOG.metric_family(
        _per_healthy(table, lambda loads: sum(load.pending_tokens for load in loads), *prefills)
    )
    prompts = [(labels, table.load(instance).prompts) for instance, labels in instances]
    prompts = [(labels, found) for labels, found in prompts if found.tokens]
    yield metric_defs.PREFIX_TOKENS.metric_family(
        [(labels, found.tokens) for labels, found in prompts]
    )
    yield metric_defs.PREFIX_TOKENS_MATCHED.metric_family(
        [(labels, found.matched) for labels, found in prompts]
    )


def _labelled(table: InstanceTable) -> list[tuple[Instance, tuple[str, str]]]:
    return [(instance, (instance.role, instance.url)) for instance in table.of_roles(*Role)]


def _per_healthy(
    table: InstanceTable, work: Callable[[Sequence[Load]], float], *roles: Role
) -> list[tuple[tuple[()], float]]:
    members = table.all(*roles)
    if not members:
        return []
    healthy = sum(table.state(candidate.instance) in SERVING for candidate in members)
    return [((), work([candidate.load for candidate in members]) / max(1, healthy))]


EVENTS = ("stored", "removed", "cleared")
FAULTS = ("disconnected", "gap", "malformed", "restarted")


def kv_event_metrics(table: InstanceTable, event_counts: EventCounts) -> Iterator[Metric]:
    """Yield the KV events of the instances, and whether they tell the content of prefix caches.

    Without events the families have no samples.
    """
    counts = event_counts()
    yield metric_defs.PREFIX_CACHE_PRECISE.metric_family(
        [
            (labels, table.load(instance).precise)
            for instance, labels in _labelled(table)
            if labels in counts
        ]
    )
    for family, kinds in ((metric_defs.KV_EVENTS, EVENTS), (metric_defs.KV_EVENT_FAULTS, FAULTS)):
        yield family.metric_family(
            [
                ((*labels, kind), found.get(kind, 0))
                for labels, found in counts.items()
                for kind in kinds
            ]
        )


def store_metrics(cache: EncoderCache | None) -> Iterator[Metric]:
    """Yield the operations of the encoder store and the states of its circuits.

    Without a store the families have no samples.
    """
    operations = {} if cache is None else cache.operations
    found = {} if cache is None else {("lookup",): cache.found_bytes}
    circuits = {} if cache is None else cache.open_circuits
    yield metric_defs.STORE_OPERATIONS.metric_family(operations.items())
    yield metric_defs.STORE_BYTES.metric_family(found.items())
    yield metric_defs.CIRCUIT_OPEN.metric_family(
        [((name,), is_open) for name, is_open in circuits.items()]
    )


def quarantine_metrics(fatal: FatalRequests) -> Iterator[Metric]:
    """Yield the number of tenants in quarantine."""
    yield metric_defs.QUARANTINED.metric_family([((), fatal.quarantined_tenants)])


def conversation_metrics(conversations: Conversations) -> Iterator[Metric]:
    """Yield the results of turns, and the stored conversations except those in Redis."""
    kept, results = conversations.store.entry_count, conversations.results
    yield metric_defs.CONVERSATIONS.metric_family([] if kept is None else [((), kept)])
    yield metric_defs.CONVERSATION_TURNS.metric_family(
        [((result,), results[result]) for result in RESULTS]
    )
    yield metric_defs.CONVERSATIONS_EVICTED.metric_family([((), conversations.store.dropped_count)])
