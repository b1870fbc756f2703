"""Values of counters and histograms: plain dictionaries of one event loop.

Without the locks of prometheus_client, counting takes a third of its time and adding to a histogram
a quarter. A request updates a dozen of them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.events import (
    Histogram,
)
from epd.observe.metric_defs import MetricDef, Value

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""Upper bounds of histogram buckets."""


class CounterValues(Collector):
    """Values of a counter by its labels."""

    def __init__(self, definition: MetricDef) -> None:
        """Start empty, or at 0 for a counter without labels, which is shown at once."""
        self.definition = definition
        self._values: dict[tuple[Value, ...], float] = defaultdict(float)
        if not definition.labels:
            self.add((), 0)

    def add(self, labels: tuple[Value, ...], amount: float = 1) -> None:
        self._values[labels] += amount

    def collect(self) -> Iterator[Metric]:
        yield self.definition.metric_family(self._values.items())


class HistogramValues(Collector):
    """Values of a histogram by its labels."""

    def __init__(self, definition: MetricDef, bounds: Sequence[float] = SECONDS) -> None:
        """Start empty. A histogram without labels is shown at once."""
        self.definition = definition
        self._values = defaultdict[tuple[Value, ...], Histogram](lambda: Histogram(bounds))
        if not definition.labels:
            self.histogram_for(())

    def histogram_for(self, labels: tuple[Value, ...]) -> Histogram:
        return self._values[labels]

    def collect(self) -> Iterator[Metric]:
        family = Metric(self.definition.name, self.definition.meaning, "histogram")
        for labels, values in self._values.items():
            named, below = self.definition.label_values(labels), 0
            for bound, count in zip((*values.bounds, math.inf), values.counts, strict=True):
                below += count
                le = "+Inf" if bound == math.inf else repr(float(bound))
                family.add_sample(f"{self.definition.name}_bucket", {**named, "le": le}, below)
            family.add_sample(f"{self.definition.name}_count", named, below)
            family.add_sample(f"{self.definition.name}_sum", named, values.sum)
        yield family
