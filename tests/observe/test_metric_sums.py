"""Sums of metrics over processes, compared with one process that counted everything itself."""

import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from ec_store.opening import open_async_store
from epd.aio import Background
from epd.config import ProxyConfig
from epd.conversations.conversations import Conversations
from epd.edge.admission import Admission
from epd.encoder_cache.client import EncoderCache
from epd.observe.collectors import (
    conversation_metrics,
    instance_metrics,
    kv_event_metrics,
    quarantine_metrics,
    store_metrics,
)
from epd.observe.metric_defs import FIGURES
from epd.observe.metrics import MetricsObserver, with_hit_ratio
from epd.observe.worker_metrics import counted, dump, load, merge_pages
from epd.routing.fatal import FatalRequests
from epd.routing.table import InstanceTable

GAUGES = {name: one.of_workers for name, one in FIGURES.items() if one.kind == "gauge"}
BUCKETS = (1, 5, 25)
LABELS = st.sampled_from(["a", "b", "ü\n\"'\\{}"])
COUNTS = st.tuples(st.just("counter"), LABELS, st.integers(0, 2**40))
TIMES = st.tuples(st.just("histogram"), LABELS, st.integers(0, 50))
WORK = st.lists(COUNTS | TIMES, max_size=20)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Process:
    """Process with a registry of its own, like a worker."""

    def __init__(self, work: Iterable[tuple[str, str, int]] = ()) -> None:
        self.registry = CollectorRegistry()
        self.counter = Counter("c", "Counts.", ["x"], registry=self.registry)
        self.histogram = Histogram("h", "Times.", ["x"], buckets=BUCKETS, registry=self.registry)
        for kind, label, amount in work:
            if kind == "counter":
                self.counter.labels(label).inc(amount)
            else:
                self.histogram.labels(label).observe(amount)

    def page(self) -> list[Metric]:
        return load(dump(self.registry.collect()))


def samples(families: Iterable[Metric]) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(WORK, min_size=1, max_size=5))
def test_sums_of_workers_equal_the_counts_of_one_process(
    works: list[list[tuple[str, str, int]]],
) -> None:
    alone = Process(one for work in works for one in work)

    assert samples(merge_pages([Process(work).page() for work in works])) == samples(alone.page())


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_workers_changes_no_digit(values: list[float], random: Random) -> None:
    pages = []
    for value in values:
        process = Process()
        process.histogram.labels("a").observe(value)
        pages.append(process.page())
    once = samples(merge_pages(pages))
    random.shuffle(pages)

    assert samples(merge_pages(pages)) == once


@given(st.dictionaries(st.sampled_from(list(GAUGES)), st.lists(st.integers(0, 9), min_size=1)))
def test_gauges_are_combined_by_their_mode(values: dict[str, list[int]]) -> None:
    registries = defaultdict[int, CollectorRegistry](CollectorRegistry)
    for name, by_worker in values.items():
        for worker, value in enumerate(by_worker):
            Gauge(name, "", registry=registries[worker]).set(value)
    said = {
        name: value
        for (name, _), value in samples(
            merge_pages(map(CollectorRegistry.collect, registries.values()))
        ).items()
    }

    assert said == {name: GAUGES[name](by_worker) for name, by_worker in values.items()}


def test_the_slowest_and_the_failed_worker_are_shown() -> None:
    def gauges(lag_s: float, success: float, inside: float) -> Iterable[Metric]:
        registry = CollectorRegistry()
        Gauge("epd_event_loop_lag_seconds", "", registry=registry).set(lag_s)
        Gauge("epd_config_last_reload_success", "", registry=registry).set(success)
        Gauge("epd_requests_in_flight", "", registry=registry).set(inside)
        return registry.collect()

    shown = {
        family.name: family.samples[0].value
        for family in merge_pages([gauges(0.5, 1, 3), gauges(0.2, 0, 4)])
    }

    assert shown == {
        "epd_event_loop_lag_seconds": 0.5,
        "epd_config_last_reload_success": 0,
        "epd_requests_in_flight": 7,
    }


def families() -> list[Metric]:
    config = ProxyConfig(encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",))
    observer = MetricsObserver(Admission(config, time.monotonic))
    open_store = partial(open_async_store, "file:///nowhere")
    cache = EncoderCache(open_store, config, Background(lambda *_: None))
    table, conversations = (
        InstanceTable(config.instances),
        Conversations.from_config(config),
    )
    observer.add_source(partial(instance_metrics, table))
    observer.add_source(partial(kv_event_metrics, table, dict))
    observer.add_source(partial(store_metrics, cache))
    observer.add_source(partial(conversation_metrics, conversations))
    fatal = FatalRequests(300.0, lambda _: False, time.monotonic)
    observer.add_source(partial(quarantine_metrics, fatal))
    return list(with_hit_ratio(observer.shown.collect()))


def test_the_page_has_every_figure_and_no_other() -> None:
    shown = {family.name: (family.type, family.documentation) for family in families()}

    assert shown == {name: (one.kind, one.meaning) for name, one in FIGURES.items()}


def test_every_family_is_one_that_can_be_added() -> None:
    assert {family.type for family in families()} == {"counter", "gauge", "histogram"}


def test_counters_of_an_ended_worker_remain() -> None:
    left = counted(families())

    assert {family.type for family in left} == {"counter", "histogram"}
    assert len(left) + len(GAUGES) == len(families())


def test_a_family_keeps_its_name_kind_and_words() -> None:
    before, after = families(), merge_pages([load(dump(families()))])

    assert [(one.name, one.type, one.documentation) for one in after] == [
        (one.name, one.type, one.documentation) for one in before
    ]
