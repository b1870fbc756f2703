"""Hit ratio on `/metrics`, of one process and of several."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.events import ItemResult
from epd.observe.metric_defs import ITEMS, ITEMS_HIT_RATIO
from epd.observe.metrics import WithHitRatio
from epd.observe.worker_metrics import dump, load, merge_pages

Counts = dict[tuple[str, ItemResult], int]

RESULTS: list[ItemResult] = ["hit", "encoded", "local"]
COUNTS = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(RESULTS)), st.integers(1, 1000)
)


class Page(Collector):
    """Metrics page with items only."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


def items(counts: Counts) -> Metric:
    return ITEMS.metric_family(counts.items())


def ratios(page: Collector) -> dict[str, float]:
    return {
        sample.labels["model_name"]: sample.value
        for family in WithHitRatio(page).collect()
        for sample in family.samples
        if family.name == ITEMS_HIT_RATIO.name
    }


def test_the_hit_ratio_is_per_model_and_excludes_items_that_prefill_encodes() -> None:
    page = Page(
        [items({("a", "hit"): 3, ("a", "encoded"): 2, ("a", "local"): 1, ("b", "encoded"): 5})]
    )

    assert ratios(page) == {"a": 0.5, "b": 0.0}


def test_hit_ratio_is_missing_before_the_first_item() -> None:
    assert ratios(Page([items({})])) == {}
    assert ratios(CollectorRegistry()) == {}


def test_one_worker_with_few_items_weighs_little() -> None:
    few, many = items({("m", "hit"): 1}), items({("m", "hit"): 1, ("m", "encoded"): 9})

    assert ratios(Page(merge_pages([[few], [many]]))) == {"m": pytest.approx(2 / 11)}


@given(st.lists(COUNTS, min_size=1, max_size=4))
def test_the_hit_ratio_includes_the_items_of_all_workers(works: list[Counts]) -> None:
    pages = [load(dump([items(counts)])) for counts in works]
    hits, every = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0)
    for counts in works:
        for (model, result), count in counts.items():
            every[model] += count
            hits[model] += count * (result == "hit")

    assert ratios(Page(merge_pages(pages))) == {
        model: hits[model] / count for model, count in every.items() if count
    }
