"""Gauges and counters that are read from their owners at scrape time."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from epd.conversations.conversations import RESULTS, Conversations
from epd.edge.admission import REFUSALS, Admission
from epd.encoder_cache.client import EncoderCache
from epd.encoder_cache.hosts import HostStores
from epd.observe import metric_defs
from epd.observe.metric_defs import MetricDef
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
    yield metric_defs.IN_FLIGHT.metric_family([((), admission.queue.running)])
    yield metric_defs.QUEUED.metric_family([((), admission.queue.queued)])
    yield metric_defs.BODY_BYTES.metric_family([((), admission.body_bytes)])
    yield metric_defs.REFUSED.metric_family(
        [((reason,), admission.refused[reason]) for reason in REFUSALS]
    )


def instance_metrics(table: InstanceTable) -> Iterator[Metric]:
    """Yield state, loads and prompts of each registered instance, and each stage's backlog."""
    instances = [(instance, table.load(instance)) for instance in table.of_roles(*Role)]

    def family(definition: MetricDef, value: Callable[[Instance, Load], float | None]) -> Metric:
        return definition.metric_family(
            [
                (_labels(instance), found)
                for instance, load in instances
                if (found := value(instance, load)) is not None
            ]
        )

    yield family(metric_defs.INSTANCE_UP, lambda instance, _: table.state(instance) in SERVING)
    yield family(
        metric_defs.INSTANCE_REQUESTS, lambda instance, _: table.under_way.get(instance, 0)
    )
    yield metric_defs.INSTANCE_REPORTED.metric_family(
        [
            ((*_labels(instance), state), getattr(load.report, state))
            for instance, load in instances
            if load.report is not None
            for state in ("waiting", "running")
        ]
    )
    yield family(metric_defs.KV_BANDWIDTH, lambda _, load: load.kv_bytes_per_s)
    yield metric_defs.ENCODE_BACKLOG.metric_family(_per_healthy(table, encode_work_s, Role.ENCODE))
    prefills = (Role.PREFILL,) if table.has(Role.PREFILL) else ANSWERING
    yield metric_defs.PREFILL_BACKLOG.metric_family(
        _per_healthy(table, lambda loads: sum(load.pending_tokens for load in loads), *prefills)
    )
    yield family(metric_defs.PREFIX_TOKENS, lambda _, load: load.prompts.tokens or None)
    yield family(
        metric_defs.PREFIX_TOKENS_MATCHED,
        lambda _, load: load.prompts.matched if load.prompts.tokens else None,
    )


def _labels(instance: Instance) -> tuple[str, str]:
    return instance.role, instance.url


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
            for instance in table.of_roles(*Role)
            if (labels := _labels(instance)) in counts
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


def store_metrics(cache: EncoderCache | HostStores | None) -> Iterator[Metric]:
    """Yield the operations of the encoder store and the states of its circuits.

    Without a store the families have no samples.
    """
    yield metric_defs.STORE_OPERATIONS.metric_family(cache.operations.items() if cache else ())
    yield metric_defs.STORE_BYTES.metric_family([(("lookup",), cache.found_bytes)] if cache else ())
    yield metric_defs.CIRCUIT_OPEN.metric_family(
        [((name,), is_open) for name, is_open in cache.open_circuits.items()] if cache else ()
    )


def quarantine_metrics(fatal: FatalRequests) -> Iterator[Metric]:
    """Yield the number of tenants in quarantine."""
    yield metric_defs.QUARANTINED.metric_family([((), fatal.quarantined_tenants)])


def conversation_metrics(conversations: Conversations) -> Iterator[Metric]:
    """Yield the results of turns, and the stored conversations except those in Redis."""
    count, results = conversations.store.entry_count, conversations.results
    yield metric_defs.CONVERSATIONS.metric_family([] if count is None else [((), count)])
    yield metric_defs.CONVERSATION_TURNS.metric_family(
        [((result,), results[result]) for result in RESULTS]
    )
    yield metric_defs.CONVERSATIONS_EVICTED.metric_family([((), conversations.store.dropped_count)])
