"""The hit ratio, of what is on the page of metrics. Pure.

It is taken after the items of all workers are added up: the ratios of several say nothing about
that of all.
"""

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.observe.figures import ITEMS, ITEMS_HIT_RATIO, MODEL, Value


class WithHitRatio(Collector):
    """A page, with the ratio of its items; of a model without items there is none.

    Args:
        page: all figures but this one.
    """

    def __init__(self, page: Collector) -> None:
        self._page = page

    def collect(self) -> Iterator[Metric]:
        """All of the page, and the ratio right behind the items."""
        for family in self._page.collect():
            yield family
            if family.name == ITEMS.name:
                yield _of(family)


def _of(items: Metric) -> Metric:
    hits: dict[tuple[Value, ...], float] = defaultdict(float)
    every: dict[tuple[Value, ...], float] = defaultdict(float)
    for _, labels, count, *_ in items.samples:
        model = (labels[MODEL],)
        every[model] += count
        hits[model] += count if labels["result"] == "hit" else 0
    return ITEMS_HIT_RATIO.family([(model, hits[model] / count) for model, count in every.items()])
