"""Sums of metrics over processes, and their form on a page of shared memory.

Counters and histograms are summed in a fixed order and rounded once. Otherwise two processes could
answer sums that differ in the last digit, and Prometheus would take the smaller one for a reset of
the counter.
"""

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

from prometheus_client.metrics_core import Metric

from epd.observe.metric_defs import METRIC_DEFS

_Values = dict[tuple[str, frozenset[tuple[str, str]]], list[float]]

Dumped = list[tuple[str, str, str, list[tuple[Any, ...]]]]
"""Families as JSON: name, documentation, type and samples."""


def dump(families: Iterable[Metric]) -> Dumped:
    """Return families as JSON values, which are finite."""
    return [
        (found.name, found.documentation, found.type, [sample[:3] for sample in found.samples])
        for found in families
    ]


def load(dumped: Dumped | None) -> list[Metric]:
    """Return the families of a page."""
    return [_family(*fields) for fields in dumped or ()]


def counted(families: Iterable[Metric]) -> list[Metric]:
    """Return the families that stay true after a process has ended: counters and histograms."""
    return [family for family in families if family.type != "gauge"]


def merge_pages(pages: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Sum several pages. Families and samples keep the order of their first appearance."""
    families: dict[str, Metric] = {}
    values: dict[str, _Values] = {}
    for family in chain.from_iterable(pages):
        families.setdefault(family.name, family)
        of_family = values.setdefault(family.name, {})
        for name, labels, value, *_ in family.samples:
            of_family.setdefault((name, frozenset(labels.items())), []).append(value)
    return [_added(family, values[name]) for name, family in families.items()]


def _added(family: Metric, values: _Values) -> Metric:
    combine = METRIC_DEFS[family.name].of_workers if family.name in METRIC_DEFS else math.fsum
    samples = [(name, dict(labels), combine(found)) for (name, labels), found in values.items()]
    return _family(family.name, family.documentation, family.type, samples)


def _family(
    name: str, documentation: str, kind: str, samples: Iterable[tuple[str, dict[str, str], float]]
) -> Metric:
    family = Metric(name, documentation, kind)
    for sample in samples:
        family.add_sample(*sample)
    return family
