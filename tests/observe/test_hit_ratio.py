"""Hit ratio on `/metrics`, of one process and of several."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric

from epd.events import ItemResult
from epd.observe.metric_defs import ITEMS, ITEMS_HIT_RATIO
from epd.observe.metrics import with_hit_ratio
from epd.observe.worker_metrics import dump, load, merge_pages

Counts = dict[tuple[str, ItemResult], int]

RESULTS: list[ItemResult] = ["hit", "encoded", "local"]
COUNTS = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(RESULTS)), st.integers(1, 1000)
)


def items(counts: Counts) -> Metric:
    return ITEMS.metric_family(counts.items())


def ratios(page: Iterable[Metric]) -> dict[str, float]:
    return {
        sample.labels["model_name"]: sample.value
        for family in with_hit_ratio(page)
        for sample in family.samples
        if family.name == ITEMS_HIT_RATIO.name
    }


def test_the_hit_ratio_is_per_model_and_excludes_items_that_prefill_encodes() -> None:
    page = items({("a", "hit"): 3, ("a", "encoded"): 2, ("a", "local"): 1, ("b", "encoded"): 5})

    assert ratios([page]) == {"a": 0.5, "b": 0.0}


def test_hit_ratio_is_missing_before_the_first_item() -> None:
    assert ratios([items({})]) == {}
    assert ratios([]) == {}


@given(st.lists(COUNTS, min_size=1, max_size=4))
def test_the_hit_ratio_includes_the_items_of_all_workers(works: list[Counts]) -> None:
    pages = [load(dump([items(counts)])) for counts in works]
    hits, every = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0)
    for counts in works:
        for (model, result), count in counts.items():
            every[model] += count
            hits[model] += count * (result == "hit")

    assert ratios(merge_pages(pages)) == {
        model: hits[model] / count for model, count in every.items() if count
    }
