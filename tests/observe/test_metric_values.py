"""Counters and histograms, compared with prometheus_client's counters and histograms."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from epd import events
from epd.observe.metric_defs import MetricDef
from epd.observe.metric_values import CounterValues, HistogramValues

BOUNDS = (0.1, 0.5, 1, 2.5)
LABELS = st.tuples(st.sampled_from(["m", 'q"\\\n']), st.sampled_from([200, 499]), st.booleans())
VALUES = st.sampled_from([0.0, *BOUNDS]) | st.floats(0, 10)
NAMES = ("model_name", "status", "failed")


def shown(page: Collector) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(generate_latest(page).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def texts(labels: tuple[str, int, bool]) -> tuple[str, str, str]:
    model, status, failed = labels
    return model, str(status), "true" if failed else "false"


@given(st.lists(st.tuples(LABELS, VALUES), max_size=20))
def test_a_spread_is_a_histogram(values: list[tuple[tuple[str, int, bool], float]]) -> None:
    registry = CollectorRegistry()
    theirs = Histogram("h", "Times.", NAMES, buckets=BOUNDS, registry=registry)
    ours = HistogramValues(MetricDef("histogram", "h", "Times.", NAMES), BOUNDS)
    for labels, value in values:
        theirs.labels(*texts(labels)).observe(value)
        ours.histogram_for(labels).add(value)

    assert shown(ours) == shown(registry)


@given(st.lists(st.tuples(LABELS, st.integers(0, 9)), max_size=20))
def test_counted_values_are_counters(values: list[tuple[tuple[str, int, bool], int]]) -> None:
    registry = CollectorRegistry()
    theirs = Counter("c", "Counts.", NAMES, registry=registry)
    ours = CounterValues(MetricDef("counter", "c", "Counts.", NAMES))
    for labels, value in values:
        theirs.labels(*texts(labels)).inc(value)
        ours.add(labels, value)

    assert shown(ours) == shown(registry)


@given(st.lists(VALUES, max_size=20), st.lists(VALUES, max_size=20))
def test_merged_histograms_equal_one_with_all_observations(
    these: list[float], those: list[float]
) -> None:
    one, two, both = (events.Histogram(BOUNDS) for _ in range(3))
    for value in these:
        one.add(value)
    for value in those:
        two.add(value)
    for value in (*these, *those):
        both.add(value)
    one.merge(two)

    assert one.counts == both.counts
    assert abs(one.sum - both.sum) < 1e-9


def test_metrics_without_labels_appear_before_their_first_count() -> None:
    counted = CounterValues(MetricDef("counter", "c", "Counts."))
    spread = HistogramValues(MetricDef("histogram", "h", "Times."), BOUNDS)

    assert shown(counted) == {"c_total[]": 0}
    assert shown(spread)["h_count[]"] == 0
