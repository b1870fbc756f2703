"""Sums of metrics over processes, compared with one process that counted everything itself."""

from collections.abc import Iterable
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from epd.observe.metric_sums import dump, load, merge_pages

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


def test_a_family_keeps_its_name_kind_and_words() -> None:
    before = list(Process([("counter", "a", 1), ("histogram", "a", 1)]).registry.collect())
    after = merge_pages([load(dump(before))])

    assert [(one.name, one.type, one.documentation) for one in after] == [
        (one.name, one.type, one.documentation) for one in before
    ]
