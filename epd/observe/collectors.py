"""Collectors that read gauges and counters from their owners at scrape time."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.conversations.conversations import RESULTS, Conversations
from epd.edge.admission import REFUSALS, Admission
from epd.encoder_cache.client import EncoderCache
from epd.observe import metric_defs
from epd.routing.forecast import encode_work_s, pending_tokens
from epd.routing.health import HealthState
from epd.routing.instances import ANSWERING, Role
from epd.routing.kv_blocks import EventCounts
from epd.routing.load import Load
from epd.routing.table import InstanceTable

SERVING = frozenset({HealthState.HEALTHY, HealthState.TRIAL})


class AdmissionGlance(Collector):
    """Requests in flight, queued requests and rejections, from admission control."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        door, refused = self._admission.door, self._admission.refused
        yield metric_defs.IN_FLIGHT.metric_family([((), door.inside)])
        yield metric_defs.QUEUED.metric_family([((), door.waiting)])
        yield metric_defs.BODY_BYTES.metric_family([((), self._admission.body_bytes)])
        yield metric_defs.REFUSED.metric_family(
            [((reason,), refused[reason]) for reason in REFUSALS]
        )


class InstancesGlance(Collector):
    """State, load, reported load and prompts of each instance, and the backlog of each stage."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of the registered instances."""
        instances = [
            (instance, (instance.role, instance.url)) for instance in self._table.of_roles(*Role)
        ]
        under_way = self._table.under_way
        yield metric_defs.INSTANCE_UP.metric_family(
            [(labels, self._table.state(instance) in SERVING) for instance, labels in instances]
        )
        yield metric_defs.INSTANCE_REQUESTS.metric_family(
            [(labels, under_way.get(instance, 0)) for instance, labels in instances]
        )
        reports = [(self._table.load(instance).report, labels) for instance, labels in instances]
        yield metric_defs.INSTANCE_REPORTED.metric_family(
            [
                ((*labels, state), getattr(report, state))
                for report, labels in reports
                if report is not None
                for state in ("waiting", "running")
            ]
        )
        yield metric_defs.ENCODE_BACKLOG.metric_family(
            self._per_healthy(encode_work_s, Role.ENCODE)
        )
        prefills = (Role.PREFILL,) if self._table.has(Role.PREFILL) else ANSWERING
        yield metric_defs.PREFILL_BACKLOG.metric_family(
            self._per_healthy(pending_tokens, *prefills)
        )
        prompts = [(labels, self._table.load(instance).prompts) for instance, labels in instances]
        prompts = [(labels, found) for labels, found in prompts if found.tokens]
        yield metric_defs.PREFIX_TOKENS.metric_family(
            [(labels, found.tokens) for labels, found in prompts]
        )
        yield metric_defs.PREFIX_TOKENS_MATCHED.metric_family(
            [(labels, found.matched) for labels, found in prompts]
        )

    def _per_healthy(
        self, work: Callable[[Sequence[Load]], float], *roles: Role
    ) -> list[tuple[tuple[()], float]]:
        """Return the work of all instances of these roles, divided by the healthy ones."""
        members = self._table.all(*roles)
        if not members:
            return []
        healthy = sum(self._table.state(candidate.instance) in SERVING for candidate in members)
        return [((), work([candidate.load for candidate in members]) / max(1, healthy))]


EVENTS = ("stored", "removed", "cleared")
FAULTS = ("disconnected", "gap", "malformed", "restarted")


class KVEventsGlance(Collector):
    """KV events of the instances, and whether they tell the content of prefix caches."""

    def __init__(self, table: InstanceTable, counts: EventCounts) -> None:
        self._table = table
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the current values. Without events the families have no samples."""
        counts = self._counts()
        instances = [
            (instance, (instance.role, instance.url)) for instance in self._table.of_roles(*Role)
        ]
        yield metric_defs.PREFIX_CACHE_PRECISE.metric_family(
            [
                (labels, self._table.load(instance).precise)
                for instance, labels in instances
                if labels in counts
            ]
        )
        for family, kinds in (
            (metric_defs.KV_EVENTS, EVENTS),
            (metric_defs.KV_EVENT_FAULTS, FAULTS),
        ):
            yield family.metric_family(
                [
                    ((*labels, kind), found.get(kind, 0))
                    for labels, found in counts.items()
                    for kind in kinds
                ]
            )


class StoreGlance(Collector):
    """Operations of the encoder store and the states of its circuits."""

    def __init__(self, cache: EncoderCache | None) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Yield the current values. Without a store the families have no samples."""
        cache = self._cache
        operations = {} if cache is None else cache.operations
        found = {} if cache is None else {("lookup",): cache.found_bytes}
        circuits = {} if cache is None else cache.open_circuits
        yield metric_defs.STORE_OPERATIONS.metric_family(operations.items())
        yield metric_defs.STORE_BYTES.metric_family(found.items())
        yield metric_defs.CIRCUIT_OPEN.metric_family(
            [((name,), is_open) for name, is_open in circuits.items()]
        )


class ConversationsGlance(Collector):
    """Stored conversations, and the results of their next turns."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def collect(self) -> Iterator[Metric]:
        """Yield the current values. Conversations in Redis are not counted."""
        kept, results = self._conversations.entry_count, self._conversations.results
        yield metric_defs.CONVERSATIONS.metric_family([] if kept is None else [((), kept)])
        yield metric_defs.CONVERSATION_TURNS.metric_family(
            [((result,), results[result]) for result in RESULTS]
        )
        yield metric_defs.CONVERSATIONS_EVICTED.metric_family(
            [((), self._conversations.dropped_count)]
        )
