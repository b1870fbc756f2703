"""What several processes have counted, added up.

Counters and histograms are sums. The fixed order and the one rounding at the end matter: a sum that
came out a last digit smaller when another process is asked would be taken for a counter that began
anew.
"""

import math
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from pydantic import TypeAdapter

from epd.observe.figures import FIGURES

_Sample = tuple[str, dict[str, str], float]
_Values = dict[tuple[str, frozenset[tuple[str, str]]], list[float]]
_Family = tuple[str, str, str, list[_Sample]]
_PAGE = TypeAdapter(list[_Family])


def dump(families: Iterable[Metric]) -> bytes:
    """Their name, documentation, type and samples; values are finite."""
    return _PAGE.dump_json(
        [
            (one.name, one.documentation, one.type, [sample[:3] for sample in one.samples])
            for one in families
        ]
    )


def load(page: bytes) -> list[Metric]:
    """What was dumped.

    Raises:
        ValueError: it is no such page.
    """
    return [_family(*fields) for fields in _PAGE.validate_json(page)]


def counted(families: Iterable[Metric]) -> list[Metric]:
    """What remains true when a process has ended: its counters and histograms."""
    return [family for family in families if family.type != "gauge"]


def added(pages: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One page for all, whose families and samples are in the order in which they first come."""
    families: dict[str, Metric] = {}
    values: dict[str, _Values] = {}
    for family in (family for page in pages for family in page):
        families.setdefault(family.name, family)
        of_family = values.setdefault(family.name, {})
        for name, labels, value, *_ in family.samples:
            of_family.setdefault((name, frozenset(labels.items())), []).append(value)
    return [_added(family, values[name]) for name, family in families.items()]


def _added(family: Metric, values: _Values) -> Metric:
    one = FIGURES[family.name].of_workers if family.name in FIGURES else math.fsum
    samples = [(name, dict(labels), one(found)) for (name, labels), found in values.items()]
    return _family(family.name, family.documentation, family.type, samples)


def _family(name: str, documentation: str, kind: str, samples: Iterable[_Sample]) -> Metric:
    family = Metric(name, documentation, kind)
    for sample in samples:
        family.add_sample(*sample)
    return family
