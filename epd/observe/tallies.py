"""The values of figures that are counted, by their labels.

To count takes a third of the time that prometheus_client needs, to add to a histogram a quarter:
its numbers have locks, and these belong to one event loop. A request meets a dozen of them.
"""

import math
from collections.abc import Sequence

from prometheus_client.metrics_core import Metric

from epd.histogram import Histogram
from epd.observe.figures import Figure, Value

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""Upper bounds of histogram buckets."""


class Counted:
    """A counter's values."""

    def __init__(self, figure: Figure) -> None:
        """Begin at 0: it is shown at once where there are no labels."""
        self.figure = figure
        self._values: dict[tuple[Value, ...], float] = {} if figure.labels else {(): 0.0}

    def add(self, labels: tuple[Value, ...], amount: float = 1) -> None:
        """Count `amount` more."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def collect(self) -> Metric:
        """As it is now."""
        return self.figure.family(self._values.items())


class Spread:
    """A histogram's values."""

    def __init__(self, figure: Figure, bounds: Sequence[float] = SECONDS) -> None:
        """Begin with none; it is shown at once where there are no labels."""
        self.figure = figure
        self._bounds = bounds
        self._values: dict[tuple[Value, ...], Histogram] = {}
        if not figure.labels:
            self.of(())

    def of(self, labels: tuple[Value, ...]) -> Histogram:
        """The one of these labels."""
        found = self._values.get(labels)
        if found is None:
            found = self._values[labels] = Histogram(self._bounds)
        return found

    def collect(self) -> Metric:
        """As it is now."""
        family = Metric(self.figure.name, self.figure.meaning, "histogram")
        for labels, values in self._values.items():
            named, below = self.figure.named(labels), 0
            for bound, count in zip((*values.bounds, math.inf), values.counts, strict=True):
                below += count
                family.add_sample(
                    f"{self.figure.name}_bucket", {**named, "le": _bound(bound)}, below
                )
            family.add_sample(f"{self.figure.name}_count", named, below)
            family.add_sample(f"{self.figure.name}_sum", named, values.sum)
        return family


def _bound(bound: float) -> str:
    return "+Inf" if bound == math.inf else repr(float(bound))
